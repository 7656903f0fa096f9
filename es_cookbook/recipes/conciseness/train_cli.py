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

from es_cookbook.recipes.countdown import train_cli as countdown
from es_cookbook.recipes.recipe import Recipe, RecipeConfig, built_field, program
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.regularisers import KLToBase
from es_cookbook.rl.rewards.length import Conciseness

QUESTIONS = Path(__file__).parent / "questions.jsonl"
PROMPT = "{question}\n"

RECIPE = Recipe(
    "conciseness",
    functools.partial(
        Task,
        source=str(QUESTIONS),
        fold=2,  # The settings were chosen on folds 0 and 1.
        prompt=PROMPT,
        split_by=PROMPT,
        reward=Conciseness(),
        full_reward=0.0,
        problems_per_generation=16,
    ),
    es={
        **countdown.RECIPE.es,
        "population_size": 128,
        "antithetic": False,
        "learning_rate": 0.06,
    },
    max_tokens=32,
    num_generations=20,
    eval_every=5,
    problems="questions",
    temperature=1.0,  # What it does seldom shows up, and a small change of its chance counts.
    main_metric="test/env/all/concise",
)

_KL = functools.partial(KLToBase, weight=0.0, problems_per_generation=4)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model to answer briefly with evolution strategies."""

    kl: KLToBase | None = built_field(
        _KL, "KL to the base: reported, and with kl.weight above 0 penalised"
    )


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
