"""Programs as commands: in a sandbox, the endpoint is all that they can reach.

Inside, a program sees `/usr`, this Python and the paths that it is given, all read-only, and a
`/tmp` in memory. It has the variables of its rollout and no others, and no network but a loopback
of its own. There the first process makes the socket at which the endpoint listens, and hands it
out: so nothing has to be forwarded, and no path or port of the machine is shared.

Walls and the filter of system calls are those of `es_cookbook.rl.grading.sandbox`, but for sockets
of IP. The user stays the same, so that the program can read what only its owner may.

Left out: limits on memory (where it runs out, the kernel ends programs before the run) and, for
root, on the number of processes.
"""

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio

from es_cookbook.common.errors import ConfigError, EnvError
from es_cookbook.common.machine.processes import Process, dying_first
from es_cookbook.plugins.endpoint.app import serve
from es_cookbook.plugins.program.desk import Desk
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
"""Of the endpoint, inside."""
_NOT_SEEN = 77
_FILES = 64 << 20
"""Bytes of `/tmp`, and of a file."""
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
"""Listens, hands the socket out through a descriptor, and becomes the program."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A program, and where it runs.

    Attributes:
        words: the program and its arguments.
        sandbox: what it sees of the machine; if empty, it runs outside, with the user's rights.
    """

    words: tuple[str, ...]
    sandbox: tuple[Path, ...]

    def url(self, desk: Desk) -> str:
        """At which it reaches the desk."""
        return _URL if self.sandbox else desk.url

    async def start(
        self,
        variables: Mapping[str, str],
        hear: Callable[[bytes], bool],
        folder: Path | None = None,
        result: Path | None = None,
    ) -> Process:
        """Start it; in a sandbox the desk answers it for as long as it runs.

        Args:
            variables: of its environment, beside the user's or the sandbox's own.
            hear: as of `Process`.
            folder: which it sees, too.
            result: a file in it that it may write.

        Raises:
            EnvError: It cannot be started.
        """
        if not self.sandbox:
            return await _started(self.words, {**_ours(), **variables}, hear)
        desk = Desk.of_loop()
        paths = (*self.sandbox, folder) if folder else self.sandbox
        ours, theirs = socket.socketpair()
        given = theirs.fileno()
        inside = sys_python(), "-S", "-E", "-c", _LISTEN, str(given), *self.words
        try:
            with theirs, _filter() as seccomp:
                process = await _started(
                    _enclosing(inside, paths, seccomp, result),
                    {**variables, **_environment()},
                    hear,
                    (seccomp, given),
                )
        except BaseException:
            ours.close()
            raise
        answering = asyncio.create_task(_answer(process, desk, ours))
        _answering.add(answering)
        answering.add_done_callback(_answering.discard)
        return process

    def check(self) -> None:
        """Try whether there is a sandbox here if it needs one, and the program in it.

        Raises:
            ConfigError: It is not.
            SandboxError: What is missing, and how to get it.
        """
        if not self.sandbox:
            return
        look = "/usr/bin/sh", "-c", f'command -v "$0" || exit {_NOT_SEEN}', self.words[0]
        with _filter() as seccomp:
            tried = subprocess.run(
                _enclosing(look, self.sandbox, seccomp),
                capture_output=True,
                text=True,
                env=_environment(),
                pass_fds=(seccomp,),
            )
        if tried.returncode == _NOT_SEEN:
            seen = ", ".join(("/usr", *map(str, _visible(self.sandbox))))
            raise ConfigError(
                f"dataset.sandbox: {self.words[0]!r} is not seen inside, where there are {seen}; "
                "give its folder, too"
            )
        check_started(tried)


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
    whole = [*dying_first(), *command]
    try:
        return await Process.start(whole, environment, hear, descriptors=descriptors)
    except OSError as error:
        why = error.strerror or str(error)
        raise EnvError(f"the program {command[0]!r} does not start: {why}") from error


def _ours() -> Mapping[str, str]:
    """This process's variables; requests to this machine go through no proxy."""
    names = "no_proxy", "NO_PROXY"
    here = {name: ",".join(filter(None, (os.environ.get(name), "127.0.0.1"))) for name in names}
    return {**os.environ, **here}


def _filter() -> contextlib.AbstractContextManager[int]:
    return in_memory(filter_program(families=(AF_UNIX, AF_INET, AF_INET6)))


def _enclosing(
    command: Sequence[str], paths: Sequence[Path], seccomp: int, result: Path | None = None
) -> Sequence[str]:
    here = Path.cwd()
    seen = _visible(paths)
    # Which is there for what is below it, too.
    has_here = any(here.is_relative_to(path) or path.is_relative_to(here) for path in seen)
    return (
        *walls(seccomp, _FILES),
        *(part for path in seen for part in ("--ro-bind", str(path), str(path))),
        *(("--bind", str(result), str(result)) if result else ()),
        # Debian's names of programs that there are several of.
        *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--remount-ro", "/"),
        *("--chdir", str(here) if has_here else "/tmp"),
        *("--", *FIRST, *_LIMITS, *command),
    )


def _visible(paths: Sequence[Path]) -> Sequence[Path]:
    """Parents first, since what is bound later hides what was there."""
    found = {Path(sys.prefix), Path(sys.base_prefix), *(path.absolute() for path in paths)}
    return sorted(path for path in found if not path.is_relative_to("/usr"))


def _environment() -> Mapping[str, str]:
    pythons = dict.fromkeys((f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin"))
    return {"PATH": ":".join(pythons), "HOME": "/tmp", "LANG": "C.UTF-8"}


_answering: set[asyncio.Task[None]] = set()
"""For sandboxes that run; the event loop itself holds tasks weakly."""


async def _answer(process: Process, desk: Desk, ours: socket.socket) -> None:
    """Answer a program in a sandbox until it has ended."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve_inside, desk, ours)
        await process.exited()
        tasks.cancel_scope.cancel()


async def _serve_inside(desk: Desk, ours: socket.socket) -> None:
    """Serve at the socket that comes from inside."""
    with ours:
        await anyio.wait_readable(ours)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    for descriptor in descriptors:  # None if it failed before.
        with socket.socket(fileno=descriptor) as bound:
            await serve(desk, bound, until_told=False)
