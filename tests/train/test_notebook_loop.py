"""`train.run` where an event loop is running already, as in a notebook."""

import os
import signal
import threading
from pathlib import Path

import anyio
import chz
import pytest

from es_cookbook import train
from es_cookbook.rl.types import Datasets, RLDatasetBuilder, Tokenizer
from es_cookbook.runs.history.store import read_history
from tests.fakes import SmallDatasetBuilder
from tests.tiny_run import TinyConfig, tiny

pytestmark = pytest.mark.anyio


@chz.chz
class InterruptingBuilder(RLDatasetBuilder):
    """Problems during whose making the user interrupts the kernel."""

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep(20)  # The signal is handled in another thread, when that has its turn.
        return await SmallDatasetBuilder()(tokenizer)


def short(log_path: Path, dataset: RLDatasetBuilder) -> TinyConfig:
    return tiny(log_path, dataset=dataset, num_generations=2)


async def test_a_run_goes_beside_the_loop_that_runs_already(tmp_path: Path) -> None:
    train.run(short(tmp_path / "run", SmallDatasetBuilder()))
    await train.main(short(tmp_path / "awaited", SmallDatasetBuilder()))
    written = [(tmp_path / name / "history.jsonl").read_bytes() for name in ("run", "awaited")]
    assert written[0] == written[1]


async def test_an_interrupt_ends_it_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="interrupted before the first generation ended"):
        train.run(short(tmp_path, InterruptingBuilder()))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "lock").exists()
    train.run(short(tmp_path, SmallDatasetBuilder()))
    assert len(list(read_history(tmp_path / "history.jsonl"))) == 2
