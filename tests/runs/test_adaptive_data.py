"""Batches that depend on results, temperatures that change, and batches dealt out to pairs.

A run with all of it goes on, forks and is played as if it had never stopped.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.evolution.schedules import HotSteps, Table
from es_cookbook.plugins.branches import fork
from es_cookbook.plugins.mixtures.mixture import Mixture, Part
from es_cookbook.plugins.mixtures.selection import Curriculum, Filter, Replay
from es_cookbook.plugins.objectives.weighted import RewardSchedule
from es_cookbook.rl.data.task import Task
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import open_run, rebuild
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from tests.tiny_run import TinyConfig, tiny, write_tiny_model


def odd(text: str, row: Mapping[str, object]) -> tuple[float, dict[str, float]]:
    """A share of odd characters."""
    share = sum(ord(character) % 2 for character in text) / max(len(text), 1)
    return share, {"correct": float(share > 0.5), "format": float(len(text) > 2)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows")
    for name, first in (("easy", 33), ("hard", 65)):
        lines = [json.dumps({"question": chr(first + i)}) for i in range(30)]
        (path / f"{name}.jsonl").write_text("\n".join(lines))
    write_tiny_model(path / "model")
    return path


def config(log_path: Path, rows: Path, **fields: Any) -> TinyConfig:
    def part(name: str) -> Part:
        task = Task(
            source=str(rows / f"{name}.jsonl"), reward=odd, problems_per_generation=1, num_test=2
        )
        return Part(dataset=task, tag=name, max_tokens=3 if name == "easy" else None)

    settings: dict[str, Any] = {
        "model_name": str(rows / "model"),
        "dataset": Mixture(
            parts=(part("easy"), part("hard")),
            problems_per_generation=8,
            curriculum=Curriculum(window=2),
            filter=Filter(generations=2),
            replay=Replay(warmup=1, fraction=0.5),
        ),
        "objective": RewardSchedule(over=4),
        "temperature_schedule": HotSteps(
            schedule=Table(generations=(0, 3), factors=(1.0, 0.5)), every=3, factor=2.0
        ),
        "batch_per_pair": True,
        "num_generations": 6,
        "trackers": JsonlTrackerBuilder(rollouts_per_generation=8),
    }
    return tiny(log_path, **settings | fields)


@pytest.fixture(scope="module")
async def recorded(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run"
    await train(config(path, rows))
    return path


async def test_a_run_records_what_its_batches_follow_from(recorded: Path) -> None:
    records = list(read_history(recorded / "history.jsonl"))
    assert [len(record.results_P) for record in records] == [8] * 6
    assert len({result.problem for record in records for result in record.results_P}) > 8
    assert {result.reward for result in records[0].results_P} > {records[0].results_P[0].reward}
    metrics = list(read_metrics(recorded / "metrics.jsonl"))
    assert "data/share/easy" in metrics[0]
    assert 0 < metrics[2]["data/replayed"] <= 4
    assert metrics[2]["data/left_out"] > 0
    assert "genomes/reliability" not in metrics[0]
    assert "env/easy/correct" in metrics[0]


async def test_every_rollout_comes_back(recorded: Path) -> None:
    rebuilt = await rebuild(open_run(recorded, trust=["tests"]))
    lines = [json.loads(line) for line in (recorded / "rollouts.jsonl").read_text().splitlines()]
    for row in reversed(lines):
        await rebuilt.go_to(row["generation"])
        number = 2 * row["problem"] + row["genome"] // 2  # of two pairs
        played = await rebuilt.play(row["genome"], "train", number, {})
        assert played.reward == row["reward"]
        (turn,) = played.rollout.transitions  # pyright: ignore
        assert turn.action.text == row["turns"][0]["action"]
        assert len(turn.action.tokens_T) <= 4
    await rebuilt.close()


async def test_other_data_are_noticed(rows: Path, tmp_path: Path) -> None:
    own = tmp_path / "rows"
    own.mkdir()
    for path in rows.glob("*.jsonl"):
        (own / path.name).write_bytes(path.read_bytes())
    write_tiny_model(own / "model")
    await train(config(tmp_path / "run", own, num_generations=2))
    (own / "hard.jsonl").write_text((own / "hard.jsonl").read_text().lower())
    with pytest.raises(DataError, match="the recorded problems are others than"):
        await train(config(tmp_path / "run", own))


async def test_a_fork_continues_as_the_run_did(
    recorded: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = f"log_path={recorded} generation=3 output={tmp_path / 'fork'} trust=tests"
    monkeypatch.setattr("sys.argv", ["fork", *options.split()])
    await anyio.to_thread.run_sync(fork.cli)
    await train(config(tmp_path / "fork", rows))
    ours, theirs = (
        (path / "history.jsonl").read_text().splitlines() for path in (tmp_path / "fork", recorded)
    )
    assert ours[1:] == theirs[1:]
