"""A run as a program: what it says, what it leaves, and where a loop is running already."""

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import anyio
import chz
import pytest

from es_cookbook.cli.resume import Resume
from es_cookbook.cli.resume import main as resume
from es_cookbook.rl.types import Datasets, RLDatasetBuilder, Tokenizer
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import run as run_config
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import Result, read_metrics
from tests.fakes import SmallDatasetBuilder
from tests.tiny_run import TinyConfig, tiny


def short(log_path: Path, **fields: Any) -> TinyConfig:
    return tiny(log_path, **{"num_generations": 2} | fields)


def test_a_run_returns_what_it_brought(tmp_path: Path) -> None:
    result = run_config(short(tmp_path))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert isinstance(result, Result) and result.path == tmp_path
    correct = "test/env/all/correct"
    assert (result.first[correct], result.last[correct]) == (rows[0][correct], rows[2][correct])
    assert result.last["reward/mean"] == rows[1]["reward/mean"]


def test_a_resumed_run_says_in_the_end_what_it_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_config(short(tmp_path))
    capsys.readouterr()
    resume(Resume(log_path=str(tmp_path), trust=("tests",)), {"num_generations": "3"})
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"test/env/all/correct \S+ -> \S+ \(\S+ points\) in \S+ (s|min) \(1 generation: \d+ s\); "
        rf"everything is in {tmp_path}",
        last,
    )


# In a notebook.


@chz.chz
class InterruptingBuilder(RLDatasetBuilder):
    """Problems during whose making the user interrupts the kernel."""

    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep(20)  # The signal is handled in another thread, when that has its turn.
        return await SmallDatasetBuilder()(tokenizer)


async def test_a_run_goes_beside_the_loop_that_runs_already(tmp_path: Path) -> None:
    run_config(short(tmp_path / "run"))
    await train(short(tmp_path / "awaited"))
    written = [(tmp_path / name / "history.jsonl").read_bytes() for name in ("run", "awaited")]
    assert written[0] == written[1]


async def test_an_interrupt_ends_it_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="interrupted before the run began; nothing"):
        run_config(short(tmp_path, dataset=InterruptingBuilder()))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "lock").exists()
    run_config(short(tmp_path))
    assert len(list(read_history(tmp_path / "history.jsonl"))) == 2
