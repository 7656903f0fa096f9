"""Time that the sandbox adds to the start of bubblewrap.

    python -m benchmarks.sandbox

By turns, each 40 times: the system's Python with an empty program bare, the same in bubblewrap with
nothing but new namespaces and `/usr`, and `run_code` on the same program: user dropped, limits,
seccomp filter, pipes read, all processes gone. Then `run_asserts` with three tests, which forks
once more and imports json.
"""

import subprocess
from functools import partial

import anyio

from benchmarks.harness import interleaved, ratios, report, row
from es_cookbook.recipes.code.asserts import run_asserts
from es_cookbook.rl.grading.sandbox import run_code

REPEATS = 40
PYTHON = ("/usr/bin/python3", "-P", "-s", "-B", "-c", "")
BUBBLEWRAP = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--"),
)
CODE, TESTS = "def double(x): return 2 * x", [f"assert double({i}) == {2 * i}" for i in range(3)]


def main() -> None:
    """Measure and report."""
    with anyio.from_thread.start_blocking_portal() as portal:
        seconds = interleaved(
            {
                "bare": partial(subprocess.run, PYTHON, check=True),
                "bubblewrap": partial(subprocess.run, [*BUBBLEWRAP, *PYTHON], check=True),
                "sandbox": partial(portal.call, run_code, ""),
                "asserts": partial(portal.call, run_asserts, CODE, TESTS),
            },
            repeats=REPEATS,
            warmups=2,
        )
    rows = [
        row(f"{name}: a start", [each * 1000 for each in seconds[name]], "ms") for name in seconds
    ]
    rows += [
        row(
            "sandbox / bubblewrap",
            ratios(seconds["sandbox"], seconds["bubblewrap"]),
            "x",
            at_most=2,
        ),
        row("asserts / bubblewrap", ratios(seconds["asserts"], seconds["bubblewrap"]), "x"),
    ]
    report("sandbox", rows)


if __name__ == "__main__":
    main()
