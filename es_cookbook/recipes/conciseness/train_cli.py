"""Train a model to answer in as few characters as the shortest good answer has.

    python -m es_cookbook.recipes.conciseness.train_cli
    python -m es_cookbook.recipes.conciseness.train_cli --help

Without options it trains the bundled character-level model, which knows the answers and mostly
talks around them; no network, no GPU. Any other model and data go the same way:

    ... model_name=Qwen/Qwen2.5-0.5B-Instruct dataset.source=qa.jsonl sampling.max_tokens=64

The task is a `Task`: rows, a template and a shared reward. KL to the base is reported, and with
`kl.weight` above 0 penalised.
"""

from pathlib import Path
from typing import ClassVar

import chz

from es_cookbook import RLDatasetBuilder, SamplingParams, Task
from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.recipes.conciseness.reward import Conciseness
from es_cookbook.recipes.countdown.train_cli import RECOMMENDED
from es_cookbook.runs.program import RecipeConfig, program

QUESTIONS = Path(__file__).parent / "questions.jsonl"
PROMPT = "{question}\n"
ES = {**RECOMMENDED["es"], "population_size": 128, "antithetic": False, "learning_rate": 0.06}


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model to answer briefly with evolution strategies."""

    main_metric: ClassVar[str] = "test/env/all/concise"

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(
        Task,
        source=str(QUESTIONS),
        fold=2,  # The settings were chosen on folds 0 and 1.
        prompt=PROMPT,
        split_by=PROMPT,
        reward=Conciseness(),
        full_reward=0.0,
        problems_per_generation=16,
    )
    optimizer: OptimizerBuilder = OptimizerNames({"es": ES}).field()
    kl: KLToBase | None = built_field(
        KLToBase,
        "KL to the base: reported, and with kl.weight above 0 penalised",
        weight=0.0,
        problems_per_generation=4,
    )
    # What it does seldom shows up at temperature 1, and a small change of its chance counts.
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=32, temperature=1.0)
    num_generations: int = 20
    eval_every: int = 5


main, cli = program("conciseness", CLIConfig)

if __name__ == "__main__":
    cli()
