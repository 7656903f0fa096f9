r"""Model-written Python in a sandbox: bubblewrap, limits on resources, and a deadline.

    ran = await run_code("print(int(input()) + 1)", stdin="41\n", limits=Limits(seconds=2))
    ran.stdout == "42\n"

Model-written code may do anything: loop, fork, fill memory and disks, read secrets, connect to the
network. So it runs in bubblewrap or not at all. It sees a read-only `/usr` and a small private
`/tmp` in memory; no home, `/etc`, `/proc`, `/sys`, environment, network or processes of others. It
has no capabilities, cannot make namespaces, and a filter refuses system calls that grading does not
need (`filter_program`). As root, `setpriv` drops the user first: the kernel does not
count the processes of root. `prlimit` bounds each process; the deadline and the length of the
output are watched from here. Nothing is written outside, and when a call is over, returned or
cancelled, all its processes have ended (a moment later if it is cancelled while it starts).

The interpreter is the system's, `/usr/bin/python3` or `/usr/local/bin/python3`, not this one.
Hashes are not random there, so runs of the same code are reproducible.

Left out: a limit on the memory of all processes together, which needs a cgroup of our own. At worst
they take `processes` x `memory`, plus `files`, plus about a kilobyte for each empty file that they
can create within the deadline. And a kernel with a hole is a sandbox with one.
"""

import dataclasses
import functools
import json
import math
import os
import platform
import shutil
import signal
import struct
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, cast

import anyio
import chz

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import SandboxError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.machine.processes import Process, ran
from es_cookbook.rl.timeouts import in_turn

_MIB = 2**20
_NOBODY = 65534
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
_CODE = "/code.py"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
FIRST = ("/usr/bin/sh", "-c", 'exec 3>&2 2>/dev/null; "$@" 2>&3 3>&-; exit', "sh")
"""The first process inside, which starts the program and ends with its exit code.

bubblewrap's own tells that code and is not waited for: a zombie of process 1, for each sandbox.
"""
_SECONDS_TO_END = 5.0


@chz.chz
class Limits:
    """Resource limits of a piece of model-written code."""

    seconds: float = chz.field(default=5.0, doc="deadline, by the clock, the start included")
    memory: int = chz.field(default=512 * _MIB, doc="address space of each process, in bytes")
    files: int = chz.field(default=16 * _MIB, doc="size of its /tmp, which is in memory, in bytes")
    output: int = chz.field(default=_MIB, doc="most bytes of stdout, and of stderr; more ends it")
    processes: int = chz.field(default=8, doc="most processes and threads at a time")
    open_files: int = chz.field(default=64, doc="most open files of each process")

    _seconds = in_range("seconds", above=0)
    _memory = in_range("memory", at_least=64 * _MIB)
    _files = in_range("files", at_least=4096)
    _counts = in_range("output", "processes", at_least=1)
    _open_files = in_range("open_files", at_least=8)


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of running a piece of code.

    Attributes:
        ended: "exit" by itself, or killed: at the "deadline", or because of too much "output".
        exit_code: as a shell reports it, 128 + n after signal n; None if it was killed.
        stdout: its output, as UTF-8, no longer than the limit.
        stderr: the same.
        seconds: by the clock, from before the start to after the end.
    """

    ended: Literal["exit", "deadline", "output"]
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float


async def run_code(code: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run a Python program in the sandbox.

    No more run at a time than there are cores; waiting for a turn counts neither towards the
    deadline nor towards the rollout's `rollout_timeout`.

    Args:
        code: the text of a module, run as the main program.
        stdin: its standard input.
        limits: `Limits()` if None.

    Raises:
        SandboxError: There is no sandbox here, or it did not start. The code has not run.
    """
    limits = limits or Limits()
    check_sandbox()
    async with in_turn("sandbox", num_cores()):
        return await _run(code, stdin, limits)


@functools.cache
def check_sandbox() -> None:
    """Start the sandbox once, to check that it is available.

    Raises:
        SandboxError: What is missing, and how to get it.
    """
    with in_memory() as code, in_memory(filter_program()) as seccomp, in_memory() as status:
        command = _command(Limits(), code, seccomp, status)
        check_started(*ran(command, {}, (code, seccomp, status)))


def check_started(exit_code: int, output: str) -> None:
    """Raise a SandboxError if a program started in a sandbox did not end well."""
    if exit_code != 0:
        said = (output.strip().splitlines() or [f"exit code {exit_code}"])[-1]
        raise SandboxError(
            f"the sandbox does not start here ({said}): it needs bubblewrap "
            "0.8 or later, and a kernel and a container that allow user namespaces"
        )


async def _run(code: str, stdin: str, limits: Limits) -> Ran:
    began = time.monotonic()
    is_too_long = False
    running = anyio.CancelScope()

    def hear(piece: bytes, into: bytearray) -> bool:
        nonlocal is_too_long
        into += piece[: limits.output + 1 - len(into)]
        if len(into) > limits.output:
            is_too_long = True
            running.cancel()
        return True

    out, err = bytearray(), bytearray()
    with (
        in_memory(code.encode(errors="replace")) as code_fd,
        in_memory(filter_program()) as seccomp,
        in_memory() as status,
    ):
        process = await Process.start(
            _command(limits, code_fd, seccomp, status),
            {},  # bubblewrap's own too: what is in its memory is inside the sandbox.
            functools.partial(hear, into=out),
            functools.partial(hear, into=err),
            (code_fd, seccomp, status),
            outlives=True,
        )
        try:
            process.write(stdin.encode(errors="replace"), close=True)
            with running:
                running.deadline = anyio.current_time() + limits.seconds
                await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, status)
        said = _status(status)
    exited = not (is_too_long or running.cancelled_caught)
    if exited and "exit-code" not in said:
        raise SandboxError(f"the sandbox did not start: bubblewrap {process.how()}")
    return Ran(
        "exit" if exited else "output" if is_too_long else "deadline",
        said["exit-code"] if exited else None,
        out[: limits.output].decode(errors="replace"),
        err[: limits.output].decode(errors="replace"),
        time.monotonic() - began,
    )


@contextmanager
def in_memory(content: bytes = b"") -> Generator[int]:
    """Yield the descriptor of a file without a name, which a child may inherit."""
    descriptor = os.memfd_create("es_cookbook")
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield descriptor


def _installed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise SandboxError(
            f"model-written code runs in a sandbox only, which needs {program!r}, and that is not "
            "installed: install the packages bubblewrap (0.8 or later) and util-linux of your "
            "Linux distribution"
        )
    return path


def _command(limits: Limits, code: int, seccomp: int, status: int) -> Sequence[str]:
    """Return the command that starts the sandbox; the numbers are descriptors that it inherits."""
    enclosing = walls(seccomp, limits.files)
    return (
        *(_drop_user() if os.geteuid() == 0 else ()),
        *enclosing,
        *("--clearenv", "--json-status-fd", str(status), "--ro-bind-data", str(code), _CODE),
        # bubblewrap's own root is a tmpfs of half the memory, which one could fill.
        *("--remount-ro", "/", "--chdir", "/tmp"),
        *(part for name, value in _ENVIRONMENT.items() for part in ("--setenv", name, value)),
        "--",
        *FIRST,
        *_limited(limits),
        # No imports from /tmp, no packages of a user, no bytecode written.
        *(sys_python(), "-P", "-s", "-B", _CODE),
    )


def walls(seccomp: int, files: int) -> Sequence[str]:
    """Return the start of bubblewrap's command: nothing shared, `/usr` read-only.

    Args:
        seccomp: a file descriptor with the filter.
        files: bytes of `/tmp`.
    """
    bubblewrap = _installed("bwrap")
    return (
        *(bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--as-pid-1"),
        *("--seccomp", str(seccomp)),
        *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"),
        *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/zero", "/dev/zero"),
        *("--dev-bind", "/dev/urandom", "/dev/urandom"),
        *("--size", str(files), "--perms", "0700", "--tmpfs", "/tmp"),
    )


def _drop_user() -> Sequence[str]:
    return (
        *(_installed("setpriv"), f"--reuid={_NOBODY}", f"--regid={_NOBODY}"),
        *("--clear-groups", "--inh-caps=-all", "--"),
    )


def _limited(limits: Limits) -> Sequence[str]:
    """Return the command that sets limits inside, where only the sandbox's processes count."""
    cpu_seconds = math.ceil(limits.seconds) + 1
    return (
        "/usr/bin/prlimit",
        f"--as={limits.memory}",
        f"--fsize={limits.files}",
        f"--nofile={limits.open_files}",
        f"--nproc={limits.processes + 1}",  # The first is one.
        f"--cpu={cpu_seconds}",
        "--core=1",  # With 0 a core dump still goes to a program that the system may name for them.
        "--msgqueue=0",
        "--memlock=0",
        "--rtprio=0",
        "--",
    )


@functools.cache
def sys_python() -> str:
    """Return the path of the system's interpreter.

    Raises:
        SandboxError: There is none.
    """
    for path in _PYTHONS:
        if Path(path).exists():
            return path
    raise SandboxError(
        f"model-written code runs with the system's Python, and there is none: {_PYTHONS[0]}"
    )


async def _end(process: Process, status: int) -> None:
    """Kill all processes, and wait until they have ended."""
    # The first process inside, and all with it, for which bubblewrap waits before it ends.
    first = _status(status).get("child-pid")
    if process.exit_code is None and first is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(first, signal.SIGKILL)
        with anyio.move_on_after(_SECONDS_TO_END):
            await process.wait()
    await process.end()


def _status(descriptor: int) -> dict[str, int]:
    """Read bubblewrap's status: `child-pid`, the first process inside; at the end `exit-code`."""
    said: dict[str, int] = {}
    for line in os.pread(descriptor, 65536, 0).split(b"\n"):
        with suppress(ValueError):  # It is still writing the last one.
            said |= cast(dict[str, int], json.loads(line))
    return said


_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (what the kernel calls it, which column of the numbers is its)."""
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}


@functools.cache
def filter_program(machine: str | None = None, families: tuple[int, ...] = (AF_UNIX,)) -> bytes:
    """Return the filter of system calls for a machine (default: this one) for `bwrap --seccomp`.

    Sockets are of these families alone.

    Namespaces, a dropped user without capabilities and resource limits leave gaps that this closes:
    the kernel's keyrings and log, which have no namespace of their own; AF_VSOCK, which reaches the
    host of a virtual machine without a network; memory that no address-space limit counts (System V
    segments, memfds); other processes of the same user; and large parts of the kernel that grading
    does not need. Programs in another ABI of the processor (32 bits, x32) are killed: their numbers
    mean other calls.

    It is cBPF: loads, comparisons, jumps forward and verdicts.

    Raises:
        SandboxError: The numbers of its system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        known = " and ".join(sorted(_ARCHITECTURES))
        raise SandboxError(
            f"model-written code runs in a sandbox on {known} alone, found {machine!r}"
        )
    architecture, column = _ARCHITECTURES[machine]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, skip_if=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_step(_AT_LEAST, _X32, skip_else=1), _step(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        program += [_step(_EQUAL, numbers[column], skip_else=1), _step(_RETURN, _REFUSE)]
    for numbers in _SOCKETS.values():
        program += [
            _step(_EQUAL, numbers[column], skip_else=len(families) + 3),
            _step(_LOAD, _FIRST_ARGUMENT),
            *(
                _step(_EQUAL, family, skip_if=len(families) - at)
                for at, family in enumerate(families)
            ),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, value)
