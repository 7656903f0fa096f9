"""What a run is called where it is shown: its task, what trained it, its main measure.

Also which fields of its Config say what was trained.
"""

import math
import re
from collections.abc import Mapping, Sequence

from es_cookbook.common.terminal import one_line
from es_cookbook.runs.tracking.jsonl import MEASURES
from es_cookbook.runs.tracking.reading import RunFiles

_RECIPE = re.compile(r"es_cookbook\.recipes\.([a-z0-9_]+)\.[\w.]+:\w+")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:([A-Za-z_][\w.]*)")
_TASKS = ("dataset.taskset", "dataset.game", "dataset.source")
"""Fields of data sets that are no recipe's, and name what they hold."""
_KEPT_OR_SHOWN = ("log_path", "behavior_if_log_dir_exists", "trackers", "profile")
_MEASURES: dict[str, str] = dict(
    zip(MEASURES, ("correct", "reward", "training reward"), strict=True)
)
"""Metrics by which runs are told apart, the first that was measured -> what it is called."""


def is_of_training(path: str) -> bool:
    """Whether a field, by its dotted path, says what was trained; not where it is kept or shown.

    >>> is_of_training("optimizer.sigma"), is_of_training("trackers.jsonl")
    (True, False)
    """
    return path.partition(".")[0] not in _KEPT_OR_SHOWN


def recipe_of(config: Mapping[str, object]) -> str | None:
    """The recipe whose problems a run trains on; None if they are no recipe's.

    `config` is by dotted path, as `RunFiles.config`.

    >>> recipe_of({"dataset": "es_cookbook.recipes.countdown.dataset:CountdownDatasetBuilder"})
    'countdown'
    """
    for part in ("", "dataset"):
        if found := _RECIPE.fullmatch(str(config.get(part))):
            return found[1]
    return None


def task_of(config: Mapping[str, object]) -> str:
    """What a run trains on, for a title; "unknown task" where its Config does not say.

    >>> task_of({"dataset": "es_cookbook.rl.data.task:Task", "dataset.source": "data/rows.jsonl"})
    'rows.jsonl'
    """
    if recipe := recipe_of(config):
        return recipe.replace("_", " ").capitalize()
    for field in _TASKS:
        if isinstance(source := config.get(field), str) and source:
            return one_line(source.rstrip("/").rpartition("/")[2])
    return class_name(config.get("dataset")) or "unknown task"


def class_name(text: object) -> str:
    """A class that a Config names, without its module; "" if it is none.

    >>> class_name("es_cookbook.evolution.optimizers.es:ES")
    'ES'
    """
    return found[1] if isinstance(text, str) and (found := _CLASS.fullmatch(text)) else ""


def method_of(run: RunFiles) -> str:
    """What trains it: the optimizer of evolution strategies, or which gradients."""
    config = run.config
    if not run.is_gradient:
        return class_name(config.get("optimizer")) or "ES"
    if method := class_name(config.get("method")):
        return f"policy gradient ({method})"
    return "GRPO" if ".grpo" in str(config.get("")) else "gradients"


def main_measure(rows: Sequence[Mapping[str, float]]) -> str | None:
    """The metric that says most of how good a run is; None if none was measured."""
    measured = {key for row in rows for key, value in row.items() if math.isfinite(value)}
    return next((key for key in _MEASURES if key in measured), None)


def best_score(run: RunFiles) -> tuple[float, str] | None:
    """The highest value of its main measure, and what that is called."""
    key = main_measure(run.metrics)
    if key is None:
        return None
    values = [row[key] for row in run.metrics if math.isfinite(row.get(key, math.nan))]
    return max(values), _MEASURES[key]
