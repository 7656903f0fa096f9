"""Envs that never give the event loop back, and runs in which one rollout does that.

    python -m tests.blocking

imports everything and then forks runs for every line of JSON that it reads: a list with each run's
options, and the file for what it writes to stderr. It prints process ids, and then exit codes.
"""

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import chz
import transformers  # noqa: F401 - before the forks, so that no child has to

from es_cookbook.checkpoints import models  # noqa: F401 - for the same reason
from es_cookbook.common.cli import run_cli
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.problem_env import Grade, ProblemEnv
from es_cookbook.rl.types import (
    Action,
    Datasets,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    RLDataset,
    RLDatasetBuilder,
    SamplingParams,
    StepResult,
    Trajectory,
)
from es_cookbook.runs.program import run
from tests.tiny_run import TinyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOR_EVER = 10_000


def sleep() -> None:
    time.sleep(FOR_EVER)


def loop() -> None:
    count = 0
    while True:
        count += 1


def regular_expression() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def swallow_exceptions() -> None:
    while True:
        try:  # noqa: SIM105 - as an Env would
            time.sleep(FOR_EVER)
        except Exception:
            pass


def lock() -> None:
    mine = threading.Lock()
    mine.acquire()
    mine.acquire()


def read() -> None:
    mine, _theirs = socket.socketpair()
    with mine, _theirs:
        mine.recv(1)


def empty_queue() -> None:
    queue.Queue[int]().get()


def program() -> None:
    subprocess.run(["sleep", str(FOR_EVER)], check=True)


def swallow_everything() -> None:
    while True:
        try:  # noqa: SIM105 - as an Env would
            sum(range(1000))
        except:  # noqa: E722
            pass


def deaf() -> None:
    """Deadlocks in C code that no signal reaches; other threads run."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def holds_the_interpreter() -> None:
    """The same, and no other thread runs either."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def recurse() -> None:
    try:
        recurse()
    finally:
        recurse()


def wait_in_finally() -> None:
    try:
        time.sleep(FOR_EVER)
    finally:
        swallow_everything()


def other_handlers() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    time.sleep(FOR_EVER)


def other_wakeup() -> None:
    signal.set_wakeup_fd(-1)
    swallow_everything()


def thread() -> None:
    """A thread for which Python waits at its end."""
    threading.Thread(target=time.sleep, args=[FOR_EVER]).start()
    time.sleep(FOR_EVER)


def busy_threads() -> None:
    for _ in range(4):
        threading.Thread(target=swallow_everything).start()
    time.sleep(FOR_EVER)


def pool() -> None:
    with ThreadPoolExecutor(2) as threads:
        threads.submit(time.sleep, FOR_EVER).result()


def at_exit() -> None:
    atexit.register(time.sleep, FOR_EVER)
    time.sleep(FOR_EVER)


def at_exit_deaf() -> None:
    atexit.register(swallow_everything)
    time.sleep(FOR_EVER)


class Undead:
    """Waits when it is deleted."""

    def __del__(self) -> None:
        time.sleep(FOR_EVER)


class Complains:
    """Raises when it is deleted."""

    def __del__(self) -> None:
        raise KeyboardInterrupt


kept: list[object] = []


def delete_at_the_end() -> None:
    kept.append(Undead())
    time.sleep(FOR_EVER)


def delete_badly() -> None:
    kept.append(Complains())
    time.sleep(FOR_EVER)


_IGNORES = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"


def child() -> None:
    """A child of its own session that ignores signals."""
    code = f"{_IGNORES}time.sleep({FOR_EVER})"
    kept.append(subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True))
    time.sleep(FOR_EVER)


def child_and_grandchild() -> None:
    code = f"{_IGNORES}import os\nos.fork()\ntime.sleep({FOR_EVER})"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)


def fork() -> None:
    if not os.fork():
        swallow_everything()
    time.sleep(FOR_EVER)


def processes() -> None:
    process = multiprocessing.get_context("fork").Process(target=swallow_everything)
    process.start()
    process.join()


async def swallow_cancellation() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await anyio.sleep(FOR_EVER)


async def swallow_everything_busily() -> None:
    while True:
        try:
            await asyncio.sleep(0)
            time.sleep(0.001)
        except BaseException:
            pass


async def shielded() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(FOR_EVER)


async def shielded_task() -> None:
    task = asyncio.ensure_future(swallow_cancellation())
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.shield(task)


async def unawaited_task() -> None:
    kept.append(asyncio.ensure_future(swallow_cancellation()))
    await anyio.sleep(FOR_EVER)


async def group_of_tasks() -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(swallow_cancellation)


async def finally_awaits() -> None:
    try:
        await anyio.sleep(FOR_EVER)
    finally:
        await swallow_cancellation()


async def finally_blocks() -> None:
    try:
        await anyio.sleep(FOR_EVER)
    finally:
        swallow_everything()


async def uncancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task.uncancel()


async def generates() -> AsyncGenerator[int]:
    while True:
        try:
            yield 1
            await asyncio.sleep(FOR_EVER)
        except BaseException:
            pass


async def generator() -> None:
    async for _ in generates():
        pass


async def in_a_thread() -> None:
    await asyncio.to_thread(time.sleep, FOR_EVER)


async def in_a_thread_of_anyio() -> None:
    await anyio.to_thread.run_sync(swallow_everything)


async def in_a_worker() -> None:
    await in_worker(swallow_everything, timeout=FOR_EVER)


async def awaited_program() -> None:
    code = f"{_IGNORES}time.sleep({FOR_EVER})"
    await anyio.run_process([sys.executable, "-S", "-c", code])


async def loop_stopped() -> None:
    asyncio.get_running_loop().call_soon = lambda *_, **__: None  # type: ignore[method-assign]
    await anyio.sleep(FOR_EVER)


def fail() -> None:
    raise ValueError("it failed")


def leave() -> None:
    raise SystemExit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def give_up() -> None:
    raise GeneratorExit


def stop_iteration() -> None:
    raise StopIteration


def cancelled() -> None:
    raise asyncio.CancelledError


def cancelled_in_a_group() -> None:
    raise BaseExceptionGroup("several", [asyncio.CancelledError(), GeneratorExit()])


def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


SIX_KINDS = (sleep, loop, regular_expression, swallow_exceptions, lock, read)
STUBBORN_KINDS = (
    *(deaf, holds_the_interpreter, recurse, wait_in_finally, other_handlers, other_wakeup),
    *(thread, busy_threads, pool, at_exit, at_exit_deaf, delete_at_the_end, delete_badly),
    *(child, child_and_grandchild, fork, processes),
)
ASYNC_KINDS = (
    *(swallow_cancellation, swallow_everything_busily, shielded, shielded_task, unawaited_task),
    *(group_of_tasks, finally_awaits, finally_blocks, uncancelled, generator, in_a_thread),
    *(in_a_thread_of_anyio, in_a_worker, awaited_program, loop_stopped),
)
KINDS: Mapping[str, Callable[[], Awaitable[None] | None]] = {
    kind.__name__: kind
    for kind in (
        *STUBBORN_KINDS,
        *ASYNC_KINDS,
        *SIX_KINDS,
        empty_queue,
        program,
        swallow_everything,
        fail,
        leave,
        interrupt,
        give_up,
        stop_iteration,
        cancelled,
        cancelled_in_a_group,
        cancel_itself,
    )
}


async def waited(what: Awaitable[None] | None) -> None:
    if what is not None:
        await what


class Graded(ProblemEnv):
    """Pays for odd characters; blocks in a function that `grade` calls."""

    def __init__(self, problem: "Problem", blocks: bool) -> None:
        super().__init__(Observation((problem.number + 1, 7)))
        self.problem = problem
        self.blocks = blocks

    async def initial_observation(self) -> Observation:
        await waited(self.block_in("initial_observation"))
        return self.observation

    def grade(self, text: str) -> Grade:
        self.block_in("sync")
        return Grade(sum(ord(character) % 2 for character in text) / max(len(text), 1))

    def block_in(self, where: str) -> Awaitable[None] | None:
        blocks = self.blocks and self.problem.where == where
        return KINDS[self.problem.kind]() if blocks else None


class Awaiting(Graded):
    """Blocks after awaiting something, in a coroutine that it awaits."""

    async def step(self, action: Action) -> StepResult:
        await anyio.sleep(0)
        await self.check("async")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.check, "task")
        await anyio.sleep(0)
        return await super().step(action)

    async def check(self, where: str) -> None:
        await anyio.sleep(0)
        await waited(self.block_in(where))


class Group(EnvGroup):
    """Blocks when it is closed."""

    def __init__(self, problem: "Problem", envs: Sequence[Env]) -> None:
        super().__init__(envs)
        self.problem = problem

    async def close(self) -> None:
        await waited(self.problem.block_in("close"))


@dataclasses.dataclass(frozen=True)
class Problem(EnvGroupBuilder):
    """Blocks in one of its rollouts, or itself."""

    number: int
    where: str
    kind: str

    async def make_envs(self, num_envs: int) -> EnvGroup:
        await waited(self.block_in("make_envs"))
        return Group(self, [Awaiting(self, i == 1) for i in range(num_envs)])

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward] | None:
        await waited(self.block_in("group_rewards"))
        return None

    def block_in(self, where: str) -> Awaitable[None] | None:
        return KINDS[self.kind]() if self.where == where else None


class Dataset(RLDataset):
    """Three problems a generation; the first of generation 1 is the one that blocks."""

    def __init__(self, where: str, kind: str) -> None:
        self.where, self.kind = where, kind

    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        if self.where == "get_batch" and generation == 1:
            KINDS[self.kind]()
        return [
            Problem(3 * generation + i, self.where if (generation, i) == (1, 0) else "", self.kind)
            for i in range(3)
        ]

    def __len__(self) -> int:
        return 9

    async def validate(self, context_length: int) -> None:
        pass


@chz.chz
class DatasetBuilder(RLDatasetBuilder):
    """Builds a `Dataset`."""

    where: str = chz.field(doc="the method that blocks")
    kind: str = chz.field(doc="how it blocks")

    async def __call__(self, tokenizer: "PreTrainedTokenizerBase") -> Datasets:
        return Datasets(Dataset(self.where, self.kind))


@chz.chz
class BlockingConfig(TinyConfig):
    """A tiny run in which one rollout blocks."""

    dataset: RLDatasetBuilder = chz.field(
        default=DatasetBuilder(where="sync", kind="sleep"),
        blueprint_unspecified=DatasetBuilder,
        doc="problems",
    )
    optimizer: OptimizerBuilder = chz.field(
        default=ES(population_size=4, sigma=0.1, learning_rate=0.05), doc="how it moves"
    )
    sampling: SamplingParams = chz.field(default=SamplingParams(max_tokens=4), doc="greedy")
    num_generations: int = chz.field(default=3, doc="length")
    eval_every: int = chz.field(default=0, doc="no evaluations")
    max_failed_fraction: float = chz.field(default=0.5, doc="a whole group may be lost")


def start(options: Sequence[str], errors: str) -> int:
    """Fork a run that writes to `errors`; gives its process id."""
    pid = os.fork()
    if not pid:
        os.environ["ERRORS"] = errors  # By which the programs that it starts are known.
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        run_cli(run, BlockingConfig, options)
        sys.exit()
    return pid


def serve() -> None:
    """Fork the runs of a line of standard input, for every line."""
    for line in sys.stdin:
        pids = [start(*each) for each in json.loads(line)]
        print(*pids, flush=True)
        for pid in pids:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
