"""What 200 SIGKILLs cost: no generation that was reported done, and not a bit.

A real run on the torch engine is killed at random moments of start-up and of a generation, begun
again each time, and compared with an undisturbed run (`tests/kills.py` says how).

    python -m benchmarks.kills [KILLS]
"""

import os
import sys
import tempfile
import time
from pathlib import Path

# Before torch is imported: the process that forks must not have other threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.harness import report, row
from tests.kills import campaign


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
