"""Child processes: each leads a group, which is ended as a whole.

This is the only module that starts processes: sandboxes, graders, programs, MCP servers, runs of a
sweep. A child has a separate session, so Ctrl-C does not reach it, and its own children are in its
group. If Linux's `setpriv` is installed, a child is killed when this process dies; with `choom`,
the kernel also ends it before this process if memory runs out.

Left out: a child that leaves its group. That needs a sandbox (`es_cookbook.rl.grading.sandbox`).
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
from typing import IO, cast

import anyio
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import printable

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_BYTES_KEPT = 4096
_LINES_SHOWN = 5
_SECONDS_TO_CLOSE = 1.0
"""Seconds to wait for an output that a process outside the group holds open."""


def ran(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> tuple[int, str]:
    """Run a command that takes a moment, without an event loop.

    Args:
        command: the program and its arguments.
        environment: its variables; None for this process's.
        descriptors: file descriptors that it inherits.

    Returns:
        Exit code, and output with standard error.

    Raises:
        OSError: It cannot be started.
    """
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        pass_fds=descriptors,
    )
    return done.returncode, done.stdout


class Process(asyncio.SubprocessProtocol):
    """A process on the event loop, with callbacks for its output.

    asyncio's streams are not used: with them a process does not count as ended while another
    process holds its outputs open.
    """

    def __init__(self, hear: Mapping[int, Callable[[bytes], bool] | None]) -> None:
        self._hear = hear
        self._kept = b""
        self._has_ended, self._is_silent = asyncio.Event(), asyncio.Event()

    @staticmethod
    async def start(
        command: Sequence[str],
        environment: Mapping[str, str],
        hear: Callable[[bytes], bool] | None = None,
        hear_error: Callable[[bytes], bool] | None = None,
        descriptors: Sequence[int] = (),
        *,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.PIPE,
        outlives: bool = False,
    ) -> "Process":
        """Start a process.

        Args:
            command: the program and its arguments.
            environment: its variables.
            hear: called with its standard output; returns whether the process may continue.
            hear_error: the same for standard error, whose end is kept in any case.
            descriptors: file descriptors that it inherits.
            stdout: a file for standard output, which is not heard then.
            stderr: the same for standard error; None: that of this process.
            outlives: do not kill it when this process dies, because it ends by itself.

        Raises:
            OSError: It cannot be started.
        """
        with anyio.CancelScope(shield=True):  # Cancelled here, it would leave a process.
            _, process = await asyncio.get_running_loop().subprocess_exec(
                lambda: Process({_STDOUT: hear, _STDERR: hear_error}),
                *(() if outlives else _dying_first()),
                *command,
                stdout=stdout,
                stderr=stderr,
                env=dict(environment),  # uvloop accepts no other mapping.
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
        """Write to its standard input; returns the number of unread bytes."""
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN))
        if not stdin.is_closing():
            stdin.write(data)
        unread = stdin.get_write_buffer_size()
        if close:
            stdin.close()
        return unread

    async def exited(self) -> None:
        """Wait until it has ended by itself; then kill what is left of its group."""
        await self._has_ended.wait()
        self.kill()

    async def wait(self) -> None:
        """Wait until it has ended by itself and all of its output was received."""
        await self.exited()
        with anyio.move_on_after(_SECONDS_TO_CLOSE):
            await self._is_silent.wait()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process and all of its group: SIGINT, as Ctrl-C does, or SIGKILL."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

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
        """The exit code, -n after signal n; None while it runs."""
        return self._transport.get_returncode()

    def how(self) -> str:
        """Return a clause about how it ended, and the last lines of its standard error."""
        code = self.exit_code or 0
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
        lines = self._kept.decode(errors="replace").strip().splitlines()[-_LINES_SHOWN:]
        lines = [printable(line)[:200] for line in lines]
        said = "".join((f": {lines[-1]}", *(f"\n  {line}" for line in lines))) if lines else ""
        return (ended or f"ended with exit code {code}") + said


def command_of(text: str, option: str) -> tuple[str, ...]:
    """Split a command line as typed into a program and its arguments.

    Raises:
        ConfigError: The program is missing or cannot be run.
    """
    try:
        found = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option}={text!r}: {error}") from error
    program = found[0] if found else ""
    if shutil.which(program) is None:
        raise ConfigError(
            f"{option}: {program!r} is neither a program of PATH nor the path of an executable file"
        )
    return found


@functools.cache
def _dying_first() -> Sequence[str]:
    """Return the prefix of a command that dies with this process, or before it without memory."""
    ways = ("setpriv", "--pdeathsig", "KILL", "--"), ("choom", "-n", "1000", "--")
    return [word for way in ways if _works(way) for word in way]


def _works(way: Sequence[str]) -> bool:
    """Return whether this prefix works here; containers may forbid it."""
    try:
        return ran([*way, "true"])[0] == 0
    except OSError:
        return False
