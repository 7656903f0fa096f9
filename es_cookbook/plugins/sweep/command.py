"""Train a recipe under many settings: a grid, random trials or Optuna's, several runs at a time.

    python -m es_cookbook sweep values.optimizer.sigma=0.005,0.01 seeds=0,1,2 workers=2
    ... range.optimizer.sigma=0.001:0.03:log sampler=random trials=10
    ... range.optimizer.learning_rate=0.005:0.05:log sampler=optuna trials=20
    ... recipe=train model_name=... data=rows.jsonl reward=exact values.optimizer.sigma=0.001,0.002

`values.NAME=a,b,c` lists the values of an option of the recipe; values that contain commas are
separated by semicolons (`'values.objective.weights=1,0.2;1,0.5'`). `range.NAME=LOW:HIGH` is any
number in between, an integer if both are, log-uniform with `:log`. Any other option of the recipe
applies to every run.

Runs are ordinary ones, in `<log_path>/<options>-seed<seed>`. The same command continues where it
was interrupted and skips complete runs. The results are printed, and written to `results.md` and
`results.parquet` there, with a report of all runs, `report.html`.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import chz

from es_cookbook.cli.train import built_for
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.sweep.loop import Make, SweepSettings, sweep
from es_cookbook.plugins.sweep.many_runs import check_not_set
from es_cookbook.plugins.sweep.search import Range, Space, Value, Values
from es_cookbook.runs.config import Config

_VALUES, _RANGE = "values", "range"


@chz.chz
class Sweep(SweepSettings):
    """Train a recipe under every combination of options, or under some of them."""

    recipe: str = chz.field(
        default="countdown", doc="recipe to train on; train: your own rows, as in that command"
    )
    log_path: str = chz.field(default="", doc="directory of all runs; empty: runs/sweep-<recipe>")

    @classmethod
    def whole_options(cls, given: Mapping[str, str]) -> dict[str, str]:
        """Return the options; with rows of the user's own, the metric is the reward."""
        is_own = given.get("recipe") == "train"
        return {**({"metric": "test/reward/mean"} if is_own else {}), **given}


def searched(fields: Mapping[str, str]) -> tuple[Space, dict[str, str]]:
    """Return the space of varied options, and the options of every run.

    Raises:
        ConfigError: A list or range is invalid, or an option is given twice.
    """
    space: dict[str, Values | Range] = {}
    of_all: dict[str, str] = {}
    for path, text in fields.items():
        first, _, name = path.partition(".")
        if first not in (_VALUES, _RANGE):
            of_all[path] = text
            continue
        if name in space or name in fields:
            raise ConfigError(f"{name} is given more than once: {path}={text} is enough")
        try:
            space[name] = _values(text) if first == _VALUES else _range(text)
        except ConfigError as error:
            raise ConfigError(f"{path}={text}: it {error}") from error
    return space, of_all


def _values(text: str) -> Values:
    texts = tuple(filter(None, text.split(";" if ";" in text else ",")))
    numbers = tuple(map(_as_number, texts))
    return Values(texts if None in numbers else tuple(n for n in numbers if n is not None))


def _as_number(text: str) -> int | float | None:
    """Return the number that a text stands for, unless it prints otherwise (1.10, 007)."""
    with contextlib.suppress(ConfigError):
        number = _number(text)
        if text in (str(number), f"{number:g}") or ("e" in text and text[0] in "123456789"):
            return number
    return None


def _range(text: str) -> Range:
    low, _, rest = text.partition(":")
    high, colon, log = rest.partition(":")
    if not rest or (colon and log != "log"):
        raise ConfigError("must be LOW:HIGH or LOW:HIGH:log")
    return Range(_number(low), _number(high), log == "log")


def _number(text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError as error:
        raise ConfigError(f"must be of numbers, found {text!r}") from error


def maker(config: Sweep, fields: Mapping[str, str]) -> tuple[Make, Space]:
    """Return the function that builds a trial's Config, and the space; only inside `run_cli`.

    Raises:
        ConfigError: An option does not exist, or the sweep sets it.
    """
    space, of_all = searched(fields)
    check_not_set((*space, *of_all), "sweep", {})

    def make(options: Mapping[str, Value]) -> Config:
        given = {**of_all, **{name: str(value) for name, value in options.items()}}
        return built_for(config.recipe, {"trackers.live": "None", **given})

    return make, space


def main(config: Sweep, fields: Mapping[str, str]) -> None:
    """Run the incomplete runs; print and write the table."""
    make, space = maker(config, fields)
    log_path = config.log_path or str(Path("runs") / f"sweep-{config.recipe}")
    sweep(chz.replace(config, log_path=log_path), make, space)


def cli() -> None:
    more_help = (
        "\n\nvalues.NAME=a,b and range.NAME=LOW:HIGH[:log] vary an option of the recipe "
        "(values.optimizer.sigma=0.005,0.01);\nany other option of the recipe "
        "(num_generations=30) applies to every run."
    )
    run_with_fields(main, Sweep, more_help)
