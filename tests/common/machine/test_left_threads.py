"""A process that leaves threads behind ends as Python would, and with its exit code."""

import subprocess
import sys

import pytest

EXITS = """
import atexit, functools, threading
from es_cookbook.common.machine.left_threads import exit_without_them

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


FAILS = """
import atexit, threading, time
from es_cookbook.common.cli import mistakes_exit
from es_cookbook.common.errors import DataError

{left}
with mistakes_exit():
    raise DataError("rows.jsonl: there is no such file")
"""
LEFT = {
    "a thread that never ends": "threading.Thread(target=threading.Event().wait).start()",
    "a function for the end that never returns": "atexit.register(threading.Event().wait)",
    "an object that never lets go": "class Held:\n    def __del__(self, sleep=time.sleep):\n"
    "        sleep(600)\nheld = Held()",
}
"""What libraries and the user's code may leave behind."""


@pytest.mark.parametrize("left", LEFT)
def test_a_mistake_ends_the_process_whatever_is_left(left: str) -> None:
    program = [sys.executable, "-c", FAILS.format(left=LEFT[left])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "rows.jsonl: there is no such file\n")


def test_a_script_that_goes_on_after_a_mistake_ends_as_it_likes() -> None:
    goes_on = "\nimport time\ntime.sleep(0.6)\nprint('done')"
    text = FAILS.format(left="atexit.register(lambda: time.sleep(3))")
    text = (
        text.replace(
            "with mistakes_exit",
            "import contextlib\nwith contextlib.suppress(SystemExit), mistakes_exit",
        )
        + goes_on
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n")
