"""A run is never silent for long, and says in the end what it brought."""

import re
from pathlib import Path
from typing import Any

import anyio
import chz
import pytest

from es_cookbook import train
from es_cookbook.commands.resume import Resume
from es_cookbook.commands.resume import main as resume
from es_cookbook.engines.base import Engine
from es_cookbook.recipes.alignment.train_cli import CLIConfig as Alignment
from es_cookbook.recipes.conciseness.train_cli import CLIConfig as Conciseness
from es_cookbook.recipes.tic_tac_toe.train_cli import CLIConfig as TicTacToe
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.fakes import FakeEngineBuilder
from tests.tiny_run import BASE, tiny


@chz.chz
class SlowBuilder(FakeEngineBuilder):
    """An engine that takes long to start."""

    async def __call__(self, **how: Any) -> Engine:
        await anyio.sleep(2.5)
        return await super().__call__(**how)


def test_a_start_that_takes_long_says_so_while_it_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(tiny(tmp_path, engine=SlowBuilder(), num_generations=1))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{tmp_path}: loading {BASE} on SlowBuilder"
    assert said[1] == "  … 2 s"


def test_a_run_returns_what_it_brought(tmp_path: Path) -> None:
    result = train.run(tiny(tmp_path, num_generations=2))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert isinstance(result, train.Result) and result.path == tmp_path
    correct = "test/env/all/correct"
    assert (result.first[correct], result.last[correct]) == (rows[0][correct], rows[2][correct])
    assert result.last["reward/mean"] == rows[1]["reward/mean"]


def test_a_resumed_run_says_in_the_end_what_it_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(tiny(tmp_path, num_generations=2))
    capsys.readouterr()
    resume(Resume(log_path=str(tmp_path), trust=("tests",)), {"num_generations": "3"})
    *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"test/env/all/correct \S+ -> \S+ \(\S+ points\) in \S+ (s|min) \(generation 3: \d+ s\); "
        rf"everything is in {tmp_path}",
        last,
    )


def test_recipes_tell_of_their_own_measure() -> None:
    assert TicTacToe().main_metric == "test/env/all/loses_to_random"
    assert Conciseness().main_metric == "test/env/all/concise"
    assert Alignment().main_metric == "test/env/all/correct"
