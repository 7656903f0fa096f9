"""Train a model to answer in as few characters as the shortest good answer has.

    python -m es_cookbook.recipes.conciseness.train_cli
    python -m es_cookbook.recipes.conciseness.train_cli --help

Without options it trains the bundled character-level model, which knows the answers and mostly
talks around them; no network, no GPU. Any other model and data go the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=qa.jsonl sampling.max_tokens=64

The task is a `Task`: rows, a template and a shared reward. KL to the base is reported, and with
`kl.weight` above 0 penalised.
"""

import functools
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
from es_cookbook.recipes.settings import (
    built_field,
    dataset_field,
    eval_every_field,
    log_path_field,
    model_field,
    num_generations_field,
    optimizer_field,
    sampling_field,
)
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.regularisers.kl_to_base import KLToBase
from es_cookbook.rl.rewards.length import Conciseness
from es_cookbook.rl.types import SamplingParams

QUESTIONS = Path(__file__).parent / "questions.jsonl"
BUNDLED_MODEL = Path(__file__).parent / "model"
PROMPT = "{question}\n"

_ES = {
    **RECOMMENDED["es"],
    "population_size": 128,
    "antithetic": False,
    "learning_rate": 0.06,
}
_TASK = functools.partial(
    Task,
    source=str(QUESTIONS),
    fold=2,  # The settings were chosen on folds 0 and 1.
    prompt=PROMPT,
    split_by=PROMPT,
    reward=Conciseness(),
    full_reward=0.0,
    batch=16,
)
_KL = functools.partial(KLToBase, weight=0.0, problems_per_generation=4)


@chz.chz
class CLIConfig(train.Config):
    """Train a model to answer briefly with evolution strategies."""

    model_name: str = model_field(BUNDLED_MODEL)
    dataset: Task = dataset_field(_TASK, "questions")
    optimizer: OptimizerBuilder = optimizer_field({"es": _ES})
    kl: KLToBase | None = built_field(
        _KL, "KL to the base: reported, and with kl.weight above 0 penalised"
    )
    # Drawn, not greedy: what it does seldom shows up, and a small change of its chance counts.
    sampling: SamplingParams = sampling_field(max_tokens=32, temperature=1.0)
    num_generations: int = num_generations_field(20)
    eval_every: int = eval_every_field(5)
    log_path: str = log_path_field("conciseness")

    @property
    @override
    def main_metric(self) -> str:
        return "test/env/all/concise"


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "conciseness", began)


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
