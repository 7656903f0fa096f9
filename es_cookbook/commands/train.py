"""Train on a task that is a prompt and a score: rows, a template and a function.

    python -m es_cookbook train model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl
        prompt="{question}" reward=my_rewards:score

`my_rewards.py` in this directory has

    def score(text, row):
        return float(text.strip() == row["answer"])

`data`, `test_data`, `prompt`, `reward` and `batch` are short for options of `dataset`, and
`reward.tolerance` for one of its reward.
"""

import sys
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.rl.data.task import Task

SHORT = {
    "data": "dataset.source",
    "test_data": "dataset.test_source",
    "prompt": "dataset.prompt",
    "reward": "dataset.reward",
    "batch": "dataset.batch",
}
"""What may be typed -> the option that it is."""


@chz.chz
class TrainConfig(train.Config):
    """Train on rows of data, asked by a template and scored by a function."""

    dataset: Task = chz.field(blueprint_unspecified=Task, doc="problems, and held-out ones")
    log_path: str = chz.field(
        default="", doc="run directory; runs/<name of the data>-<digest of the options> if empty"
    )


def main(config: TrainConfig) -> None:
    """Train, and say in one line what it brought."""
    train.train_and_tell(config, Path(config.dataset.source).stem, BEGAN)


def cli() -> None:
    """The console entry point."""
    short = ", ".join(f"{name} ({option})" for name, option in SHORT.items())
    run_cli(main, TrainConfig, list(map(whole_name, sys.argv[1:])), f"\n\nShort: {short}.")


def whole_name(argument: str) -> str:
    """An option with its whole name in place of a short one.

    >>> whole_name("reward.tolerance=0.01"), whole_name("seed=1")
    ('dataset.reward.tolerance=0.01', 'seed=1')
    """
    name, equals, value = argument.lstrip("-").partition("=")
    first, dot, rest = name.partition(".")
    return f"{SHORT[first]}{dot}{rest}={value}" if equals and first in SHORT else argument
