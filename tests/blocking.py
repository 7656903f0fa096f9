"""Envs that never give the event loop back, and runs in which one rollout does that.

    python -m tests.blocking

imports everything and then forks a run for every line of JSON that it reads: the run's options, and
the file for what it writes to stderr. It prints the run's process id, and its exit code.
"""

import asyncio
import ctypes
import dataclasses
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import chz
import transformers  # noqa: F401 - before the forks, so that no child has to

from es_cookbook.checkpoints import models  # noqa: F401 - for the same reason
from es_cookbook.common.cli import run_cli
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
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
from es_cookbook.train.loop import run
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
KINDS: Mapping[str, Callable[[], None]] = {
    kind.__name__: kind
    for kind in (
        *SIX_KINDS,
        empty_queue,
        program,
        swallow_everything,
        deaf,
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


class Graded(ProblemEnv):
    """Pays for odd characters; blocks in a function that `grade` calls."""

    def __init__(self, problem: "Problem", blocks: bool) -> None:
        super().__init__(Observation((problem.number + 1, 7)))
        self.problem = problem
        self.blocks = blocks

    async def initial_observation(self) -> Observation:
        self.block_in("initial_observation")
        return self.observation

    def grade(self, text: str) -> Grade:
        self.block_in("sync")
        return Grade(sum(ord(character) % 2 for character in text) / max(len(text), 1))

    def block_in(self, where: str) -> None:
        if self.blocks and self.problem.where == where:
            KINDS[self.problem.kind]()


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
        self.block_in(where)


class Group(EnvGroup):
    """Blocks when it is closed."""

    def __init__(self, problem: "Problem", envs: Sequence[Env]) -> None:
        super().__init__(envs)
        self.problem = problem

    async def close(self) -> None:
        self.problem.block_in("close")


@dataclasses.dataclass(frozen=True)
class Problem(EnvGroupBuilder):
    """Blocks in one of its rollouts, or itself."""

    number: int
    where: str
    kind: str

    async def make_envs(self, num_envs: int) -> EnvGroup:
        self.block_in("make_envs")
        return Group(self, [Awaiting(self, i == 1) for i in range(num_envs)])

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward] | None:
        self.block_in("group_rewards")
        return None

    def block_in(self, where: str) -> None:
        if self.where == where:
            KINDS[self.kind]()


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


def serve() -> None:
    """Fork a run for every line of standard input."""
    for line in sys.stdin:
        options, errors = json.loads(line)
        pid = os.fork()
        if not pid:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            run_cli(run, BlockingConfig, options)
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
