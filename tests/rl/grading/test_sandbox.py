"""Escapes from the sandbox, tried in the real one: each attempt fails and the host is unharmed."""

import functools
import itertools
import os
import platform
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from es_cookbook.common.errors import SandboxError
from es_cookbook.rl.grading.sandbox import Limits, check_sandbox, filter_program, run_code
from es_cookbook.rl.timeouts import Clock, Watch
from tests.sandboxes import needs_sandbox

ROOT = Path(__file__).parents[3]
MIB = 2**20


def marked(mark: str) -> list[int]:
    """Processes of this machine, zombies apart, that bear a mark in their name."""
    return [
        process.pid
        for process in psutil.process_iter(["name", "status"])
        if process.info["name"] == mark and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def new_mark() -> str:
    return f"m{secrets.token_hex(6)}"


def mark_oneself(mark: str) -> str:
    """Code after which its process, and those that it starts, can be found from outside."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b{mark!r})\n"


async def wait_until(done: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not done():
            await anyio.sleep(0.005)


async def output(code: str, limits: Limits | None = None, stdin: str = "") -> list[str]:
    """The lines that a program prints that is expected to end well."""
    ran = await run_code(code, stdin, limits)
    assert (ran.ended, ran.exit_code, ran.stderr) == ("exit", 0, "")
    return ran.stdout.splitlines()


# What it is for.


@needs_sandbox
async def test_a_program_reads_stdin_and_its_output_is_returned() -> None:
    ran = await run_code("import sys\nprint(int(input()) + 1)\nsys.exit('ü')", "41\n")
    assert (ran.ended, ran.exit_code, ran.stdout, ran.stderr) == ("exit", 1, "42\n", "ü\n")
    assert 0 < ran.seconds < 5


@needs_sandbox
async def test_concurrency_is_limited_to_the_cores_and_waiting_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    watch, clocks, spans = Watch(0.8), list[Clock](), list[tuple[float, float]]()

    async def rollout() -> None:
        clocks.append(clock := Clock(watch))
        with clock.running():
            ran = await run_code("import time; time.sleep(0.25)")
            now = time.monotonic()
            spans.append((now - ran.seconds, now))

    with watch:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(rollout)
    assert [clock.reason for clock in clocks] == [None] * 4
    assert all(end <= start + 0.05 for (_, end), (start, _) in itertools.pairwise(spans))


# Escapes.


@needs_sandbox
async def test_a_fork_bomb_ends_with_the_processes_that_it_may_have() -> None:
    mark = new_mark()
    bomb = f"{mark_oneself(mark)}while True:\n    try: os.fork()\n    except OSError: pass"
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(marked(mark)))
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        ran = await run_code(bomb, limits=Limits(seconds=0.5, processes=6))
        tasks.cancel_scope.cancel()
    assert ran.ended == "deadline"
    assert 2 <= most <= 6
    assert marked(mark) == []


@needs_sandbox
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_endless_output_costs_neither_memory_nor_time(stream: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 65536)"
    ran = await run_code(code, limits=Limits(seconds=30, output=100_000))
    assert ran.ended == "output" and ran.exit_code is None
    assert len(getattr(ran, stream)) == 100_000
    assert ran.seconds < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


SEEN = """
import os
for folder, folders, files in os.walk("/"):
    files.sort()
    if folder == "/usr":
        folders.clear()
    print(folder, *files)
"""


@needs_sandbox
async def test_only_usr_is_visible_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen = await output(SEEN)
    assert {*seen} - {"/etc", "/etc ld.so.cache"} == {
        "/ code.py",
        "/dev null urandom zero",
        "/tmp",
        "/usr",
    }
    tried = ["/proc/1/environ", "/proc/self/maps", "/etc/passwd", "/sys", "/home", "/root", "/run"]
    tried += [str(Path.home()), str(ROOT), str(tmp_path / "secret")]
    found = await output(f"import os\nprint([p for p in {tried!r} if os.path.exists(p)])")
    assert found == ["[]"]
    names = "{'PATH', 'HOME', 'LANG', 'PYTHONHASHSEED', 'PWD'}"
    assert await output(f"import os; print(set(os.environ) - {names})") == ["set()"]


READS_MEMORY = """
import ctypes, os
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(8)
here = Vector(ctypes.addressof(room), 8)
pid = int(input())
libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(here), 1, 0)
print("vm", os.strerror(ctypes.get_errno()))
libc.ptrace(16, pid, None, None)
print("ptrace", os.strerror(ctypes.get_errno()))
libc.syscall({keyctl}, 0, -3, 0)
print("keyctl", os.strerror(ctypes.get_errno()))
""".replace("{keyctl}", "250" if platform.machine() == "x86_64" else "219")


@needs_sandbox
@pytest.mark.parametrize("pid", ["1", "2", "outside"])
async def test_processes_cannot_be_inspected(pid: str) -> None:
    denied = os.strerror(1)
    found = await output(READS_MEMORY, stdin=str(os.getpid()) if pid == "outside" else pid)
    assert found == [f"vm {denied}", f"ptrace {denied}", f"keyctl {denied}"]


@needs_sandbox
async def test_no_socket_leads_out(tmp_path: Path) -> None:
    servers: list[socket.socket] = []
    abstract, path = f"\0{new_mark()}", str(tmp_path / "socket")
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, abstract),
        (socket.AF_UNIX, path),
    ):
        servers.append(socket.socket(family))
        servers[-1].bind(address)
        servers[-1].listen()
        servers[-1].setblocking(False)
    code = f"""
import socket
def attempt(family, address):
    try: socket.socket(family).connect(address); print("connected")
    except OSError as error: print(type(error).__name__)
attempt(socket.AF_INET, {servers[0].getsockname()!r})
attempt(socket.AF_INET6, ("::1", 80))
attempt(40, (2, 22))
attempt(16, (0, 0))
attempt(socket.AF_UNIX, {abstract!r})
attempt(socket.AF_UNIX, {path!r})
try: socket.getaddrinfo("localhost", 80)
except OSError as error: print("no names")
"""
    refused = ["PermissionError"] * 4
    expected = [*refused, "ConnectionRefusedError", "FileNotFoundError", "no names"]
    found = await output(code)
    assert found[:6] == expected[:6]
    for server in servers:
        with server, pytest.raises(BlockingIOError):
            server.accept()


@needs_sandbox
async def test_memory_is_limited_in_every_way_of_allocating_it() -> None:
    code = """
import ctypes, mmap, os
def attempt(name, function):
    try: function()
    except (MemoryError, OSError) as error: print(name, "refused")
    else: print(name, "given")
libc = ctypes.CDLL(None, use_errno=True)
def call(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "")
attempt("heap", lambda: bytearray(10 * 2**30))
attempt("map", lambda: mmap.mmap(-1, 10 * 2**30))
attempt("segment", lambda: call(libc.shmget, 0, ctypes.c_size_t(2**20), 0o1666))
attempt("memfd", lambda: os.memfd_create("x"))
attempt("queue", lambda: call(libc.msgget, 0, 0o1666))
"""
    names = ("heap", "map", "segment", "memfd", "queue")
    before = psutil.virtual_memory().available
    found = await output(code, Limits(memory=64 * MIB))
    assert found == [f"{name} refused" for name in names]
    assert psutil.virtual_memory().available > before - 1024 * MIB


@needs_sandbox
async def test_disks_are_not_filled() -> None:
    code = """
import os
def fill(path, size=2**20):
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while written < 2**30:
                written += file.write(bytes(size))
    except OSError: pass
    return written
print(sum(fill(f"/tmp/{i}") for i in range(8)))
print([p for p in ("/x", "/dev/x", "/etc/x", "/usr/x", "/dev/shm/x", "/var/tmp/x") if fill(p)])
"""
    limits = Limits(files=2 * MIB)
    held, nothing = await output(
        f"import signal\nsignal.signal(25, signal.SIG_IGN)\n{code}", limits
    )
    assert MIB <= int(held) <= 2 * MIB
    assert nothing == "[]"


@needs_sandbox
async def test_there_are_no_namespaces_inside() -> None:
    code = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    print(libc.unshare(flag), libc.syscall({clone}, flag | 17, None, None, None, None))
print(subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode != 0)
print(os.path.exists("/usr/bin/bwrap"), subprocess.run(["/usr/bin/bwrap", "--dev-bind", "/", "/",
    "true"], capture_output=True).returncode != 0)
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/tmp"))
""".replace("{clone}", "56" if platform.machine() == "x86_64" else "220")
    found = await output(code)
    assert found[:4] == ["-1 -1"] * 4
    assert found[4] == "True" and found[5].endswith("True") and found[6] == "-1 -1"


@needs_sandbox
async def test_daemonised_children_are_killed() -> None:
    mark = new_mark()
    code = f"""{mark_oneself(mark)}
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0)
        os.closerange(0, 10)
        time.sleep(100)
    time.sleep(100)
print("parent", flush=True)
"""
    ran = await run_code(code)
    assert (ran.ended, ran.exit_code, ran.stdout) == ("exit", 0, "parent\n")
    assert ran.seconds < 4
    assert marked(mark) == []


@needs_sandbox
async def test_cancelling_during_the_start_leaves_no_process() -> None:
    size = 16 * MIB + secrets.randbelow(MIB)

    def sandboxes() -> list[int]:
        return [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any(str(size) in part for part in process.info["cmdline"] or ())
        ]

    for milliseconds in range(0, 40, 2):
        with anyio.move_on_after(milliseconds / 1000):
            await run_code("import time; time.sleep(100)", limits=Limits(files=size))
        await wait_until(lambda: sandboxes() == [])
    async with anyio.create_task_group() as tasks:
        code = "import time; time.sleep(100)"
        tasks.start_soon(functools.partial(run_code, code, limits=Limits(files=size)))
        await wait_until(lambda: len(sandboxes()) > 1)
        tasks.cancel_scope.cancel()
    await wait_until(lambda: sandboxes() == [])


@needs_sandbox
async def test_it_ends_with_the_program_that_started_it() -> None:
    mark = new_mark()
    code = f"{mark_oneself(mark)}ctypes.CDLL(None).prctl(1, 0)\ntime.sleep(100)"
    program = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import anyio, functools\n"
            "from es_cookbook.rl.grading.sandbox import Limits, run_code\n"
            f"anyio.run(functools.partial(run_code, {code!r}, limits=Limits(seconds=99)))",
        ],
        cwd=ROOT,
    )
    await wait_until(lambda: len(marked(mark)) == 1)
    program.kill()
    program.wait()
    await wait_until(lambda: marked(mark) == [])


# Where there is none.


async def test_without_bubblewrap_nothing_runs_and_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_sandbox.cache_clear()
    with pytest.raises(SandboxError) as caught:
        await run_code("print(1)")
    assert "which needs 'bwrap', and that is not installed: install the packages bubblewrap" in str(
        caught.value
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_jumps_of_the_filter_stay_inside_it(machine: str) -> None:
    program = filter_program(machine)
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    assert len(program) % 8 == 0
    for at, step in enumerate(steps):
        assert at + max(step[2], step[3]) + 1 < len(steps) or at == len(steps) - 1
