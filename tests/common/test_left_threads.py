"""A process that leaves threads behind ends as Python would, and with its exit code."""

import subprocess
import sys

EXITS = """
import atexit, functools, threading
from es_cookbook.common.left_threads import exit_without_them

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

atexit.register(print, "registered")
if {refuses}:
    threading.Thread.start = refuse
threading._register_atexit(functools.partial(exit_without_them, 130))  # As `train` does.
"""
"""Python 3.12.0 to 3.12.2 refuses to start threads while it shuts down."""


def exited(refuses: bool) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", EXITS.format(refuses=refuses)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


def test_the_exit_code_is_kept_and_what_is_registered_runs() -> None:
    done = exited(refuses=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "registered\n", "")


def test_the_same_where_no_thread_can_be_started_any_more() -> None:
    done = exited(refuses=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "registered\n", "")
