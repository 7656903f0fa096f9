"""Every command against a run whose files are not what they should be: a sentence, and no harm.

    python -m benchmarks.hostile
    python -m benchmarks.hostile resume hub

A small run is trained and copied; a pipe, a device, a link, 20 GB of nothing or another kind of
file takes the place of one of its files or folders; then a command is given that directory, in a
process forked from one that has imported everything. The command has to end by itself, within five
seconds of processor time more than with the good run and with at most 200 MB more, with its result
or one sentence; a directory beside the run stays as it was, and a push contains nothing of it.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

os.environ["HF_HUB_DISABLE_XET"] = "1"  # Which its library reads when it is imported.

import inspect_ai  # noqa: F401 - before the forks, so that no child has to
import matplotlib.pyplot as plt  # noqa: F401 - likewise, as the next
import pandas as pd  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401

from benchmarks.harness import report, row
from es_cookbook import recipes
from es_cookbook.checkpoints import models  # noqa: F401
from es_cookbook.cli import main as es_cookbook
from es_cookbook.engines.torch import host  # noqa: F401
from tests.hub_server import HubServer
from tests.runs.directory.test_hostile_files import FILES, FOLDERS
from tests.runs.directory.test_hostile_files import KINDS as PLACED

MODEL = Path(recipes.__file__).parent / "arithmetic/model"
SECRET = b"nothing of a run: 7dd1f6\n"
SECONDS, MEGABYTES = 5.0, 200.0
HANGS = 90.0
"""Seconds by the clock, after which a command is killed."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "show": ("show", "{run}"),
    "runs": ("runs", "{home}"),
    "report": ("report", "{run}", "output={new}.html"),
    "plot": ("plot", "{run}", "metric=reward/mean", "output={new}"),
    "frames": ("frames", "{run}", "output={new}.csv"),
    "resume": ("resume", "{run}", "num_generations=3"),
    "fork": ("fork", "{run}", "generation=1", "output={new}"),
    "rewind": ("rewind", "{run}", "generation=1"),
    "play": ("play", "{run}"),
    "evaluate": ("evaluate", "{run}", "against=base"),
    "reconsider": ("reconsider", "{run}", "cue=1+1=", "output={new}"),
    "against": ("evaluate", "{good}", "against={run}"),
    "export": ("export", "{run}", "output={new}"),
    "inspect": ("inspect", "{run}", "task={task}", "log_dir={new}"),
    "hub": ("hub", "{run}", "repo_id=me/mine"),
}
TASK = """from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def two():
    return Task(dataset=[Sample(input="1+1", target="2")], scorer=includes())
"""


def _device(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


KINDS: Mapping[str, Callable[[Path], object]] = {**PLACED, "device": _device}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a command; `code` is None if it had to be killed."""

    code: int | None
    seconds: float
    megabytes: float
    said: str

    @property
    def is_a_sentence(self) -> bool:
        """Whether it has its result, or refused in one line."""
        return self.code in (0, 1, 2) and "Traceback" not in self.said


def trained(home: Path) -> Path:
    """Train for two generations on rows, with everything that a run's directory may have."""
    rows = home / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(12)))
    words = ("train", f"data={rows}", f"model_name={MODEL}")
    settings = (
        "num_generations=2",
        "dataset.reward=exact",
        "dataset.num_test=4",
        "dataset.problems_per_generation=4",
    )
    lengths = (
        "optimizer.population_size=4",
        "sampling.max_tokens=4",
        "eval_every=1",
        "snapshot_every=1",
        f"log_path={home / 'good'}",
    )
    command = [sys.executable, "-m", "es_cookbook", *words, *settings, *lengths]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=home)
    for folder in FOLDERS:
        (home / "good" / folder).mkdir(exist_ok=True)
    return home / "good"


def made(home: Path, good: Path, name: str, kind: str) -> None:
    """Make a copy of the run with one of its files replaced by another kind of file."""
    for old in ("run", "outside", "work"):
        shutil.rmtree(home / old, ignore_errors=True)
    shutil.copytree(good, home / "run")
    (home / "work").mkdir()
    (home / "outside").mkdir()
    (home / "outside/secret").write_bytes(SECRET)
    path = home / "run" / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path)


def called(home: Path, good: Path, words: tuple[str, ...]) -> Outcome:
    """Give the command the run, in a fork of this process."""
    places = {"home": home, "run": home / "run", "good": good, "new": home / "work/new"}
    argv = [word.format(**places, task=home / "task.py") for word in words]
    output = home / "output.txt"
    began = time.monotonic()
    if not (pid := os.fork()):
        _become(argv, output, home / "work")
    while not (ended := os.wait4(pid, os.WNOHANG))[0] and time.monotonic() - began < HANGS:
        time.sleep(0.005)
    if not ended[0]:
        os.killpg(pid, signal.SIGKILL)
        ended = os.wait4(pid, 0)
    _, status, used = ended
    code = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
    said = output.read_text(errors="replace")
    return Outcome(code, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, said)


def _become(argv: list[str], output: Path, directory: Path) -> None:
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    asked, asks = os.pipe()
    os.write(asks, b"1+1=\n")
    os.close(asks)
    os.dup2(asked, 0)
    os.chdir(directory)
    sys.argv = ["es-cookbook", *argv]
    code = 1
    try:
        es_cookbook()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def is_untouched(home: Path, hub: HubServer) -> bool:
    """Return whether the directory beside the run is as it was, and nothing of it was pushed."""
    inside = {path.name: path.read_bytes() for path in (home / "outside").iterdir()}
    pushed = (
        content
        for repository in hub.repositories.values()
        for commits in repository.branches.values()
        for commit in commits
        for content in commit.values()
    )
    return inside == {"secret": SECRET} and all(SECRET not in content for content in pushed)


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "task.py").write_text(TASK)
        yield Path(home)


def main(*chosen: str) -> None:
    """Run all commands, or the named ones."""
    counts: Counter[str] = Counter()
    longest = largest = 0.0
    with _place() as home, HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        hub.lead_here(patch)
        good = trained(home)
        for command in chosen or COMMANDS:
            made(home, good, "nothing", "missing")
            usual = called(home, good, COMMANDS[command])
            print(f"{command}: {usual.code}, {usual.seconds:.1f} s, {usual.megabytes:.0f} MB")
            if usual.code:
                raise RuntimeError(f"{command} does not work with a good run: {usual.said}")
            for name in (*FILES, *FOLDERS):
                for kind in KINDS:
                    hub.repositories.clear()
                    made(home, good, name, kind)
                    outcome = called(home, good, COMMANDS[command])
                    seconds = outcome.seconds - usual.seconds
                    megabytes = outcome.megabytes - usual.megabytes
                    longest, largest = max(longest, seconds), max(largest, megabytes)
                    wrong = {
                        "killed": outcome.code is None,
                        "no sentence": not outcome.is_a_sentence,
                        "slow": seconds > SECONDS,
                        "large": megabytes > MEGABYTES,
                        "touched": not is_untouched(home, hub),
                    }
                    counts.update(key for key, is_so in wrong.items() if is_so)
                    counts["cases"] += 1
                    if any(wrong.values()):
                        what = ", ".join(key for key, is_so in wrong.items() if is_so)
                        print(f"{command}, {name} is {kind}: {what}\n{outcome.said[-1500:]}")
    rows = [row("cases", [counts["cases"]], "")]
    for name in ("killed", "no sentence", "slow", "large", "touched"):
        rows.append(row(name, [counts[name]], "cases", at_most=0))
    rows.append(row("longest, more than the good run", [longest], "s", at_most=SECONDS))
    rows.append(row("largest, more than the good run", [largest], "MB", at_most=MEGABYTES))
    report("hostile", rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
