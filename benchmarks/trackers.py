"""What trackers, rollout records and a profile cost of a generation.

    python -m benchmarks.trackers
    python -m benchmarks.trackers --generations 10

One run of the main job (64 rank-1 genomes × 32 Countdown problems, the bundled model, the torch
engine) with all trackers, each timed while it works: `metrics.jsonl` and `rollouts.jsonl`, W&B
offline, TensorBoard, and the live view on a screen of 100 columns. W&B and TensorBoard keep
rollouts every generation, which is more often than by default. So each share is of the same
generations, tracker's seconds over all seconds. What their own threads and processes do beside the
run is not in it; nor is Trackio, which writes in a thread.

And a run with a profile and one without, by turns: seconds of a generation. Generations that are
measured are the same ones in every run, but for the first, in which things are made that stay.
"""

import argparse
import asyncio
import io
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import chz
from rich.console import Console

from benchmarks.harness import ratios, report, row
from es_cookbook.plugins.trackers.libraries import TensorboardTrackerBuilder, WandbTrackerBuilder
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.rl.types import TrajectoryGroup
from es_cookbook.runs.config import Config
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.base import Decode, RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from es_cookbook.runs.tracking.live import LiveTracker

SECONDS: dict[str, list[float]] = {}
"""Tracker -> seconds in each generation."""
ALL = "all of them"


class Timed(Tracker):
    """Wraps a tracker and times it."""

    def __init__(self, name: str, inner: Tracker) -> None:
        self._inner = inner
        self._spent = SECONDS.setdefault(name, [])
        self._begins = True

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        """Begin the time of a generation: this is a tracker's first call in it."""
        began = time.perf_counter()
        self._inner.log_rollouts(generation, groups_P, decode)
        self._spent.append(time.perf_counter() - began)

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        """Log after it, in the same generation."""
        began = time.perf_counter()
        self._inner.log(generation, metrics)
        self._spent[-1] += time.perf_counter() - began

    def recorded(self, generations: int) -> None:
        """Record after it, in the same generation."""
        began = time.perf_counter()
        self._inner.recorded(generations)
        self._spent[-1] += time.perf_counter() - began

    def close(self) -> None:
        """Close without being timed, once a run."""
        self._inner.close()


@chz.chz
class AllTimed(TrackerBuilder):
    """All trackers, timed."""

    def __call__(self, run: RunInfo) -> Tracker:
        """Open all trackers."""
        screen = Console(file=io.StringIO(), width=100, force_terminal=True)
        made = {
            "metrics.jsonl and rollouts.jsonl": JsonlTrackerBuilder()(run),
            "W&B offline": WandbTrackerBuilder(rollouts_every=1)(run),
            "TensorBoard": TensorboardTrackerBuilder()(run),
            "the live view": LiveTracker(run, screen),
        }
        return Trackers([Timed(name, tracker) for name, tracker in made.items()])


def generations(config: Config) -> list[float]:
    """Return seconds of each generation of a run, but for the first."""
    asyncio.run(train(config))
    rows = read_metrics(Path(config.log_path) / "metrics.jsonl")
    return [row["time/total"] for row in rows if "time/total" in row][1:]


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept, mock.patch.dict(os.environ, WANDB_MODE="offline"):
        config = CLIConfig(
            num_generations=options.generations,
            eval_every=0,
            log_path=f"{kept}/trackers",
            trackers=AllTimed(),
        )
        seconds = generations(config)
        spent = {name: each[1 : len(seconds) + 1] for name, each in SECONDS.items()}
        spent[ALL] = [sum(each) for each in zip(*spent.values(), strict=True)]
        rows = [
            row(
                f"{name}, share of a generation",
                [100 * ratio for ratio in ratios(each, seconds)],
                "%",
                at_most=2 if name == ALL else None,
            )
            for name, each in spent.items()
        ]
        rows.append(row("a generation", seconds, "s"))
        by_turns: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(options.repeats):
            for profile, found in by_turns.items():
                log_path = f"{kept}/{profile}-{repeat}"
                short = {"num_generations": 3, "trackers": JsonlTrackerBuilder()}
                again = chz.replace(config, log_path=log_path, profile=profile, **short)
                found.append(statistics.fmean(generations(again)))
        rows.append(
            row(
                "a generation with a profile / without",
                ratios(by_turns[True], by_turns[False]),
                "x",
            )
        )
    report("trackers", rows)


if __name__ == "__main__":
    main()
