"""Runs the command of a program, in a sandbox if wanted, where only the endpoint can be reached.

In the sandbox a program sees `/usr`, this Python and the given paths, all read-only, and a `/tmp`
in memory. It has the variables of its rollout and no others, and no network except its own
loopback interface. The first process there creates the socket at which the endpoint listens, and
passes it out: nothing has to be forwarded, and no path or port of the machine is shared.

Namespaces and the filter of system calls are those of `es_cookbook.rl.grading.sandbox`, except that
IP sockets are allowed. The user stays the same, so the program can read its owner's files.

Left out: limits on memory (where it runs out, the kernel ends programs before the run) and, for
root, on the number of processes.
"""

import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio

from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.machine.processes import Process, ran
from es_cookbook.plugins.endpoint.app import serve
from es_cookbook.plugins.program.calls import ProgramEndpoint
from es_cookbook.rl.grading.sandbox import (
    AF_INET,
    AF_INET6,
    AF_UNIX,
    FIRST,
    check_started,
    filter_program,
    in_memory,
    sys_python,
    walls,
)

_URL = "http://127.0.0.1:8000/v1"
"""The endpoint's URL in the sandbox."""
_NOT_SEEN = 77
_FILES = 64 << 20
"""Limit in bytes on `/tmp`, and on a file."""
_LIMITS = "/usr/bin/prlimit", f"--fsize={_FILES}", "--nofile=4096", "--nproc=512", "--core=1", "--"
_LISTEN = """
import os, socket, sys
given = socket.socket(fileno=int(sys.argv[1]))
given.set_inheritable(False)
listening = socket.create_server(("127.0.0.1", 8000))
socket.send_fds(given, [b"."], [listening.fileno()])
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} does not start: {error.strerror}")
"""
"""Listens, passes the socket out through a descriptor, and becomes the program."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A program, and where it runs.

    Attributes:
        words: the program and its arguments.
        sandbox: paths that it sees in a sandbox; if empty, it runs with the user's rights.
    """

    words: tuple[str, ...]
    sandbox: tuple[Path, ...]

    def url(self, endpoint: ProgramEndpoint) -> str:
        """Return the endpoint's URL for the program."""
        return _URL if self.sandbox else endpoint.url

    async def start(self, variables: Mapping[str, str], hear: Callable[[bytes], bool]) -> Process:
        """Start it; in a sandbox the endpoint serves it until it ends.

        Args:
            variables: added to the user's environment, or to that of the sandbox.
            hear: as for `Process`.

        Raises:
            EnvError: It cannot be started.
        """
        if not self.sandbox:
            return await _started(self.words, {**_ours(), **variables}, hear)
        ours, theirs = socket.socketpair()
        given = theirs.fileno()
        inside = sys_python(), "-S", "-E", "-c", _LISTEN, str(given), *self.words
        try:
            with theirs, _filter() as seccomp:
                process = await _started(
                    _enclosing(inside, self.sandbox, seccomp),
                    {**variables, **_environment()},
                    hear,
                    (seccomp, given),
                )
        except BaseException:
            ours.close()
            raise
        answering = asyncio.create_task(_answer(process, ours))
        _answering.add(answering)
        answering.add_done_callback(_answering.discard)
        return process

    def check(self) -> None:
        """Check that the sandbox works, if one is wanted, and that the program is found in it.

        Raises:
            ConfigError: The program is not found.
            SandboxError: The sandbox does not work; the message says what is missing.
        """
        if not self.sandbox:
            return
        look = "/usr/bin/sh", "-c", f'command -v "$0" || exit {_NOT_SEEN}', self.words[0]
        with _filter() as seccomp:
            command = _enclosing(look, self.sandbox, seccomp)
            exit_code, output = ran(command, _environment(), (seccomp,))
        if exit_code == _NOT_SEEN:
            seen = ", ".join(("/usr", *map(str, _visible(self.sandbox))))
            raise ConfigError(
                f"dataset.sandbox: {self.words[0]!r} is not seen inside, where there are {seen}; "
                "give its folder, too"
            )
        check_started(exit_code, output)


async def _started(
    command: Sequence[str],
    environment: Mapping[str, str],
    hear: Callable[[bytes], bool],
    descriptors: Sequence[int] = (),
) -> Process:
    """Start a program that dies with this process.

    Raises:
        EnvError: It cannot be started.
    """
    try:
        return await Process.start(command, environment, hear, descriptors=descriptors)
    except OSError as error:
        why = error.strerror or str(error)
        raise EnvError(f"the program {command[0]!r} does not start: {why}") from error


def _ours() -> Mapping[str, str]:
    """Return this process's variables, without a proxy for requests to this machine."""
    names = "no_proxy", "NO_PROXY"
    here = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in names}
    return {**os.environ, **here}


def _filter() -> contextlib.AbstractContextManager[int]:
    return in_memory(filter_program(families=(AF_UNIX, AF_INET, AF_INET6)))


def _enclosing(command: Sequence[str], paths: Sequence[Path], seccomp: int) -> Sequence[str]:
    here = Path.cwd()
    seen = _visible(paths)
    # Parents of visible paths exist, too.
    has_here = any(here.is_relative_to(path) or path.is_relative_to(here) for path in seen)
    return (
        *walls(seccomp, _FILES),
        *(part for path in seen for part in ("--ro-bind", str(path), str(path))),
        # Debian links alternative programs here.
        *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--remount-ro", "/"),
        *("--chdir", str(here) if has_here else "/tmp"),
        *("--", *FIRST, *_LIMITS, *command),
    )


def _visible(paths: Sequence[Path]) -> Sequence[Path]:
    """Return the paths to mount, parents first, because a later mount hides those below it."""
    found = {Path(sys.prefix), Path(sys.base_prefix), *(path.absolute() for path in paths)}
    return sorted(path for path in found if not path.is_relative_to("/usr"))


def _environment() -> Mapping[str, str]:
    pythons = dict.fromkeys((f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin"))
    return {"PATH": ":".join(pythons), "HOME": "/tmp", "LANG": "C.UTF-8"}


_answering: set[asyncio.Task[None]] = set()
"""Tasks of running sandboxes; the event loop itself holds tasks weakly."""


async def _answer(process: Process, ours: socket.socket) -> None:
    """Serve a program in a sandbox until it has ended."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve_inside, ours)
        await process.exited()
        tasks.cancel_scope.cancel()


async def _serve_inside(ours: socket.socket) -> None:
    """Serve at the socket that the sandbox passes out."""
    with ours:
        await anyio.wait_readable(ours)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    for descriptor in descriptors:  # None if it failed before.
        with socket.socket(fileno=descriptor) as bound:
            await serve(ProgramEndpoint.current(), bound, until_signal=False)
