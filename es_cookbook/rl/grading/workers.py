"""Functions in worker processes: for grading that takes long, or an unknown time.

An Env runs on the event loop, where a second of computing stops the whole population. `in_worker`
makes a call in another process, and an Env awaits it:

    async def step(self, action: Action) -> StepResult:
        reward = await in_worker(is_equal, action.text, self.answer, timeout=5)
        return StepResult(reward, done=True)

There are as many workers as cores. If the function loops forever, exhausts the memory or
crashes, it ends with its worker, the Env gets an exception, and another worker takes its place. A
worker and the processes that it has started form a process group, which is killed as a whole.

The time-out holds for the call alone. A queue before the workers, and the imports of a worker's
first call, count neither towards it nor towards the rollout's `rollout_timeout`.

pebble's pool was left: at a time-out it kills the worker alone, and what that started lives on.

Left out: protection against malicious code. A worker may do all that the run may do, and the run
unpickles its answers.
"""

import asyncio
import contextlib
import functools
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple, cast

import anyio

from es_cookbook.common.errors import WorkerError, WorkerTimeoutError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.machine.processes import how_ended, kill_group, started
from es_cookbook.rl.grading import worker
from es_cookbook.rl.timeouts import at_end_of_run, clock_stopped, in_turn

SECONDS_TO_START = 60.0
"""Limit for a worker to start and to import what a function needs."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def in_worker(function: Callable[[*_Ts], _T], *args: *_Ts, timeout: float) -> _T:
    """Call a function in a worker process.

    Its output goes to stderr. The pool is limited to the cores that this process may use.

    Args:
        function: can be imported by its name; a script that defines it needs the usual
            `if __name__ == "__main__"`.
        args: arguments that can be pickled, as the result must be.
        timeout: seconds for the call.

    Raises:
        WorkerTimeoutError: It was not done in time.
        WorkerError: It crashed, or it, its arguments or its result cannot be sent.
        Exception: The function's own error, with the worker's traceback as a note.
    """
    name = _name(function)
    try:
        request = pickle.dumps((function, args), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise WorkerError(
            f"{name} cannot be sent to a worker process ({error}): it must be a function that can "
            "be imported by its name, and its arguments must pickle"
        ) from None
    async with in_turn("worker", num_cores()):
        answer = await _answer(name, request, timeout)
    try:
        kind, *found = pickle.loads(answer)
    except Exception as error:
        raise WorkerError(
            f"what {name} returned or raised cannot be read outside the worker process: {error}"
        ) from None
    if kind == "returned":
        return cast(_T, found[0])
    what, trace = cast(tuple[Exception | str, str], found)
    raised = WorkerError(f"{name} {what}") if isinstance(what, str) else what
    raised.add_note(f"In the worker process:\n{trace}".rstrip())
    raise raised


def end_idle_workers() -> None:
    """End the workers that have nothing to do, as a run does when it ends."""
    while _idle:
        _idle.pop().kill()
    for process in _killed:
        process.wait()
    _killed.clear()


at_end_of_run(end_idle_workers)


async def _answer(name: str, request: bytes, timeout: float) -> bytes:
    own = _take()
    try:
        with anyio.move_on_after(SECONDS_TO_START) as starting, clock_stopped():
            await own.send(request)
            await own.read(len(worker.STARTED))
        if starting.cancelled_caught:
            raise WorkerTimeoutError(
                f"a worker process could not import {name} within {SECONDS_TO_START:g} s"
            )
        with anyio.move_on_after(timeout):
            (length,) = worker.LENGTH.unpack(await own.read(worker.LENGTH.size))
            answer = await own.read(length)
            _idle.append(own)
            return answer
        raise WorkerTimeoutError(
            f"{name} was not done after {timeout:g} s in a worker process, which was killed"
        )
    except ConnectionError:
        raise WorkerError(f"the worker process of {name} {own.how()}") from None
    except BaseException:
        own.kill()
        raise


class _Worker:
    """One process, and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._process = started(
                [sys.executable, "-P", worker.__file__, str(theirs.fileno())],
                environment={"OMP_NUM_THREADS": "1", **os.environ},
                descriptors=[theirs.fileno()],
            )
        self._hello = pickle.dumps((sys.path, _main()))

    @property
    def is_alive(self) -> bool:
        """Whether it can be called: it has neither closed the socket nor written unasked."""
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1, socket.MSG_PEEK)
            return False
        return True

    async def send(self, message: bytes) -> None:
        """Send a message, and before the first one what every worker is told."""
        messages = [hello, message] if (hello := self._hello) else [message]
        self._hello = b""
        for each in messages:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(self._socket, worker.LENGTH.pack(len(each)) + each)

    async def read(self, count: int) -> bytes:
        """Receive so many bytes.

        Raises:
            ConnectionError: The process has ended.
        """
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            got = await asyncio.get_running_loop().sock_recv_into(self._socket, rest)
            if not got:
                raise ConnectionResetError
            rest = rest[got:]
        return bytes(found)

    def kill(self) -> None:
        """End it, with all processes that it has started."""
        self._socket.close()
        kill_group(self._process.pid)
        if self._process.poll() is None:
            _killed.append(self._process)

    def how(self) -> str:
        """Description of how it ended by itself."""
        self.kill()
        return how_ended(self._process.wait())


_idle: list[_Worker] = []
"""Idle workers, the last used one at the end."""
_killed: list[subprocess.Popen[bytes]] = []
"""Killed processes that have not been reaped yet."""
os.register_at_fork(after_in_child=_idle.clear)


def _take() -> _Worker:
    """A worker that is alive, the one used last if there is one."""
    _killed[:] = [process for process in _killed if process.poll() is None]
    while _idle:
        last = _idle.pop()
        if last.is_alive:
            return last
        last.kill()
    return _Worker()


def _main() -> tuple[str, str] | None:
    """Path and module name of the main program; None in an interactive session."""
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # Its classes in results are from there.
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    return (str(Path(path).absolute()), spec.name if spec else "") if path else None


def _name(function: object) -> str:
    """The name of a function in error messages."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    return getattr(function, "__qualname__", type(function).__qualname__)
