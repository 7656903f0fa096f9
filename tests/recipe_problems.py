"""What tests of recipes share: a Config as options make it, files of rows, and checked problems."""

import contextlib
import importlib
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import chz
import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import RLDatasetBuilder, Tokenizer
from es_cookbook.runs.tracking.jsonl import read_metrics

C = TypeVar("C")
Builders = list[ProblemGroupBuilder]


def parsed(config_class: type[C], *options: str) -> C:
    """Return the Config that a command line makes."""
    made: list[C] = []
    run_cli(made.append, config_class, options)
    return made[0]


def write_rows(path: Path, rows: Iterable[object]) -> str:
    """Write a file of JSON lines, and return its path as an option's value."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def build(
    dataset: RLDatasetBuilder, tokenizer: Tokenizer, context_length: int = 512
) -> tuple[ProblemDataset, Builders]:
    """Return the training problems, validated, and the held-out ones."""
    built = await dataset(tokenizer)
    assert isinstance(built.train, ProblemDataset)
    await built.train.validate(context_length)
    return built.train, cast(Builders, built.test_P)


async def check_second_row_is_named(
    dataset: Callable[..., RLDatasetBuilder],
    tokenizer: Tokenizer,
    path: Path,
    rows: Sequence[object],
    sentence: str,
) -> None:
    """Check that the second row of a file is refused with its line and this sentence."""
    source = write_rows(path, rows)
    with pytest.raises(DataError) as caught:
        await build(dataset(source=source, num_test=0, problems_per_generation=1), tokenizer)
    assert str(caught.value).startswith(f"{source}, line 2: ")
    assert sentence in str(caught.value)


SHORT = {
    **{"num_generations": 2, "optimizer.population_size": 4, "trackers": "JsonlTrackerBuilder"},
    **{"dataset.problems_per_generation": 2, "dataset.num_train": 6, "dataset.num_test": 4},
}
APART = ("optimizer.sigma=0.1", "optimizer.learning_rate=0.1")
"""With these the answers of genomes differ, and those after a step from those before."""


def short_run(recipe: str, log_path: Path, *options: str) -> list[dict[str, float]]:
    """Return the metrics of a run of two generations: before each, and after the last."""
    module = importlib.import_module(RECIPES[recipe].partition(":")[0])
    known = {f"dataset.{name}" for name in chz.chz_fields(module.CLIConfig().dataset)}
    given = {
        name: f"{name}={value}"
        for name, value in SHORT.items()
        if name in known or not name.startswith("dataset.")
    }
    given |= {option.partition("=")[0]: option for option in options}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_cli(module.main, module.CLIConfig, (*given.values(), f"log_path={log_path}"))
    rows = read_metrics(log_path / "metrics.jsonl")
    metric = module.CLIConfig.main_metric
    assert metric not in rows[-1] or out.getvalue().startswith(f"{metric} ")
    return rows
