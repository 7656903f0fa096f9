"""A call in a worker process comes back or is told in a sentence, and the pool leaks nothing."""

import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import WorkerError, WorkerTimeoutError
from es_cookbook.rl.grading.workers import end_idle_workers, in_worker
from tests import graders

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_a_call_comes_back_and_its_worker_is_used_again() -> None:
    assert await in_worker(graders.add, 1, 2, timeout=10) == 3
    pid = await in_worker(graders.worker, timeout=10)
    assert pid != os.getpid()
    assert await in_worker(graders.worker, timeout=10) == pid
    assert await in_worker(functools.partial(graders.add, 1), 5, timeout=10) == 6
    assert len(await in_worker(graders.huge, 50_000_000, timeout=10)) == 50_000_000
    assert await in_worker(len, bytes(50_000_000), timeout=10) == 50_000_000
    end_idle_workers()
    assert not is_running(pid)


@pytest.mark.parametrize("function", [graders.loop_for_ever, graders.explode])
async def test_past_its_deadline_it_is_killed_and_replaced(function: Callable[[], None]) -> None:
    pid = await in_worker(graders.worker, timeout=10)
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError) as caught:
        await in_worker(function, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert str(caught.value) == (
        f"{function.__name__} was not done after 0.2 s in a worker process, which was killed"
    )
    assert time.monotonic() - began < 8  # ten seconds are what a worker has without its own limit
    wait_until(lambda: not is_running(pid))
    assert await in_worker(graders.worker, timeout=10) != pid


@pytest.mark.parametrize(
    ("function", "args", "sentence"),
    [
        (graders.segfault, (), "the worker process of segfault was ended by SIGSEGV"),
        (graders.exit_at_once, (), "the worker process of exit_at_once ended with exit code 7"),
        (sys.exit, (3,), "exit called sys.exit(3) in a worker process"),
        (
            graders.raise_own_error,
            (),
            "raise_own_error raised OwnError: no, because not",
        ),
        (
            graders.give_a_function,
            (),
            "give_a_function returned a function, which cannot be sent from a worker process: ",
        ),
    ],
)
async def test_what_goes_wrong_is_told_in_a_sentence_and_the_pool_goes_on(
    function: Callable[..., Any], args: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        await in_worker(function, *args, timeout=10)
    assert str(caught.value).startswith(sentence)
    assert await in_worker(graders.add, 1, 2, timeout=10) == 3


async def test_an_exception_comes_back_as_it_is_with_the_workers_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        await in_worker(graders.raise_key_error, "lost", timeout=10)
    assert caught.value.args == ("lost",)
    (note,) = caught.value.__notes__
    assert note.startswith("In the worker process:\nTraceback")
    assert "in raise_key_error\n    raise KeyError(key)" in note


async def test_what_a_function_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    end_idle_workers()  # So that the worker gets the stderr of this test.
    assert await in_worker(graders.print_everywhere, timeout=10) == ""
    end_idle_workers()
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["echoed", "printed", "written"]


async def test_a_worker_that_was_killed_while_idle_is_replaced() -> None:
    pid = await in_worker(graders.worker, timeout=10)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert await in_worker(graders.worker, timeout=10) != pid


async def test_processes_that_a_function_has_started_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(WorkerTimeoutError):
        await in_worker(graders.child_that_stays, str(file), timeout=0.3)
    wait_until(lambda: not is_running(int(file.read_text())))


async def test_a_call_that_is_cancelled_ends_its_worker(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            functools.partial(in_worker, graders.note_and_sleep, str(file), timeout=100)
        )
        while not file.exists() or not file.read_text():
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    wait_until(lambda: not is_running(int(file.read_text())))


async def test_many_calls_leak_nothing() -> None:
    def now() -> tuple[int, int]:
        gc.collect()
        children = Path("/proc/self/task").glob("*/children")
        alive = [pid for task in children for pid in task.read_text().split()]
        return len(os.listdir("/proc/self/fd")), len(alive)

    async def calls(count: int) -> None:
        for i in range(count):
            assert await in_worker(graders.add, i, 1, timeout=10) == i + 1

    async def several(count: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(calls, count // 4)

    end_idle_workers()
    before = now()
    await several(400)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await several(800)
    for _ in range(20):
        with pytest.raises(WorkerTimeoutError):
            await in_worker(graders.loop_for_ever, timeout=0.001)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2_000  # kB
    end_idle_workers()
    assert now() == before


SCRIPT = """
import anyio
from es_cookbook.rl.grading.workers import in_worker

print("imported", flush=True)

class Grade:
    def __init__(self, reward):
        self.reward = reward

def grade(text):
    return Grade(len(text))

async def main():
    print((await in_worker(grade, "four", timeout=10)).reward)
"""


@pytest.mark.parametrize(
    ("last_line", "out", "err"),
    [
        ("if __name__ == '__main__': anyio.run(main)", "imported\n4\n", "imported\n"),
        ("anyio.run(main)", "imported\n", "which would run as a whole when it is imported"),
    ],
)
def test_a_script_s_own_functions_need_its_main_guard(
    tmp_path: Path, last_line: str, out: str, err: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + last_line)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == out
    assert err in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_program_however_it_ends(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "pid"
    program = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import anyio, functools\n"
            "from es_cookbook.rl.grading.workers import in_worker\n"
            "from tests.graders import note_and_sleep\n"
            f"anyio.run(functools.partial(in_worker, note_and_sleep, {str(file)!r}, timeout=99))",
        ],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_until(lambda: file.exists() and bool(file.read_text()))
    os.killpg(program.pid, number)  # To the whole group, as a terminal sends Ctrl-C.
    said = program.communicate(timeout=10)[1]
    wait_until(lambda: not is_running(int(file.read_text())))
    assert "worker.py" not in said
