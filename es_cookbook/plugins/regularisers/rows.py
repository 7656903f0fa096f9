"""Rows of regularisers: checked before a model is loaded, and dealt out in epochs."""

from collections.abc import Sequence

from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.problem_dataset import in_epochs
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.rl.regularisers import AddedProblems
from es_cookbook.rl.types import EnvGroupBuilder


def check_texts(source: str, option: str, *names: str) -> None:
    """Refuse, before a model is loaded, a source without rows, or with one that lacks a text."""
    rows = list(load_rows(source, option=option))
    if not rows:
        raise DataError(f"{option}={source}: there are no rows")
    for row in rows:
        for name in names:
            row.text(name)


def dealt(problems: Sequence[EnvGroupBuilder], count: int, seed: int) -> AddedProblems:
    """Return `count` of the problems in each generation, in an order that a seed decides."""
    return lambda generation, _: [
        problems[i] for i in in_epochs(len(problems), seed, generation * count, count)
    ]
