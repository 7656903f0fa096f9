"""Is a core ever idle while a sweep has runs left?

    python -m benchmarks.sweep

Sweeps 12 short Countdown runs with two workers, by the command that users type, and looks at its
processes from outside, twenty times a second. What counts is the time from the first run's begin to
the last one's: from then on there is nothing left to put into a free slot.

- A slot is busy while a run's process is alive in it.
- A core is busy while a thread of a run computes, or is ready to and waits for a core that another
  program has (Linux's own accounts, /proc/PID/task/*/schedstat). So the number does not depend on
  what else this machine does; it is a little above 1 where two threads of a run wait at once.
- Processor time alone is the share of both cores that the runs were given; on a machine that does
  nothing else it is what is busy.
"""

import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.harness import report, row

NUM_RUNS, WORKERS = 12, 2
OPTIONS = (
    "recipe=countdown",
    "values.optimizer.sigma=0.003,0.005,0.01",
    "values.optimizer.learning_rate=0.01,0.02",
    "seeds=0,1",
    f"workers={WORKERS}",
    "num_generations=4",
    "optimizer.population_size=10",
    "dataset.num_test=50",
)


@dataclasses.dataclass
class Seen:
    """Observations of the workers while runs were left.

    Attributes:
        began: process id -> time at which it was first seen.
        looks: time, and how many workers were alive.
        accounts: time -> nanoseconds that all threads so far have computed, and waited to.
    """

    began: dict[int, float]
    looks: list[tuple[float, int]]
    accounts: list[tuple[float, int, int]]


def watch(log_path: Path) -> tuple[Seen, float]:
    """Sweep while observing, and return the observations and the seconds."""
    command = [sys.executable, "-m", "es_cookbook", "sweep", *OPTIONS, f"log_path={log_path}"]
    seen = Seen({}, [], [])
    threads: dict[str, tuple[int, int]] = {}
    began = time.perf_counter()
    sweep = psutil.Popen(command)
    while sweep.poll() is None:
        now = time.perf_counter()
        workers = alive(sweep.pid)
        for pid in workers:
            seen.began.setdefault(pid, now)
            threads |= accounts(pid)
        seen.looks.append((now, len(workers)))
        computed, waited = (sum(each[i] for each in threads.values()) for i in (0, 1))
        seen.accounts.append((now, computed, waited))
        time.sleep(0.05)
    if sweep.returncode != 0 or len(seen.began) != NUM_RUNS:
        raise SystemExit(f"the sweep ended with {sweep.returncode} and {len(seen.began)} runs")
    return seen, time.perf_counter() - began


def alive(parent: int) -> list[int]:
    """Return processes in which a run is trained: all children that have not ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found += [int(pid)] * (state != "Z")
    return found


def accounts(pid: int) -> dict[str, tuple[int, int]]:
    """Return nanoseconds that each thread of a process has computed, and waited to."""
    found: dict[str, tuple[int, int]] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):
            computed, waited, _ = path.read_text().split()
            found[str(path)] = int(computed), int(waited)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        seen, seconds = watch(Path(directory) / "sweep")
    first, last = min(seen.began.values()), max(seen.began.values())
    slots = [count / WORKERS for at, count in seen.looks if first <= at <= last]
    inside = [found for found in seen.accounts if first <= found[0] <= last]
    computed, waited = (inside[-1][i] - inside[0][i] for i in (1, 2))
    cores = WORKERS * (last - first) * 1e9
    report(
        "sweep",
        [
            row("slots busy", [sum(slots) / len(slots)], "of 1", at_least=0.9),
            row(
                "cores busy with runs, or others' turn",
                [(computed + waited) / cores],
                "of 1",
                at_least=0.9,
            ),
            row("processor time given to runs, of both cores", [computed / cores], "of 1"),
            row(f"{NUM_RUNS} runs of 4 generations", [seconds], "s"),
        ],
    )


if __name__ == "__main__":
    main()
