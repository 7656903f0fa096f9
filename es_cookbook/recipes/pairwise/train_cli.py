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

from es_cookbook.recipes.pairwise.additions import JUDGED, measured
from es_cookbook.recipes.recipe import HALF_KNOWN, Recipe, RecipeConfig, program
from es_cookbook.rl.judging.judges import BaseJudge
from es_cookbook.rl.judging.task import JudgedTask

ADDITIONS = Path(__file__).parent / "additions.jsonl"

RECIPE = Recipe(
    "pairwise",
    functools.partial(
        JudgedTask,
        source=str(ADDITIONS),
        prompt="{question}",
        split_by="question",
        reward=measured,
        full_reward=1.0,
        judge=BaseJudge(template=JUDGED),
    ),
    es=HALF_KNOWN,
    max_tokens=8,
    num_generations=12,
    eval_every=4,
    problems="questions",
)


@chz.chz
class CLIConfig(RecipeConfig, recipe=RECIPE):
    """Train a model on the win rates of its answers with evolution strategies."""


main, cli = program(CLIConfig)

if __name__ == "__main__":
    cli()
