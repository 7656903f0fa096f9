"""Child processes: each leads a group, which is ended as a whole.

All processes of the package start here: sandboxes, graded workers, programs, MCP servers, runs of a
sweep, pipelines of data. A child has a session of its own, so Ctrl-C is not for it, and whatever it
starts is in its group. Where Linux's `setpriv` is installed, a child is killed if this process
dies; where `choom` is, also before this process if memory runs out.

Left out: a child that leaves its group. That takes a sandbox (`es_cookbook.rl.grading.sandbox`).
"""

import asyncio
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

import anyio
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import printable

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_BYTES_KEPT = 4096
_LINES_SHOWN = 5
_SECONDS_TO_CLOSE = 1.0
"""For an output that a process outside the group holds open."""


def started(
    command: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    output: int | IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    outlives: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start a process that needs no event loop.

    Args:
        command: the program and its arguments.
        stdin: as of `subprocess.Popen`.
        output: where standard output and error go; None for this process's standard error.
        environment: its variables; None for those of this process.
        descriptors: that it inherits.
        outlives: it is not killed if this process dies, because it ends by itself.
    """
    return subprocess.Popen(
        [*(() if outlives else dying_first()), *command],
        stdin=stdin,
        stdout=2 if output is None else output,
        stderr=output,
        env=environment,
        pass_fds=descriptors,
        start_new_session=True,
    )


def kill_group(pid: int) -> None:
    """Kill the process that leads a group, and all in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class Process(asyncio.SubprocessProtocol):
    """A process on the event loop, whose output is heard piece by piece.

    asyncio's streams are not used: with them a process has not ended before all that hold its
    outputs open have.

    Args:
        hear: takes what it writes to standard output, and returns whether it may go on.
        hear_error: the same of standard error, whose end is kept in any case.
    """

    def __init__(
        self, hear: Callable[[bytes], bool], hear_error: Callable[[bytes], bool] | None
    ) -> None:
        self._hear = {_STDOUT: hear, _STDERR: hear_error}
        self._kept = b""
        self._has_ended, self._is_silent = asyncio.Event(), asyncio.Event()

    @staticmethod
    async def start(
        command: Sequence[str],
        environment: Mapping[str, str],
        hear: Callable[[bytes], bool],
        hear_error: Callable[[bytes], bool] | None = None,
        descriptors: Sequence[int] = (),
    ) -> "Process":
        """Start one, with these variables, which inherits these descriptors.

        Raises:
            OSError: It cannot be started.
        """
        with anyio.CancelScope(shield=True):  # Cancelled here, it would leave a process.
            _, process = await asyncio.get_running_loop().subprocess_exec(
                lambda: Process(hear, hear_error),
                *command,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,
            )
            return process
        raise AssertionError  # A shielded scope swallows nothing.

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    @override
    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        if fd == _STDERR:
            self._kept = (self._kept + data)[-_BYTES_KEPT:]
        hear = self._hear[fd]
        if hear is not None and not hear(data):
            self.kill()

    @override
    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == _STDOUT:
            self._is_silent.set()

    @override
    def process_exited(self) -> None:
        self._has_ended.set()

    def write(self, data: bytes, *, close: bool = False) -> int:
        """Write to its standard input; returns how many bytes it has not yet read."""
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN))
        if not stdin.is_closing():
            stdin.write(data)
        unread = stdin.get_write_buffer_size()
        if close:
            stdin.close()
        return unread

    async def exited(self) -> None:
        """Wait until it has ended by itself; what it left in its group is killed."""
        await self._has_ended.wait()
        self.kill()

    async def wait(self) -> None:
        """Wait until it has ended by itself, and all that it wrote was heard."""
        await self.exited()
        with anyio.move_on_after(_SECONDS_TO_CLOSE):
            await self._is_silent.wait()

    def kill(self) -> None:
        """Kill it, and all of its group."""
        kill_group(self.pid)

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.kill()
        try:
            await self._has_ended.wait()
        finally:
            self._transport.close()  # Also if the loop ends: later is too late.

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @property
    def exit_code(self) -> int | None:
        """As Python reports it, -n after signal n; None while it runs."""
        return self._transport.get_returncode()

    def how(self) -> str:
        """How it has ended, in words, and the last lines of its standard error."""
        lines = self._kept.decode(errors="replace").strip().splitlines()[-_LINES_SHOWN:]
        lines = [printable(line)[:200] for line in lines]
        said = "".join((f": {lines[-1]}", *(f"\n  {line}" for line in lines))) if lines else ""
        return f"{how_ended(self.exit_code or 0)}{said}"


def how_ended(code: int) -> str:
    """What an exit code says, as Python reports it, in words.

    >>> how_ended(3), how_ended(-9)
    ('ended with exit code 3', 'was ended by SIGKILL')
    """
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


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


@functools.cache
def dying_first() -> Sequence[str]:
    """The beginning of a command that dies with this process, and before it if memory runs out."""
    ways = ("setpriv", "--pdeathsig", "KILL", "--"), ("choom", "-n", "1000", "--")
    return [word for way in ways if _works(way) for word in way]


def _works(way: Sequence[str]) -> bool:
    """Whether commands start that way here: a container may not let them."""
    try:
        return subprocess.run([*way, "true"], capture_output=True).returncode == 0
    except OSError:
        return False
