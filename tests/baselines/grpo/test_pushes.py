"""Checkpoints are pushed to branches of their own while a run goes on, and measured there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import chz
import pytest

from es_cookbook.baselines.grpo import main
from es_cookbook.runs.checkpoints import latest_checkpoint
from es_cookbook.runs.hub.background_push import CheckpointPush
from tests.grpo_runs import grpo_config, metrics_of
from tests.hub_server import HubServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.lead_here(monkeypatch)
        yield server


class Seen:
    """What a function of the user's was called with."""

    pushed: ClassVar[list[tuple[str, bytes]]] = []


def look(directory: Path, branch: str) -> None:
    Seen.pushed.append((branch, (directory / "model.safetensors").read_bytes()))
    raise ValueError("the run goes on")


async def test_the_last_checkpoint_is_on_its_branch_byte_for_byte(
    hub: HubServer, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Seen.pushed.clear()
    push = CheckpointPush(repo_id="me/model", revision="tuned", then=look)
    short = {"num_generations": 2, "checkpoint_every": 2, "eval_every": 0}
    await main(grpo_config(model, tmp_path, **short, hub=push))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    branch = "tuned-step-000000002"
    assert set(hub.repositories["me/model"].branches) == {"main", branch}
    kept = {path.name: path.read_bytes() for path in checkpoint.model.iterdir()}
    assert hub.files("me/model", branch) == kept
    assert Seen.pushed == [(branch, kept["model.safetensors"])]
    assert "hub.then: ValueError: the run goes on" in caplog.text
    assert metrics_of(tmp_path)[-1]["test/reward/mean"] > 0


@pytest.mark.slow
async def test_what_was_pushed_is_measured_on_other_problems(
    hub: HubServer, model: Path, tmp_path: Path
) -> None:
    push = CheckpointPush(
        repo_id="me/model",
        evaluate=("recipe=arithmetic", "dataset.num_test=2", "sampling.max_tokens=2"),
    )
    short = {"num_generations": 1, "eval_every": 0}
    await main(grpo_config(model, tmp_path, **short, hub=push))
    found = json.loads((tmp_path / "pushed" / "main-step-000000001.json").read_text())
    assert found["settings"]["problems"] == "arithmetic"
    assert len(found["problems"]) == 2


async def test_a_hub_that_fails_does_not_stop_the_run(
    hub: HubServer, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push = CheckpointPush(repo_id="me/model")
    hub.fail_with = 501
    await main(grpo_config(model, tmp_path, num_generations=1, eval_every=0, hub=push))
    assert "it answered with status 501; the run goes on" in caplog.text
    assert not (tmp_path / "pushed").exists()
    assert chz.asdict(push)["every"] == 1
