"""A tiny run in which an Env of generation 1 never ends, as a program.

    python -m tests.blocking dataset.kind=sleep log_path=...

It makes the file that `BLOCKED` names when it begins to block, if that variable is set.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import chz
from typing_extensions import override

from es_cookbook import EnvGroupBuilder, Observation, RLDatasetBuilder, StepResult, run
from es_cookbook.common.cli import run_cli
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Datasets
from tests.fakes import Pieces, SmallDataset
from tests.tiny_run import TinyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOR_EVER = 10_000


def sleep() -> None:
    time.sleep(FOR_EVER)


def native() -> None:
    """Compute in C for hours without the interpreter lock."""
    hashlib.pbkdf2_hmac("sha512", b"", b"", 2**31 - 1)


def loop() -> None:
    while True:
        pass


async def async_sleep() -> None:
    await anyio.sleep(FOR_EVER)


async def swallow_cancellation() -> None:
    while True:
        with contextlib.suppress(BaseException):
            await anyio.sleep(FOR_EVER)


def child() -> None:
    """Wait for a process that ignores signals."""
    ignores = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    subprocess.run([sys.executable, "-S", "-c", f"{ignores}time.sleep({FOR_EVER})"], check=True)


KINDS: Mapping[str, Callable[[], Awaitable[None] | None]] = {
    kind.__name__: kind for kind in (sleep, native, loop, async_sleep, swallow_cancellation, child)
}


class Blocking(Pieces):
    """Never ends its first step."""

    def __init__(self, observation: Observation, kind: str) -> None:
        super().__init__(observation)
        self.kind = kind

    @override
    async def step(self, action: Action) -> StepResult:
        if marker := os.environ.get("BLOCKED"):
            Path(marker).touch()
        if (waiting := KINDS[self.kind]()) is not None:
            await waiting
        return await super().step(action)


class BlockingDataset(SmallDataset):
    """The first problem of generation 1 blocks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @override
    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        first, *others = super().get_batch(generation)
        if generation == 1:
            first = ProblemGroupBuilder(
                functools.partial(Blocking, Observation((1, 7)), self.kind), "blocks", gold="ace"
            )
        return [first, *others]


@chz.chz
class BlockingDatasetBuilder(RLDatasetBuilder):
    """Builds a `BlockingDataset`."""

    kind: str = chz.field(doc="how it blocks")

    async def __call__(self, tokenizer: "PreTrainedTokenizerBase") -> Datasets:
        return Datasets(BlockingDataset(self.kind))


@chz.chz
class BlockingConfig(TinyConfig):
    """A tiny run in which one problem blocks."""

    dataset: RLDatasetBuilder = chz.field(
        default=BlockingDatasetBuilder(kind="sleep"),
        blueprint_unspecified=BlockingDatasetBuilder,
        doc="problems",
    )
    num_generations: int = chz.field(default=3, doc="length")
    eval_every: int = chz.field(default=0, doc="no evaluations")
    max_failed_fraction: float = chz.field(default=0.5, doc="a whole group may be lost")


if __name__ == "__main__":
    run_cli(run, BlockingConfig)
