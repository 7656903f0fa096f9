"""A generation is written in one order, and counts when its history line is on the disk."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import chz
import pytest

from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.schedules import Linear
from es_cookbook.rl.types import TrajectoryGroup
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from tests.fakes import FakeEngineBuilder
from tests.tiny_run import TinyConfig, tiny


@chz.chz
class WatchingBuilder(TrackerBuilder):
    """Builds JSONL files, and a tracker that notes how much is recorded at each call."""

    def __call__(self, run: RunInfo) -> Tracker:
        return Trackers([JsonlTrackerBuilder()(run), Watching(run.path)])


class Watching(Tracker):
    calls: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls.clear()

    def note(self, call: str, number: int = 0) -> None:
        self.calls.append((call, number, len(list(read_history(self.path / "history.jsonl")))))

    def metrics(self) -> Mapping[str, float]:
        return {"watching/calls": float(len(self.calls))}

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self.note("log", generation)

    def log_rollouts(
        self,
        generation: int,
        groups_P: Sequence[TrajectoryGroup],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.note("log_rollouts", generation)

    def recorded(self, generations: int) -> None:
        self.note("recorded", generations)

    def finish(self) -> None:
        self.note("finish")

    def close(self) -> None:
        self.note("close")


def short(log_path: Path, **fields: Any) -> TinyConfig:
    return tiny(log_path, **{"trackers": WatchingBuilder(), "num_generations": 2} | fields)


async def test_trackers_are_told_in_order_and_only_of_what_counts(tmp_path: Path) -> None:
    await train(short(tmp_path))
    assert Watching.calls == [
        ("log_rollouts", 0, 0),
        ("log", 0, 0),
        ("recorded", 1, 1),
        ("log_rollouts", 1, 1),
        ("log", 1, 1),
        ("recorded", 2, 2),
        ("log", 2, 2),
        ("recorded", 2, 2),
        ("finish", 0, 2),
        ("close", 0, 2),
    ]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("watching/calls") for row in rows] == [0.0, 3.0, None]


async def test_sigma_and_learning_rate_are_those_of_the_generation(tmp_path: Path) -> None:
    schedules: Any = {"sigma_schedule": Linear(final=0.5), "learning_rate_schedule": Linear()}
    es = ES(population_size=2, sigma=0.1, learning_rate=0.05, **schedules)
    await train(short(tmp_path, optimizer=es))
    *rows, last = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["optimizer/learning_rate"] for row in rows] == [0.05, 0.025]
    assert [row["optimizer/sigma"] for row in rows] == pytest.approx([0.1, 0.075])
    assert "optimizer/sigma" not in last, "no generation"


async def test_a_run_that_ended_before_its_last_evaluation_only_evaluates(tmp_path: Path) -> None:
    await train(short(tmp_path))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:-1]))
    await train(short(tmp_path))
    assert [call for call, _, _ in Watching.calls] == ["log", "recorded", "finish", "close"]


async def test_a_run_that_fails_is_closed_and_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> int:
        raise InterruptedError

    monkeypatch.setattr("tests.fakes.FakeEngine.apply", fails)
    with pytest.raises(InterruptedError):
        await train(short(tmp_path))
    assert Watching.calls == [("close", 0, 0)]
    assert FakeEngineBuilder.made[-1].closed
