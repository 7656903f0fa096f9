"""Whether a second Ctrl-C ends a run within 5 seconds, whatever its Env does.

    python -m benchmarks.interrupts

Each kind of obstinate code (`tests.blocking`) in each of the places where a run calls an Env, its
group or its dataset, each in a run of its own, eight at a time: loops that swallow everything, in
Python and in tasks, C code that holds the interpreter lock, threads, exit functions, children that
ignore signals, and so on. A run gets SIGINT, and half a second later SIGINT again or SIGTERM. It
then has to end, with code 130 (137 where it had to be killed), with a sentence, a whole history,
and no child left.
"""

import ctypes
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.harness import report, row
from es_cookbook.runs.history.store import read_history
from tests import blocking

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
AT_ONCE = 8
BETWEEN = 0.5
ENDS_WITHIN = 5.0
SYNC_PLACES = ("sync", "get_batch", "task", "close")
ASYNC_PLACES = ("async", "group_rewards", "make_envs")


@dataclasses.dataclass
class Case:
    """A run: what it does where, the second signal, and what was seen of it."""

    where: str
    kind: str
    second: signal.Signals
    directory: Path
    pid: int = 0
    step_at: float = 0.0
    signals: int = 0
    seconds: float = 0.0
    failed: str = ""

    def start(self) -> None:
        """Fork it."""
        base = ROOT / "tests/data/base"
        self.pid = blocking.start(
            [
                *(f"log_path={self.directory / 'run'}", f"model_name={base}"),
                *("engine=tests.fakes:FakeEngineBuilder", "trackers=JsonlTrackerBuilder"),
                *(f"dataset.where={self.where}", f"dataset.kind={self.kind}"),
            ],
            str(self.directory / "errors.txt"),
        )

    def go_on(self) -> bool:
        """Send what is due; whether it has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        now = time.monotonic()
        if pid:
            self.seconds = now - self.step_at
            self.failed = self.failed or self._why_not(os.waitstatus_to_exitcode(status))
            return True
        history = self.directory / "run/history.jsonl"
        if not self.step_at:
            if history.exists() and history.read_bytes().count(b"\n") >= 2:
                self.step_at = now
        elif self.signals < 2 and now - self.step_at > BETWEEN:
            self.signals, self.step_at = self.signals + 1, now
            os.kill(self.pid, signal.SIGINT if self.signals == 1 else self.second)
        elif self.signals == 2 and now - self.step_at > ENDS_WITHIN + 5:
            self.failed = "did not end"
            os.kill(self.pid, signal.SIGKILL)
        return False

    def _why_not(self, code: int) -> str:
        said = (self.directory / "errors.txt").read_text().splitlines()
        if code not in (130, -signal.SIGKILL, -self.second):
            return f"exit code {code}"
        if self.signals == 2 and self.seconds > ENDS_WITHIN:
            return f"ended after {self.seconds:.1f} s"
        if not any("interrupted" in line for line in said):
            return f"said {said[-3:]}"
        list(read_history(self.directory / "run/history.jsonl"))
        return ""


def cases(directory: Path) -> list[Case]:
    """All of them."""
    kinds = [(where, kind) for kind in blocking.STUBBORN_KINDS for where in SYNC_PLACES[:3]]
    kinds += [("close", blocking.deaf), ("close", blocking.thread), ("sync", blocking.program)]
    kinds += [(w, k) for k in blocking.SIX_KINDS[:2] for w in SYNC_PLACES]
    kinds += [(where, kind) for kind in blocking.ASYNC_KINDS for where in ASYNC_PLACES]
    found: list[Case] = []
    for i, (where, kind) in enumerate(kinds):
        own = directory / str(i)
        own.mkdir()
        found.append(Case(where, kind.__name__, (signal.SIGINT, signal.SIGTERM)[i % 5 == 4], own))
    return found


def main() -> None:
    """Run all and report."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # Orphans come here.
    directory = Path(tempfile.mkdtemp())  # No context: the runs, which are forks, would end it.
    waiting = cases(directory)
    done: list[Case] = []
    running: list[Case] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(waiting.pop(0))
            running[-1].start()
        ended = [case for case in running if case.go_on()]
        running = [case for case in running if case not in ended]
        done += ended
        for case in ended:
            print(
                f"{case.where:15} {case.kind:28} {case.second.name} after {case.signals} "
                f"{case.seconds:.2f} s {case.failed}",
                flush=True,
            )
        time.sleep(0.02)
    time.sleep(1)
    left = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    print(*(f"left: {p.pid} {p.cmdline()}" for p in left), sep="\n")
    shutil.rmtree(directory)
    ended_at_second = [case.seconds for case in done if case.signals == 2]
    report(
        "interrupts",
        [
            row("kinds of Envs, rewards and datasets", [len(done)], ""),
            row(
                "that did not end as they should",
                [sum(bool(c.failed) for c in done)],
                "",
                at_most=0,
            ),
            row("children left", [len(left)], "", at_most=0),
            row(
                "second signal to the end, longest",
                [max(ended_at_second)],
                "s",
                at_most=ENDS_WITHIN,
            ),
        ],
    )


if __name__ == "__main__":
    main()
