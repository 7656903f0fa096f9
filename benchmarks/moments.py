"""Whether what a slow run says when it is interrupted is true, at any moment.

    python -m benchmarks.moments [MOMENTS]

A run of the chat model (`make chat-model`) on rows of sums, and the export of one, get SIGINT or
SIGTERM at moments spread evenly over each stage: the conversion of the model, the start, the
loading, the search for sigma, an evaluation with the first generation, more of them, the export.
Each has to end with code 130 within ten seconds, and its last line has to say what is so: every
path in it is there, the command in it goes on with the run as far as the engine, "the same command"
begins it, nothing is left half done, and no clock of what was announced before went on in a
generation.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import CHAT_MODEL, report, row
from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.runs.history.store import read_history

ENDS_WITHIN = 10.0
STARTED = 120.0
"""Seconds that a command may take until it loads the model."""
LOADS = r"(.*: )?(loading|rebuilding) |converting "
CONVERTS, FIRST, EXPORTED = "converting", "generation 1/", "exported "
CLOCK = re.compile(r"  … \d+ s")
AGAIN = "nothing has changed: run the same command again"
NOT_WRITTEN = "nothing was written, so run the same command again"
BOOT = 0.3
"""Seconds in which Python itself starts, and hears signals as any program of it."""
OPTIONS = (
    *("data=rows.jsonl", "prompt={question}", "reward=rewards.py:score", "batch=2"),
    *(f"model_name={CHAT_MODEL}", "dataset.num_test=8", "sampling.max_tokens=48"),
    *("optimizer.population_size=8", "num_generations=50", "size=none", "log_path=run"),
)

GIVEN = ("optimizer.sigma=0.008", "optimizer.learning_rate=0.008")


@dataclasses.dataclass(frozen=True)
class Case:
    """A command and when it gets which signal: so long after a line that begins so."""

    words: Sequence[str]
    after: str
    seconds: float
    number: signal.Signals

    @property
    def cache(self) -> str:
        """The name of the cache: that of converted models, or an empty one."""
        return "fresh" if self.after == CONVERTS else "cache"


@dataclasses.dataclass(frozen=True)
class Seen:
    """Observations of a case: its stage, how long its end took, and what was wrong."""

    stage: str
    seconds: float
    wrong: str


class Desk:
    """A directory with all that the commands need, and the caches of converted models."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [
            {"question": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)}
            for a, b in itertools.product(range(1, 9), repeat=2)
        ]
        (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "rewards.py").write_text(
            'def score(text, row):\n    return float(row["answer"] in text)\n'
        )

    def start(self, words: Sequence[str], cache: str) -> "subprocess.Popen[str]":
        """Start `python -m es_cookbook …`, with both streams in `output.txt`."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = os.environ | {CACHE: str(self.path / cache), "PATH": path}
        root = str(Path(__file__).parents[1])
        with (self.path / "output.txt").open("w") as output:
            return subprocess.Popen(
                words,
                cwd=self.path,
                env=environment | {"PYTHONPATH": root},
                stdout=output,
                stderr=output,
                text=True,
            )

    def lines(self) -> list[str]:
        """Return the output of the last command."""
        return (self.path / "output.txt").read_text().splitlines()

    def comes(self, process: "subprocess.Popen[str]", pattern: str) -> bool:
        """Wait for a line that begins so; whether it came."""
        began = time.monotonic()
        while not any(re.match(pattern, line) for line in self.lines()):
            if process.poll() is not None or time.monotonic() - began > STARTED:
                return any(re.match(pattern, line) for line in self.lines())
            time.sleep(0.02)
        return True

    def until(self, words: Sequence[str], cache: str, pattern: str) -> str:
        """Run a command until a line begins so, and kill it; why that did not come."""
        process = self.start(words, cache)
        came = self.comes(process, pattern)
        process.kill()
        process.wait()
        return "" if came else f"{shlex.join(words)}: {self.lines()[-1:]}"

    def clear(self) -> None:
        """Restore the original state."""
        for name in ("run", "out", "fresh"):
            shutil.rmtree(self.path / name, ignore_errors=True)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "es_cookbook", *words]


def seen(desk: Desk, case: Case) -> Seen:
    """Run a case."""
    desk.clear()
    process = desk.start(case.words, case.cache)
    desk.comes(process, case.after) if case.after else time.sleep(BOOT)
    time.sleep(case.seconds)
    process.send_signal(case.number)
    began = time.monotonic()
    try:
        code = process.wait(3 * ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    took, lines = time.monotonic() - began, desk.lines()
    stage = next((line for line in lines[-2::-1] if not CLOCK.fullmatch(line)), "")
    if lines[-1:] and lines[-1].startswith(EXPORTED):  # Python itself ends; there is the output.
        return Seen(lines[-1][:60], took, "" if (desk.path / "out").is_dir() else "no output")
    wrong = wrong_end(code, took, lines) or wrong_files(desk, stage)
    return Seen(stage[:60], took, wrong or wrong_advice(desk, case, lines[-1]))


def wrong_end(code: int, took: float, lines: Sequence[str]) -> str:
    """Return errors in the way it ended."""
    if code != 130 or took > ENDS_WITHIN:
        return f"code {code} after {took:.1f} s"
    if not lines or not lines[-1].startswith("interrupted"):
        return f"said {lines[-1:]}"
    evaluated = next((i for i, line in enumerate(lines) if line.startswith(FIRST)), None)
    if evaluated is not None and any(map(CLOCK.fullmatch, lines[evaluated:])):
        return "a clock went on in a generation"
    return ""


def wrong_files(desk: Desk, stage: str) -> str:
    """Return files that should not be left."""
    left = [*desk.path.rglob("*.partial"), *desk.path.glob("run/lock")]
    if left or (desk.path / "out").exists():
        return f"left {[str(path) for path in left] or 'out'}"
    converted = (desk.path / "fresh" / "models").glob("*[!k]")  # All but locks.
    if stage.startswith(CONVERTS):
        return "".join(f"left {path}" for path in converted)
    return ""


def wrong_advice(desk: Desk, case: Case, said: str) -> str:
    """Return errors in the claims of the last line, and in following its advice."""
    if said.endswith((AGAIN, NOT_WRITTEN)):
        if (desk.path / "run").exists():
            return "the run has begun"
        return desk.until(case.words, case.cache, LOADS)
    words = shlex.split(said.partition("to go on: ")[2])
    paths = [value for word in words for _, _, value in [word.partition("=")] if "/" in value]
    run = desk.path / "run"
    if words[-1:] and not all((desk.path / path).exists() for path in [*paths, "run"]):
        return f"names what is not there: {said}"
    recorded = len(list(read_history(run / "history.jsonl")))
    when = f"after generation {recorded};" if recorded else "before the first generation ended;"
    if when not in said:
        return f"{recorded} generations, and said {said}"
    return desk.until(words, case.cache, LOADS) if words else f"no command: {said}"


def times(desk: Desk, words: Sequence[str], cache: str, lines: Sequence[str]) -> list[float]:
    """Return seconds of a command to each of these lines, from the one before."""
    process, found = desk.start(words, cache), list[float]()
    for line in lines:
        began = time.monotonic()
        if not desk.comes(process, line):
            raise SystemExit(f"no line {line}: {desk.lines()[-1:]}")
        found.append(time.monotonic() - began)
    process.kill()
    process.wait()
    return found


def cases(desk: Desk, moments: int) -> list[Case]:
    """Return moments spread over the stages, as long as they take undisturbed."""
    train = command("train", *OPTIONS)
    given = [*train, *GIVEN]
    loads, searches, evaluates, goes_on = (
        "run: loading",
        "looking for",
        "evaluating",
        FIRST,
    )
    converting = times(desk, train, "cache", [CONVERTS, loads])[1]
    desk.clear()
    start, loading, searching = times(desk, train, "cache", [loads, searches, evaluates])
    desk.clear()
    lines = [evaluates, goes_on, "generation 3/"]
    _, evaluating, generations = times(desk, given, "cache", lines)
    shutil.copytree(desk.path / "run", desk.path / "trained")
    export = command("export", "log_path=trained", "output=out", "trust=rewards.py")
    (exporting,) = times(desk, export, "cache", [EXPORTED])
    stages = [
        *((train, CONVERTS, converting), (train, "", start - BOOT), (train, loads, loading)),
        *((train, searches, searching), (given, evaluates, evaluating)),
        *((given, goes_on, generations), (export, "", exporting - BOOT)),
    ]
    numbers, found = itertools.cycle((signal.SIGINT, signal.SIGTERM)), list[Case]()
    for i, (words, after, seconds) in enumerate(stages):
        count = (moments + i) // len(stages)
        found += [
            Case(words, after, seconds * (k + 0.5) / count, next(numbers)) for k in range(count)
        ]
    return found


def main(moments: int) -> None:
    """Run all cases, and report."""
    desk = Desk(Path(tempfile.mkdtemp()))
    found = list(map(functools.partial(told, desk), cases(desk, moments)))
    shutil.rmtree(desk.path)
    ends = [each.seconds for each in found]
    rows = [
        row("moments of a slow run, and of its export", [len(found)], ""),
        row("that left or said what is not so", [sum(bool(s.wrong) for s in found)], "", at_most=0),
        row("signal to the end, longest", [max(ends)], "s", at_most=ENDS_WITHIN),
        row("signal to the end", ends, "s"),
    ]
    report("moments", rows)


def told(desk: Desk, case: Case) -> Seen:
    """Run a case, and print what was seen."""
    found = seen(desk, case)
    what = f"{case.words[3]:6} {case.number.name:7} {case.seconds:5.1f} s after {case.after!r:14}"
    print(f"{what} in {found.seconds:.2f} s {found.wrong or 'ok'}: {found.stage}", flush=True)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
