"""What 200 SIGKILLs cost: no generation that was reported done, and not a bit.

    python -m benchmarks.kills [KILLS]

One process imports everything and then forks a child for each attempt, while it has no threads
other than its main one; so an attempt takes a fraction of a second. A child trains a tiny model on
the torch engine (`tests.tiny_run`), resuming what is there, and prints what every user sees: a line
per generation. It gets a SIGKILL either while it starts (loads, replays, repairs) or at a random
moment of a generation, counted from such a line. When a run is over, its files are compared with
those of an undisturbed run, and the next run begins, with another seed.
"""

import dataclasses
import functools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# Before torch is imported: the process that forks must not have other threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import chz
import transformers  # noqa: F401 - before the forks, so that no child has to

from benchmarks.harness import report, row
from es_cookbook.checkpoints import models  # noqa: F401 - for the same reason
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.tiny_run import TinyConfig, untimed, write_tiny_model

IN_START_UP = 0.25
"""Share of the kills that do not wait for a generation."""


@dataclasses.dataclass
class Found:
    """What a campaign found.

    Attributes:
        kills: SIGKILLs that hit a run on its way.
        runs: that were brought to their end.
        lost: generations that had been reported done and were not in the history afterwards.
        differing_bits: of the histories (fingerprints included), against undisturbed runs.
        differing_lines: of metrics (times apart) and rollouts.
        moments: what stood on the disk after a kill -> how often.
    """

    kills: int = 0
    runs: int = 0
    lost: int = 0
    differing_bits: int = 0
    differing_lines: int = 0
    moments: dict[str, int] = dataclasses.field(default_factory=dict)


class Child:
    """A forked process that does some work; `read` gives lines of its standard output."""

    def __init__(self, work: Callable[[], object], errors: Path) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _run_and_exit(work, writing, errors)
        os.close(writing)
        self._lines = os.fdopen(reading)

    def read(self, count: int) -> list[str]:
        """Return this many lines, or fewer if it ends before."""
        found = [self._lines.readline() for _ in range(count)]
        return [line for line in found if line.endswith("\n")]

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end: its exit code (negative: the signal), and what else it printed."""
        rest = [line for line in self._lines if line.endswith("\n")]
        self._lines.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


def _run_and_exit(work: Callable[[], object], standard_output: int, errors: Path) -> NoReturn:
    os.dup2(standard_output, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def campaign(directory: Path, kills: int, seed: int = 0, num_generations: int = 12) -> Found:
    """Kill runs of so many generations until there were so many kills, and finish the last one."""
    chooser = random.Random(seed)
    found = Found()
    errors = directory / "errors.txt"

    def done(work: Callable[[], object]) -> list[str]:
        code, said = Child(work, errors).end()
        assert code == 0, errors.read_text()
        return said

    done(functools.partial(write_tiny_model, directory / "model"))
    while found.kills < kills:
        killed = TinyConfig(
            model_name=str(directory / "model"),
            log_path=str(directory / f"killed{found.runs}"),
            engine=TorchEngineBuilder(num_lanes=1),
            trackers=TrackersBuilder(),
            seed=found.runs,
            num_generations=num_generations,
            behavior_if_log_dir_exists="resume",
        )
        unbroken = chz.replace(killed, log_path=str(directory / f"unbroken{found.runs}"))
        start_up, generation = _seconds(unbroken, errors)
        reported = 0
        while True:
            child = Child(functools.partial(anyio.run, train, killed), errors)
            if chooser.random() < IN_START_UP:
                lines: list[str] = []
                time.sleep(chooser.uniform(0, start_up))
            else:
                lines = child.read(chooser.choice((1, 1, 2)))
                time.sleep(chooser.uniform(0, 1.2 * generation))
            if found.kills < kills:
                os.kill(child.pid, signal.SIGKILL)
            code, rest = child.end()
            reported = max([reported, *map(generation_in, lines + rest)])
            assert code in (0, -signal.SIGKILL), errors.read_text()
            recorded = len(list(read_history(Path(killed.log_path) / "history.jsonl")))
            found.lost += max(0, reported - recorded)
            if code == 0:
                break
            found.kills += 1
            when = moment(Path(killed.log_path), recorded, bool(lines + rest))
            found.moments[when] = found.moments.get(when, 0) + 1
        found.runs += 1
        found.differing_bits += differing_bits(killed.log_path, unbroken.log_path)
        found.differing_lines += differing_lines(killed.log_path, unbroken.log_path)
    return found


def _seconds(unbroken: TinyConfig, errors: Path) -> tuple[float, float]:
    """Let a run end undisturbed: seconds to its first line, and of a generation."""
    times = [time.perf_counter()]
    child = Child(functools.partial(anyio.run, train, unbroken), errors)
    while child.read(1):
        times.append(time.perf_counter())
    code, _ = child.end()
    assert code == 0, errors.read_text()
    return times[1] - times[0], (times[-2] - times[1]) / (len(times) - 3)


def generation_in(line: str) -> int:
    """Return how many generations are done by a line of the live view."""
    found = re.match(r"generation (\d+)/", line)
    return int(found[1]) if found else 0


def moment(path: Path, recorded: int, reported: bool) -> str:
    """Return when a kill came, from what is on the disk."""
    if any(path.glob("*.partial")):
        return "while a file was being replaced"
    if not reported:
        return "while starting"
    for name, key in (("metrics", "progress/generation"), ("rollouts", "generation")):
        text = (path / f"{name}.jsonl").read_text()
        if not text.endswith("\n"):
            return f"in a line of {name}"
        if json.loads(text.splitlines()[-1])[key] == recorded:
            return f"between {name} and the history"
    whole = (path / "history.jsonl").read_bytes().endswith(b"\n")
    return (
        "in a generation, before its first line on the disk"
        if whole
        else "in a line of the history"
    )


def differing_bits(killed: str, unbroken: str) -> int:
    """Return the bits in which two histories differ; a missing byte counts 8."""
    one, other = ((Path(p) / "history.jsonl").read_bytes() for p in (killed, unbroken))
    differing = sum((a ^ b).bit_count() for a, b in zip(one, other, strict=False))
    return differing + 8 * abs(len(one) - len(other))


def differing_lines(killed: str, unbroken: str) -> int:
    """Return lines of metrics and rollouts that differ in anything but times."""
    differing = 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        one, other = (untimed(Path(path) / name) for path in (killed, unbroken))
        differing += sum(a != b for a, b in zip(one, other, strict=False))
        differing += abs(len(one) - len(other))
    return differing


def main(kills: int) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        found = campaign(Path(directory), kills, num_generations=30)
    rows = [
        row("SIGKILLs at random moments", [found.kills], "kills"),
        *(
            row(f"of them {moment}", [count], "kills")
            for moment, count in sorted(found.moments.items())
        ),
        row("runs brought to their end by resuming", [found.runs], "runs"),
        row("generations lost that had been reported done", [found.lost], "", at_most=0),
        row("differing bits of the histories", [found.differing_bits], "", at_most=0),
        row("differing lines of metrics and rollouts", [found.differing_lines], "", at_most=0),
        row("time of it all", [time.perf_counter() - began], "s"),
    ]
    report("kills", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["200"]))
