"""Make the bundled model: small, character-level, with two ways to add up, one of them wrong.

    python -m es_cookbook.recipes.logic.warm_start output=/tmp/logic_model

Supervised learning of reasoning-gym's `chain_sum`, `3 + 5 - 9 =` and the answer. Half of the
demonstrations are careless: they leave out the last term, the more often the larger it is. So the
model answers with a whole number always, and its most likely answer to most problems is wrong. It
stops before it has learned either way well. The held-out problems are never demonstrated.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import chz
from transformers import Qwen2ForCausalLM

from es_cookbook.baselines.small_model import EOS, build_tokenizer, happens
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes import warm_start
from es_cookbook.recipes.logic.dataset import LogicDatasetBuilder, question
from es_cookbook.recipes.logic.generators import Problem, problems
from es_cookbook.recipes.logic.train_cli import RECIPE
from es_cookbook.recipes.warm_start import Batch, Phase, make, on_held_out

CHARACTERS = "0123456789+-=Ġ"  # Ġ is byte-level BPE's space
NUM_HELD_OUT = 500
"""Of folds 0 and 1 each, the first problems: they are not demonstrated."""


@chz.chz
class Config(warm_start.Config):
    """How the bundled model is made; the defaults made it."""

    steps: int = chz.field(default=600, doc="optimizer steps")
    num_problems: int = chz.field(default=20_000, doc="most problems demonstrated")
    batch_size: int = chz.field(default=128, doc="demonstrations a step")
    learning_rate: float = chz.field(default=5e-3, doc="largest; it falls linearly to nothing")
    start: str | None = chz.field(
        default=None, doc="directory of a model to go on with, of any size; None: a new one"
    )
    careless: bool = chz.field(
        default=True, doc="whether demonstrations leave out the last term; False: all are right"
    )

    @chz.validate
    def _start(self) -> None:
        if self.start is not None and not Path(self.start).is_dir():
            raise ConfigError(f"start must be the directory of a model, found {self.start!r}")


def held_out(fold: int, count: int) -> list[Problem]:
    """The held-out problems of a fold, as the recipe has them with so many."""
    return LogicDatasetBuilder(num_train=1, num_test=count, fold=fold).problems()[1]


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """The answer, or what comes out without the last term, which happens more if that is large."""
    last = int(problem.entry["metadata"]["expression"][-1])
    forgets = happens(4 * (last / 9 - 0.5), rng)
    return without_last_term(problem) if forgets else problem.gold


def without_last_term(problem: Problem) -> str:
    """The answer of somebody who forgets the last of the terms, one digit."""
    expression: str = problem.entry["metadata"]["expression"]
    last, sign = int(expression[-1]), {"+": 1, "-": -1}[expression[-3]]
    return str(int(problem.gold) - sign * last)


def main(config: Config) -> None:
    """Learn for so many steps, measure, write the model."""

    def shown(problem: Problem, rng: random.Random) -> str:
        return demonstrate(problem, rng) if config.careless else problem.gold

    def batches(rng: random.Random) -> Iterator[Batch]:
        (source,) = LogicDatasetBuilder().sources()
        never = {p.question for fold in (0, 1) for p in held_out(fold, NUM_HELD_OUT)}
        stream = problems(source, derive_seed(config.seed, "logic/warm_start"))
        allowed = (problem for problem in stream if problem.question not in never)
        pool = list(itertools.islice(allowed, config.num_problems))
        while True:
            batch = rng.sample(pool, config.batch_size)
            yield [(question(p, "compact"), shown(p, rng) + EOS) for p in batch]

    phase = Phase("logic/careless", batches, config.steps, config.learning_rate)
    model = Qwen2ForCausalLM.from_pretrained(config.start) if config.start else None
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(RECIPE), model)


def cli() -> None:
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
