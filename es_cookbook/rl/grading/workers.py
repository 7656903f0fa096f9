"""Functions in worker processes: for grading that takes long, or an unknown time.

An Env runs on the event loop, where a second of computing stops the whole population. `in_worker`
makes a call in another process, and an Env awaits it:

    async def step(self, action: Action) -> StepResult:
        reward = await in_worker(is_equal, action.text, self.answer, timeout=5)
        return StepResult(reward, done=True)

There are as many workers as cores, and they end with the event loop. If the function loops forever,
exhausts the memory or crashes, it ends with its worker, the Env gets an exception, and another
worker takes its place. A worker and the processes that it has started form a process group, which
is killed as a whole.

The time-out holds for the call alone. A queue before the workers, and the imports of a worker's
first call, count neither towards it nor towards the rollout's `rollout_timeout`.

pebble's pool was left: at a time-out it kills the worker alone, and what that started lives on.

Left out: protection against malicious code. A worker may do all that the run may do, and the run
unpickles its answers.
"""

import asyncio
import functools
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple, cast

import anyio
from anyio.lowlevel import RunVar

from es_cookbook.common.errors import WorkerError, WorkerTimeoutError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.machine.processes import Process
from es_cookbook.rl.grading import worker
from es_cookbook.rl.timeouts import clock_stopped, in_turn

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
        result, failure, trace = pickle.loads(answer)
    except Exception as error:
        raise WorkerError(
            f"what {name} returned or raised cannot be read outside the worker process: {error}"
        ) from None
    if not trace:
        return cast(_T, result)
    raised = failure if isinstance(failure, Exception) else WorkerError(f"{name} {failure}")
    raised.add_note(f"In the worker process:\n{trace}".rstrip())
    raise raised


async def _answer(name: str, request: bytes, timeout: float) -> bytes:
    idle = _idle.get([])
    _idle.set(idle)
    own = idle.pop() if idle else await _Worker.start(idle)
    try:
        with anyio.move_on_after(SECONDS_TO_START) as starting, clock_stopped():
            own.send(request)
            await own.answers.readexactly(len(worker.STARTED))
        if starting.cancelled_caught:
            raise WorkerTimeoutError(
                f"a worker process could not import {name} within {SECONDS_TO_START:g} s"
            )
        with anyio.move_on_after(timeout):
            (length,) = worker.LENGTH.unpack(await own.answers.readexactly(worker.LENGTH.size))
            answer = await own.answers.readexactly(length)
            idle.append(own)
            return answer
        raise WorkerTimeoutError(
            f"{name} was not done after {timeout:g} s in a worker process, which was killed"
        )
    except EOFError:
        raise WorkerError(f"the worker process of {name} {own.process.how()}") from None
    except BaseException:
        own.process.kill()
        raise


class _Worker:
    """One process, which ends with the event loop."""

    process: Process
    living: asyncio.Task[None]

    def __init__(self) -> None:
        self.answers = asyncio.StreamReader()

    @staticmethod
    async def start(idle: "list[_Worker]") -> "_Worker":
        """Start a worker, which is removed from the idle ones when it ends."""
        own = _Worker()
        own.process = await Process.start(
            [sys.executable, "-P", worker.__file__],
            {"OMP_NUM_THREADS": "1", **os.environ},
            own._hear,
            stderr=None,
        )
        own.living = asyncio.create_task(own._live(idle))
        own.send(pickle.dumps((sys.path, _main())))
        return own

    def send(self, message: bytes) -> None:
        self.process.write(worker.LENGTH.pack(len(message)) + message)

    def _hear(self, piece: bytes) -> bool:
        self.answers.feed_data(piece)
        return True

    async def _live(self, idle: "list[_Worker]") -> None:
        try:
            await self.process.exited()
        finally:
            await self.process.end()
        self.answers.feed_eof()
        if self in idle:
            idle.remove(self)


_idle: RunVar[list[_Worker]] = RunVar("idle workers")
"""Idle workers of an event loop, the last used one at the end."""


def _main() -> tuple[str, str] | None:
    """Return path and module name of the main program; None in an interactive session."""
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # Its classes in results are from there.
    path = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    return (str(Path(path).absolute()), spec.name if spec else "") if path else None


def _name(function: object) -> str:
    """Return the name of a function for error messages."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    return getattr(function, "__qualname__", type(function).__qualname__)
