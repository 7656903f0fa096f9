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

from es_cookbook import train
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import Names
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
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
_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es", settings={**RECOMMENDED, "es": _ES})
# Drawn, not greedy: what the model does seldom shows up, and a small change of its chance counts.
_SAMPLING = functools.partial(SamplingParams, max_tokens=32, temperature=1.0)
_TASK = functools.partial(
    Task, source=str(QUESTIONS), prompt=PROMPT, reward=Conciseness(), full_reward=0.0, batch=16
)
_KL = functools.partial(KLToBase, weight=0.0, problems_per_generation=4)


@chz.chz
class CLIConfig(train.Config):
    """Train a model to answer briefly with evolution strategies."""

    model_name: str = chz.field(
        default=str(BUNDLED_MODEL), doc="Hugging Face model directory or Hub name"
    )
    dataset: Task = chz.field(
        default_factory=_TASK,
        blueprint_unspecified=_TASK,
        doc="questions to train on, and held-out ones",
    )
    optimizer: OptimizerBuilder = chz.field(
        meta_factory=_OPTIMIZERS,
        default_factory=_OPTIMIZERS.build_default,
        doc="how the population is made and the centre moves",
    )
    kl: KLToBase | None = chz.field(
        default_factory=_KL,
        blueprint_unspecified=_KL,
        doc="KL to the base: reported, and with kl.weight above 0 penalised",
    )
    sampling: SamplingParams = chz.field(
        default_factory=_SAMPLING, blueprint_unspecified=_SAMPLING, doc="how tokens are drawn"
    )
    num_generations: int = chz.field(default=20, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=5,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    log_path: str = chz.field(
        default="", doc="run directory; runs/conciseness-<digest of the options> if empty"
    )


def main(config: CLIConfig, began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took since `began`."""
    train.train_and_tell(config, "conciseness", began, key="test/env/all/concise")


def cli() -> None:
    """The console entry point."""
    run_cli(functools.partial(main, began=BEGAN), CLIConfig)


if __name__ == "__main__":
    cli()
