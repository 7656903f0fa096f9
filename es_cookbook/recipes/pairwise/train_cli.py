"""Train a model by comparing its answers: a judge prefers, and the reward is the share of wins.

    python -m es_cookbook.recipes.pairwise.train_cli
    python -m es_cookbook.recipes.pairwise.train_cli dataset.tournament.pattern=ring
    python -m es_cookbook.recipes.pairwise.train_cli --help

Without options it trains the bundled character-level model on bundled additions; no network, no
GPU. The judge is the frozen base model itself, which judges better than it answers. What is right
is never paid for: it is measured beside, on held-out problems. A judge of one's own, and questions:

    ... dataset.judge=server dataset.judge.model=my-judge dataset.source=questions.jsonl
"""

import functools
from pathlib import Path

import chz

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.pairwise.additions import JUDGED, measured
from es_cookbook.recipes.settings import (
    HALF_KNOWN,
    dataset_field,
    eval_every_field,
    log_path_field,
    model_field,
    num_generations_field,
    optimizer_field,
    sampling_field,
)
from es_cookbook.rl.judging.judges import BaseJudge
from es_cookbook.rl.judging.task import JudgedTask
from es_cookbook.rl.types import SamplingParams

ADDITIONS = Path(__file__).parent / "additions.jsonl"
BUNDLED_MODEL = Path(__file__).parent / "model"

_TASK = functools.partial(
    JudgedTask,
    source=str(ADDITIONS),
    prompt="{question}",
    split_by="question",
    reward=measured,
    full_reward=1.0,
    judge=BaseJudge(template=JUDGED),
)


@chz.chz
class CLIConfig(train.Config):
    """Train a model on the win rates of its answers with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: JudgedTask = dataset_field(_TASK, "questions")
    optimizer: OptimizerBuilder = optimizer_field({"es": HALF_KNOWN})
    sampling: SamplingParams = sampling_field(max_tokens=8)
    num_generations: int = num_generations_field(12)
    eval_every: int = eval_every_field(4)
    log_path: str = log_path_field("pairwise")


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "pairwise", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
