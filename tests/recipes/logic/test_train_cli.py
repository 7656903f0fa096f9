"""The command line of the recipe, a run of two generations, and its bundled model."""

import re
from pathlib import Path

import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.logic import errors, warm_start
from es_cookbook.recipes.logic.train_cli import RECIPE, CLIConfig, main

pytest.importorskip("reasoning_gym")


def parsed(*options: str) -> CLIConfig:
    seen: list[CLIConfig] = []
    run_cli(seen.append, CLIConfig, options)
    return seen[0]


def test_an_unknown_task_is_refused_with_the_nearest(tmp_path: Path) -> None:
    config = parsed("dataset.task=letter_count", f"log_path={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="no task 'letter_count': did you mean 'letter_counting'"):
        main(config)


def test_held_out_problems_of_two_folds_differ() -> None:
    folds = [warm_start.held_out(fold, 20) for fold in (0, 1)]
    assert len({problem.question for problems_P in folds for problem in problems_P}) == 40


def test_errors_are_sorted_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    errors.main(errors.Config(after=str(RECIPE.model), num_test=40))
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.endswith("of which after: right, without the last term, wrong otherwise")
    right, careless, otherwise = (list(map(int, re.findall(r"\d+", row))) for row in rows)
    assert right[0] == right[1] > 4  # the same model: every answer is of the same kind
    assert careless[0] == careless[2] > 10
    assert otherwise[0] == otherwise[3] == 40 - right[0] - careless[0]
    assert last.startswith("0 answers became right; 0 of them were among 8 answers of before")
