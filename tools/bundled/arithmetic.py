"""Make the bundled model: small, able to add three-digit numbers, and often forgetting to carry.

    python -m tools.bundled.arithmetic output=/tmp/arithmetic_model

A model that is taught additions from nothing learns two things: to add each column, soon, and to
carry, later. This one learns from demonstrations, about half of which never carry, more often with
large numbers, and it stops while the carry is still being learned. So it is between two
algorithms, and already answers in good form: a held-out answer is three or four digits,
ones first, and nothing else. `careless=0` demonstrates right answers alone.

Demonstrations are drawn from all training problems; held-out ones are never shown.
"""

import math
import random
from collections.abc import Iterator, Sequence

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.arithmetic.dataset import (
    Problem,
    columns,
    draw_problem,
    gold_answer,
    question,
)
from es_cookbook.recipes.arithmetic.train_cli import CLIConfig
from es_cookbook.rl.data.generated import training_problem
from tools import warm_start
from tools.small_model import EOS, Batch, build_tokenizer, happens
from tools.warm_start import Phase, make, on_held_out

CHARACTERS = "0123456789+="
STEPS, BATCH_SIZE = 800, 128
SAMPLES = 16


@chz.chz
class Config(warm_start.Config):
    """How the bundled model is made; the defaults made it."""

    careless: float = chz.field(
        default=0.5, doc="about which share of the demonstrations never carries; 0: none, 1: all"
    )

    @chz.validate
    def _share(self) -> None:
        check_range(self, "careless", at_least=0, at_most=1)


def without_carries(terms: Sequence[int]) -> str:
    """The answer, ones first, from adding each column without carries.

    >>> without_carries([347, 285])
    '225'
    """
    return "".join(str(column % 10) for column in columns(terms))


def forgets_to_carry(problem: Problem, careless: float, rng: random.Random) -> bool:
    """Whether this demonstration forgets to carry: randomly, more often for larger sums.

    The chance crosses one half on the middle of the problems, so that greedy decoding is right on
    some and wrong on others.
    """
    if careless in (0, 1):
        return careless == 1
    size = problem.total / (len(problem.terms) * 10 ** len(str(max(problem.terms))))
    leaning = math.log(careless / (1 - careless)) + 4 * (size - 0.55)
    return happens(leaning, rng)


def demonstrate(problem: Problem, careless: float, rng: random.Random) -> tuple[str, str]:
    """The question, and a careless or a careful answer."""
    terms = problem.terms
    forgets = forgets_to_carry(problem, careless, rng)
    text = without_carries(terms) if forgets else gold_answer(terms, "compact")
    return question(terms, "compact"), text + EOS


def main(config: Config) -> None:
    """Learn, measure on held-out problems, write the model."""

    def batches(rng: random.Random) -> Iterator[Batch]:
        while True:
            problems = [training_problem(draw_problem, rng) for _ in range(BATCH_SIZE)]
            yield [demonstrate(problem, config.careless, rng) for problem in problems]

    phase = Phase("arithmetic/warm_start", batches, STEPS)
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(CLIConfig(), SAMPLES))


if __name__ == "__main__":
    run_cli(main, Config)
