"""Train a model by comparing its answers: a judge prefers, and the reward is the share of wins.

    python -m es_cookbook.recipes.pairwise.train_cli
    python -m es_cookbook.recipes.pairwise.train_cli dataset.tournament.pattern=ring
    python -m es_cookbook.recipes.pairwise.train_cli --help

Without options it trains the bundled character-level model on bundled additions; no network, no
GPU. The judge is the frozen base model itself, which judges better than it answers. Correctness
earns nothing: it is only measured, on held-out problems. Another judge, and other questions:

    ... dataset.judge=server dataset.judge.model=my-judge dataset.source=questions.jsonl
"""

from pathlib import Path

import chz

from es_cookbook.common.names import built_field
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, OptimizerNames
from es_cookbook.plugins.judges.judges import BaseJudge
from es_cookbook.plugins.judges.task import JudgedTask
from es_cookbook.recipes.pairwise.additions import JUDGED, measured
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import HALF_KNOWN, RecipeConfig, program

ADDITIONS = Path(__file__).parent / "additions.jsonl"


@chz.chz
class CLIConfig(RecipeConfig):
    """Train a model on the win rates of its answers with evolution strategies."""

    model_name: str = str(Path(__file__).parent / "model")
    dataset: RLDatasetBuilder = built_field(
        JudgedTask,
        source=str(ADDITIONS),
        prompt="{question}",
        split_by="question",
        reward=measured,
        full_reward=1.0,
        judge=BaseJudge(template=JUDGED),
    )
    optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
    sampling: SamplingParams = built_field(SamplingParams, max_tokens=8)
    num_generations: int = 12
    eval_every: int = 4


main, cli = program("pairwise", CLIConfig)

if __name__ == "__main__":
    cli()
