"""Calls in worker processes: results, errors, time-outs, and that the pool leaks nothing."""

import contextlib
import functools
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from es_cookbook.common.errors import WorkerError, WorkerTimeoutError
from es_cookbook.rl.grading.workers import in_worker
from tests import graders

ROOT = Path(__file__).parents[3]


async def ended(pid: int) -> None:
    """Wait until a process has ended."""
    with anyio.fail_after(10), contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await anyio.sleep(0.01)


async def pid_in(file: Path) -> int:
    """The process id that a process writes to a file."""
    with anyio.fail_after(10):
        while not file.exists() or not file.read_text():
            await anyio.sleep(0.01)
    return int(file.read_text())


async def test_a_call_returns_its_result_and_its_worker_is_used_again() -> None:
    assert await in_worker(graders.add, 1, 2, timeout=10) == 3
    pid = await in_worker(graders.worker, timeout=10)
    assert pid != os.getpid()
    assert await in_worker(functools.partial(graders.add, 1), 5, timeout=10) == 6
    assert len(await in_worker(graders.huge, 50_000_000, timeout=10)) == 50_000_000
    assert await in_worker(len, bytes(50_000_000), timeout=10) == 50_000_000
    assert await in_worker(graders.worker, timeout=10) == pid
    os.kill(pid, signal.SIGKILL)
    await ended(pid)
    await anyio.sleep(0.2)  # The event loop learns of it.
    assert await in_worker(graders.worker, timeout=10) != pid


@pytest.mark.parametrize("function", [graders.loop_for_ever, graders.explode])
async def test_a_worker_is_killed_at_its_time_out_and_replaced(
    function: Callable[[], None],
) -> None:
    pid = await in_worker(graders.worker, timeout=10)
    with pytest.raises(WorkerTimeoutError) as caught:
        await in_worker(function, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    assert str(caught.value) == (
        f"{function.__name__} was not done after 0.2 s in a worker process, which was killed"
    )
    await ended(pid)
    assert await in_worker(graders.worker, timeout=10) != pid


@pytest.mark.parametrize(
    ("function", "args", "sentence"),
    [
        (graders.segfault, (), "the worker process of segfault was ended by SIGSEGV"),
        (graders.exit_at_once, (), "the worker process of exit_at_once ended with exit code 7"),
        (sys.exit, (3,), "exit raised SystemExit: 3"),
        (graders.raise_own_error, (), "raise_own_error raised OwnError: no, because not"),
        (graders.give_a_function, (), "give_a_function returned a function, which cannot be sent"),
    ],
)
async def test_other_failures_are_worker_errors_and_the_pool_goes_on(
    function: Callable[..., Any], args: tuple[Any, ...], sentence: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        await in_worker(function, *args, timeout=10)
    assert str(caught.value).startswith(sentence)
    assert await in_worker(graders.add, 1, 2, timeout=10) == 3


async def test_an_exception_is_raised_with_the_worker_s_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        await in_worker(graders.raise_key_error, "lost", timeout=10)
    assert caught.value.args == ("lost",)
    (note,) = caught.value.__notes__
    assert note.startswith("In the worker process:\nTraceback")
    assert "in raise_key_error\n    raise KeyError(key)" in note


async def test_output_goes_to_stderr_and_input_is_empty(capfd: pytest.CaptureFixture[str]) -> None:
    assert await in_worker(graders.print_everywhere, timeout=10) == ""
    await in_worker(graders.add, 1, 2, timeout=10)
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.split()) == ["echoed", "printed", "written"]


async def test_processes_that_a_function_has_started_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(WorkerTimeoutError):
        await in_worker(graders.child_that_stays, str(file), timeout=0.3)
    await ended(await pid_in(file))


async def test_a_call_that_is_cancelled_ends_its_worker(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            functools.partial(in_worker, graders.note_and_sleep, str(file), timeout=100)
        )
        pid = await pid_in(file)
        tasks.cancel_scope.cancel()
    await ended(pid)


@pytest.mark.slow
def test_many_calls_leak_nothing_and_workers_end_with_the_event_loop() -> None:
    def now() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(psutil.Process().children())

    async def calls(count: int) -> None:
        for i in range(count):
            assert await in_worker(graders.add, i, 1, timeout=10) == i + 1

    async def many() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(calls, 50)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await calls(400)
        for _ in range(20):
            with pytest.raises(WorkerTimeoutError):
                await in_worker(graders.loop_for_ever, timeout=0.001)
        await calls(2)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2_000  # kB

    anyio.run(calls, 1)
    before = now()
    anyio.run(many)
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
@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_a_script_s_own_functions_need_its_main_guard(
    tmp_path: Path, words: list[str], last_line: str, out: str, err: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + last_line)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert ran.stdout == out
    assert err in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_workers_end_with_the_program(tmp_path: Path, number: signal.Signals) -> None:
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
    pid = await pid_in(file)
    os.killpg(program.pid, number)  # To the whole group, as a terminal sends Ctrl-C.
    assert "worker.py" not in program.communicate(timeout=10)[1]
    await ended(pid)
