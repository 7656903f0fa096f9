"""A process that ends another one, where that does not end by itself after Ctrl-C or SIGTERM.

Run as a program by its path, by the process that it is to end
(`es_cookbook.runs.signals`). From outside it hears a signal also while C code holds the
interpreter lock, and kills also where no Python runs any more. It reads the numbers of the signals
that come, as Python writes them to its wake-up descriptor, from one descriptor; to another one it
writes a byte when time is up, so that the process ends itself, with the exit code that it chooses.
If it does not, it is killed. After a second signal the processes that it has started go with it.

What the user can do then is the last line of a third descriptor, and is printed.
"""

import contextlib
import math
import os
import select
import signal
import sys
import time

SECONDS_AFTER_SIGTERM = 8.0
"""Within which a clean end has to be done."""
SECONDS_AFTER_SECOND = 2.0
"""Within which the second signal has to have worked."""
SECONDS_OF_ONE = 0.2
"""Within which a signal that comes again is the same: a terminal and a wrapper send it both."""
SECOND, STAND_BY, END_NOW = 253, 254, 255
"""Numbers that are no signals: there was a second one; the process goes on; it is to end now."""
_SENTENCE = b"interrupted; it did not end by itself and was ended"
_LONGEST_ADVICE = 65536
_SECONDS_TO_EXIT = 0.7
_TICK = 0.1


def watch(hears: int, tells: int, advised: int, pid: int) -> None:
    """Listen until the process ends or closes the descriptor, and end it where it does not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    heard = _Heard()
    children: dict[int, str] = {}
    while os.getppid() == pid and time.monotonic() < heard.end_at:
        if heard.is_urgent:
            children |= descendants(pid)
        if not select.select([hears], [], [], _TICK if heard.any else None)[0]:
            continue
        numbers = os.read(hears, 4096)
        if not numbers:
            break
        for number in numbers:
            heard.add(number)
    is_overdue = time.monotonic() >= heard.end_at
    if is_overdue:
        children |= descendants(pid)
        if not heard.is_asked_for:  # Else it has said why itself.
            say(advised)
        end(pid, tells)
    if is_overdue or heard.is_urgent:
        for child, _ in children.items() & descendants().items():
            kill(child)


class _Heard:
    """What was heard, and when the process has to have ended."""

    def __init__(self) -> None:
        self.end_at = math.inf
        self._first: tuple[int, float] = 0, -math.inf
        self.any = self.is_urgent = self.is_asked_for = False

    def add(self, number: int) -> None:
        now = time.monotonic()
        is_signal = number in (signal.SIGINT, signal.SIGTERM)
        if is_same(number, self._first):
            return
        if is_signal and not self.any:
            self._first = number, now
        if number == STAND_BY:
            self.is_urgent, self.end_at = False, math.inf
        elif number == END_NOW:
            self.is_urgent = self.is_asked_for = True
            self.end_at = now
        elif number == SECOND or (self.any and is_signal):
            self.is_urgent = True
            self.end_at = min(self.end_at, now + SECONDS_AFTER_SECOND)
        elif number == signal.SIGTERM:
            self.end_at = now + SECONDS_AFTER_SIGTERM
        self.any = self.any or is_signal or self.is_urgent


def is_same(number: int, first: tuple[int, float]) -> bool:
    """Whether a signal that comes now is the first one, of which the time is given, once more."""
    return number == first[0] and time.monotonic() - first[1] < SECONDS_OF_ONE


def say(advised: int) -> None:
    """Say what happens, and what to do then, where nobody holds that up."""
    with contextlib.suppress(OSError):
        advice = b""
        if select.select([advised], [], [], 0)[0]:
            advice = os.read(advised, _LONGEST_ADVICE).rstrip(b"\n").rpartition(b"\n")[2]
        if select.select([], [2], [], 0)[1]:
            os.write(2, _SENTENCE + (b"; " + advice if advice else b"") + b"\n")


def end(pid: int, tells: int) -> None:
    """Have it end itself, or kill it."""
    with contextlib.suppress(OSError):
        os.write(tells, b"\0")
    if not has_ended(pid, _SECONDS_TO_EXIT):
        kill(pid)
        has_ended(pid, 1.0)


def has_ended(pid: int, seconds: float) -> bool:
    """Whether this process's parent ends within so many seconds."""
    until = time.monotonic() + seconds
    while os.getppid() == pid:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int | None = None) -> dict[int, str]:
    """Processes that one has started, and those that they have, or all: when each began.

    None where there is no /proc.
    """
    began: dict[int, str] = {}
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parents[int(name)], began[int(name)] = int(fields[1]), fields[19].decode()
    if pid is None:
        return began
    found, waiting = set[int](), [pid]
    while waiting:
        parent = waiting.pop()
        new = [each for each, its in parents.items() if its == parent and each != os.getpid()]
        found.update(new)
        waiting += new
    return {each: began[each] for each in found}


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
