"""Code that holds the event loop is interrupted where it stands, and loses its own rollout."""

import functools
import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from es_cookbook import train
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from tests.blocking import SIX_KINDS, BlockingConfig, DatasetBuilder
from tests.tiny_run import write_tiny_model

pytestmark = pytest.mark.anyio
TIMEOUT = 0.3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def history(
    model: Path, log_path: Path, where: str, kind: str, timeout: float = TIMEOUT
) -> tuple[bytes, float]:
    """A run's history, and the seconds that its rollouts took in the generation of interest."""
    config = BlockingConfig(
        model_name=str(model),
        log_path=str(log_path),
        engine=TorchEngineBuilder(num_lanes=1),
        trackers=JsonlTrackerBuilder(),
        dataset=DatasetBuilder(where=where, kind=kind),
        rollout_timeout=timeout,
    )
    await train.main(config)
    rows = read_metrics(log_path / "metrics.jsonl")
    lost = [row["rollouts/failed"] for row in rows if "rollouts/failed" in row]
    whole = where in ("make_envs", "group_rewards")
    assert lost == [0, 0 if where == "close" else 4 if whole else 1, 0]
    return (log_path / "history.jsonl").read_bytes(), rows[1]["time/sample"]


@pytest.fixture(scope="module")
def failed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """The history of a run whose Env raised instead, by the place."""

    def made(where: str) -> bytes:
        log_path = tmp_path_factory.mktemp("failed")
        return anyio.run(history, model, log_path, where, "fail")[0]

    return functools.cache(made)


@pytest.mark.parametrize("where", ["sync", "async"])
@pytest.mark.parametrize("kind", [kind.__name__ for kind in SIX_KINDS])
def test_an_env_that_blocks_loses_its_own_rollout_as_one_that_raises(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], where: str, kind: str
) -> None:
    blocked, seconds = anyio.run(history, model, tmp_path / "run", where, kind)
    assert TIMEOUT <= seconds < TIMEOUT + 2
    assert blocked == failed(where)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("initial_observation", "sleep"),
        ("task", "sleep"),
        ("make_envs", "sleep"),
        ("group_rewards", "sleep"),
        ("close", "sleep"),
        ("sync", "empty_queue"),
        ("sync", "program"),
        ("sync", "swallow_everything"),
        ("task", "swallow_everything"),
    ],
)
def test_wherever_it_blocks_and_whatever_it_swallows(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], where: str, kind: str
) -> None:
    blocked, seconds = anyio.run(history, model, tmp_path / "run", where, kind)
    assert TIMEOUT <= seconds < TIMEOUT + 2
    assert blocked == failed(where)


@pytest.mark.parametrize(
    "kind", ["leave", "give_up", "stop_iteration", "cancelled", "cancelled_in_a_group"]
)
def test_what_an_env_raises_to_end_things_ends_its_own_rollout(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], kind: str
) -> None:
    for where in ("sync", "async", "group_rewards"):
        ended, _ = anyio.run(history, model, tmp_path / where, where, kind)
        assert ended == failed(where)


@pytest.mark.parametrize("where", ["initial_observation", "sync", "async", "group_rewards"])
def test_an_env_that_cancels_its_own_task_loses_its_own_rollout(
    model: Path, tmp_path: Path, failed: Callable[[str], bytes], where: str
) -> None:
    ended, _ = anyio.run(history, model, tmp_path / where, where, "cancel_itself")
    assert ended == failed(where)
