"""Functions for worker processes, most of which misbehave."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def add(left: int, right: int) -> int:
    return left + right


def worker() -> int:
    return os.getpid()


def loop_for_ever() -> None:
    while True:
        pass


def explode() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def print_everywhere() -> str:
    print("printed")
    os.write(1, b"written\n")
    subprocess.run(["echo", "echoed"], check=True)
    return sys.stdin.read()


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_at_once() -> None:
    os._exit(7)


class OwnError(Exception):
    """Pickles, but does not come back: it is made of two arguments and remembers one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}, because {why}")


def raise_own_error() -> None:
    raise OwnError("no", "not")


def raise_key_error(key: str) -> None:
    raise KeyError(key)


def give_a_function() -> Callable[[], None]:
    return lambda: None


def huge(size: int) -> bytes:
    return bytes(size)


def child_that_stays(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(1000)


def note_and_sleep(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(1000)
