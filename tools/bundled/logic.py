"""Make the bundled model: small, character-level, with two ways to add up, one of them wrong.

    python -m tools.bundled.logic output=/tmp/logic_model

Supervised learning of reasoning-gym's `chain_sum`, `3 + 5 - 9 =` and the answer. Half of the
demonstrations are careless: they leave out the last term, the more often the larger it is. So the
model answers with a whole number always, and its most likely answer to most problems is wrong. It
stops before it has learned either way well. The held-out problems are never demonstrated.
"""

import itertools
import random
from pathlib import Path

import chz
from transformers import Qwen2ForCausalLM

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.logic.dataset import (
    LogicDatasetBuilder,
    question,
)
from es_cookbook.recipes.logic.generators import Problem, problems
from es_cookbook.recipes.logic.train_cli import CLIConfig
from tools.small_model import EOS, build_tokenizer, happens
from tools.warm_start import Careless, Phase, make, on_held_out, sampled

CHARACTERS = "0123456789+-=Ġ"  # Ġ is byte-level BPE's space
STEPS, BATCH_SIZE, NUM_PROBLEMS = 600, 128, 20_000
NUM_HELD_OUT = 500
"""Number of first problems of fold 0, and of fold 1, that are not demonstrated."""


@chz.chz
class Config(Careless):
    """How the bundled model is made; the defaults made it."""

    learning_rate: float = chz.field(default=5e-3, doc="largest; it falls linearly to nothing")
    start: str | None = chz.field(
        default=None, doc="directory of a model to go on with, of any size; None: a new one"
    )

    @chz.validate
    def _start(self) -> None:
        if self.start is not None and not Path(self.start).is_dir():
            raise ConfigError(f"start must be the directory of a model, found {self.start!r}")


def held_out(fold: int, count: int) -> list[Problem]:
    """The held-out problems of a fold, the same as the recipe's with this count."""
    return LogicDatasetBuilder(num_train=1, num_test=count, fold=fold).problems()[1]


def without_last_term(problem: Problem) -> str:
    """The answer to a sum without its last term, one digit."""
    expression: str = problem.entry["metadata"]["expression"]
    last, sign = int(expression[-1]), {"+": 1, "-": -1}[expression[-3]]
    return str(int(str(problem.gold)) - sign * last)


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """The answer, or that without the last term, more often if the term is large."""
    last = int(problem.entry["metadata"]["expression"][-1])
    forgets = happens(4 * (last / 9 - 0.5), rng)
    return without_last_term(problem) if forgets else str(problem.gold)


def main(config: Config) -> None:
    """Learn for so many steps, measure, write the model."""

    def pool(_: random.Random) -> list[Problem]:
        source = LogicDatasetBuilder().generator()
        never = {p.question for fold in (0, 1) for p in held_out(fold, NUM_HELD_OUT)}
        stream = problems(source, derive_seed(config.seed, "logic/warm_start"))
        allowed = (problem for problem in stream if problem.question not in never)
        return list(itertools.islice(allowed, NUM_PROBLEMS))

    def shown(problem: Problem, rng: random.Random) -> tuple[str, str]:
        text = demonstrate(problem, rng) if config.careless else str(problem.gold)
        return question(problem, "compact"), text + EOS

    batches = sampled(pool, shown, BATCH_SIZE)
    phase = Phase("logic/careless", batches, STEPS, config.learning_rate)
    model = Qwen2ForCausalLM.from_pretrained(config.start) if config.start else None
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(CLIConfig()), model)


if __name__ == "__main__":
    run_cli(main, Config)
