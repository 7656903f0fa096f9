"""Programs as processes: started, read, and ended with all that they have started.

A program leads a session of its own, which is killed as a whole when it has ended or is ended. What
leaves the session is found by a mark in its environment (`end_marked`). This is no protection
against malice, which a sandbox is (`es_cookbook.plugins.program.enclosed`). Where Linux's `setpriv`
is installed, a program is killed when the process that started it dies; where `choom` is, when
memory runs out, before the run is.
"""

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

import anyio
import psutil
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.terminal import printable
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import EnvGroup

KeyIn: TypeAlias = Literal["environment", "line"]
"""Where a program that is started for a rollout finds address and key of the model."""
MARK = "ES_COOKBOOK_ROLLOUT"
"""The variable by which processes of a rollout are known."""
_MOST_TOLD = 4096
"""Bytes of standard error that are kept, the last ones."""
_LINES_TOLD = 5
_LARGE_PIECE = 1 << 15
"""Bytes of standard error after which no more is read for a moment."""
_MOMENT = 0.01
_STDOUT = 1
_SECONDS_TO_CLOSE = 1.0
"""For an output that a process outside the session holds open."""


class Process(asyncio.SubprocessProtocol):
    """One that runs.

    asyncio's streams are left: with them a process has not ended before all that hold its outputs
    open have.

    Args:
        hear: gets what it writes to standard output, piece by piece, and says whether it may go on.
    """

    def __init__(self, hear: Callable[[bytes], bool]) -> None:
        self._hear = hear
        self._told = b""
        self._has_ended, self._is_silent = asyncio.Event(), asyncio.Event()
        self._beside: asyncio.Task[None] | None = None

    @staticmethod
    async def start(
        command: Sequence[str],
        environment: Mapping[str, str],
        hear: Callable[[bytes], bool],
        descriptors: Sequence[int] = (),
    ) -> "Process":
        """Start one, with these variables, which inherits these descriptors.

        Raises:
            EnvError: It cannot be started.
        """
        try:
            _, process = await asyncio.get_running_loop().subprocess_exec(
                lambda: Process(hear),
                *_dying_first(),
                *command,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise EnvError(f"the program {command[0]!r} does not start: {why}") from error
        return process

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    @override
    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        if fd != _STDOUT:
            self._told = (self._told + data)[-_MOST_TOLD:]
            if len(data) >= _LARGE_PIECE:
                stderr = cast(asyncio.ReadTransport, self._transport.get_pipe_transport(fd))
                stderr.pause_reading()
                asyncio.get_running_loop().call_later(_MOMENT, stderr.resume_reading)
        elif not self._hear(data):
            self.kill()

    @override
    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == _STDOUT:
            self._is_silent.set()

    @override
    def process_exited(self) -> None:
        self._has_ended.set()
        if self._beside is not None:
            self._beside.cancel()

    def until_ended(self, beside: asyncio.Task[None]) -> None:
        """Cancel a task when it has ended."""
        self._beside = beside
        if self._has_ended.is_set():
            beside.cancel()

    def write(self, data: bytes, *, close: bool = False) -> int:
        """Write to its standard input, which it need not read; returns how many bytes wait."""
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        if not stdin.is_closing():
            stdin.write(data)
        if close:
            stdin.close()
        return stdin.get_write_buffer_size()

    async def exited(self) -> None:
        """Wait until it has ended by itself; what it left in its session is killed."""
        await self._has_ended.wait()
        self.kill()

    async def wait(self) -> None:
        """Wait until it has ended by itself, and all that it wrote was heard."""
        await self.exited()
        with anyio.move_on_after(_SECONDS_TO_CLOSE):
            await self._is_silent.wait()

    def kill(self) -> None:
        """End it, and all of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def end(self) -> None:
        """End it, and wait until it is gone."""
        self.kill()
        await self._has_ended.wait()
        self._transport.close()

    @property
    def exit_code(self) -> int | None:
        """As Python reports it, -n after signal n; None while it runs."""
        return self._transport.get_returncode()

    def how(self) -> str:
        """How it has ended, in words, and the last lines of its standard error."""
        lines = self._told.decode(errors="replace").strip().splitlines()[-_LINES_TOLD:]
        lines = [printable(line)[:200] for line in lines]
        told = "".join((f": {lines[-1]}", *(f"\n  {line}" for line in lines))) if lines else ""
        code = self.exit_code
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}{told}"
        return f"ended with exit code {code}{told}"


def command_of(text: str, option: str) -> tuple[str, ...]:
    """A program and its arguments, as a user types them.

    Raises:
        ConfigError: There is none, or it cannot be run.
    """
    try:
        found = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option}={text!r}: {error}") from error
    if not found:
        raise ConfigError(f"{option} must name a program")
    if shutil.which(found[0]) is None:
        why = "cannot be executed" if Path(found[0]).is_file() else "is not there"
        raise ConfigError(
            f"{option}: {found[0]!r} {why}; accepted is a program of PATH, or the path "
            "of a file that may be executed"
        )
    return found


def end_marked(marks: Collection[str]) -> None:
    """Kill what has left the session of the program that started it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) in marks:
                process.kill()


class HasProcesses(ABC):
    """An Env that starts processes."""

    @abstractmethod
    async def ended(self) -> set[str]:
        """End them and wait until they are gone; the marks of what they may have left."""


class _Group(EnvGroup):
    """When it ends, so do all processes of its Envs, and whatever these have started."""

    @override
    async def close(self) -> None:
        envs = [env for env in self.envs if isinstance(env, HasProcesses)]
        if marks := {mark for env in envs for mark in await env.ended()}:
            end_marked(marks)


class ProcessProblem(ProblemGroupBuilder):
    """A problem of Envs that start processes."""

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return _Group([self.make_env() for _ in range(num_envs)])


def with_ours(more: Mapping[str, str]) -> dict[str, str]:
    """This process's variables and these; requests to this machine go through no proxy."""
    names = "no_proxy", "NO_PROXY"
    here = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in names}
    return {**os.environ, **here, **more}


@functools.cache
def _dying_first() -> Sequence[str]:
    """What starts a command that dies with us, and before us where memory runs out."""
    ways = ("setpriv", "--pdeathsig", "KILL", "--"), ("choom", "-n", "1000", "--")
    return [word for way in ways if _works(way) for word in way]


def _works(way: Sequence[str]) -> bool:
    """Whether commands start that way here: a container may not let them."""
    try:
        return subprocess.run([*way, "true"], capture_output=True).returncode == 0
    except OSError:
        return False
