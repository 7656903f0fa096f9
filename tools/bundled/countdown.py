"""Make the bundled model: small, character-level, able to solve Countdown and often not doing it.

    python -m tools.bundled.countdown output=/tmp/countdown_model

Evolution strategies start from a pretrained model whose ability is there and whose behaviour is
not. This makes such a model from nothing, in two supervised phases over the same problems (never
the held-out ones):

1. Ability: clean demonstrations, `<think>first step</think><answer>expression</answer>`.
2. Habits: a short further training on demonstrations as careless people would leave them: they skip
   the thought, stop halfway, write the whole equation, forget to close the tag, or try a step that
   leads nowhere. The ability stays; the most likely output is often spoilt.

A habit's chance depends on the problem, as people's habits do: it crosses one half on part of the
problems, so that greedy decoding shows it there and not elsewhere. `habit_steps=0` leaves the clean
model: the ceiling.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.countdown.dataset import Problem, Solution, question
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from tools import warm_start
from tools.bundled.countdown_demonstrations import demonstration, solved_problems
from tools.small_model import EOS, Batch, build_model, build_tokenizer, happens
from tools.warm_start import Phase, make, on_held_out

CHARACTERS = "0123456789+-*/()=,:ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
STEPS, BATCH_SIZE = 2400, 128
NUM_PROBLEMS = 40_000
"""Limit on demonstrated problems; there are 37,824 to train on."""
SAMPLES = 8


@chz.chz
class Config(warm_start.Config):
    """How the bundled model is made; the defaults made it."""

    habit_steps: int = chz.field(
        default=300, doc="optimizer steps on spoilt ones; 0 for the ceiling"
    )

    @chz.validate
    def _habits(self) -> None:
        check_range(self, "habit_steps", at_least=0)


def demonstrate_carelessly(problem: Problem, solution: Solution, rng: random.Random) -> str:
    """A demonstration with random bad habits, whose probabilities depend on the problem."""
    smallest, _, largest = (number / 30 for number in sorted(problem.numbers))
    difficulty = problem.target / 99

    first_step, expression = solution.first_step, solution.expression
    if rng.random() < 0.1:
        first_step, expression = wander(problem.numbers, rng)
    thought = "" if happens(4 * (0.05 - difficulty), rng) else f"<think>{first_step}</think>"
    if happens(4 * (largest - 1.05), rng):
        expression = first_step.partition("=")[0]
    if happens(4 * (difficulty - 0.5), rng):
        expression = f"{expression}={problem.target}"
    closing = "" if happens(4 * (smallest - 0.5), rng) else "</answer>"
    return f"{thought}<answer>{expression}{closing}"


def wander(numbers: Sequence[int], rng: random.Random) -> tuple[str, str]:
    """A first step and an expression that use the numbers at random, ignoring the target."""
    first, second, third = rng.sample(list(numbers), 3)
    large, small = max(first, second), min(first, second)
    operator = rng.choice("+-*")
    value = {"+": large + small, "-": large - small, "*": large * small}[operator]
    step = f"{large}{operator}{small}"
    return f"{step}={value}", f"{step}{rng.choice('+-')}{third}"


@functools.cache
def shown(seed: int, count: int) -> list[tuple[Problem, Solution]]:
    return list(itertools.islice(solved_problems(seed), count))


def batches(
    seed: int,
    demonstration: Callable[[Problem, Solution, random.Random], str],
    rng: random.Random,
) -> Iterator[Batch]:
    """Demonstrations of the problems, every one once per epoch."""
    problems = shown(seed, NUM_PROBLEMS)
    epoch: list[int] = []
    while True:
        if len(epoch) < BATCH_SIZE:
            epoch = rng.sample(range(len(problems)), len(problems))
        batch = [problems[epoch.pop()] for _ in range(BATCH_SIZE)]
        yield [
            (question(p.numbers, p.target, "compact"), demonstration(p, solution, rng) + EOS)
            for p, solution in batch
        ]


def main(config: Config) -> None:
    """Learn in two phases, measure after each, write the model."""
    clean = functools.partial(batches, config.seed, lambda _, each, __: demonstration(each))
    careless = functools.partial(batches, config.seed, demonstrate_carelessly)
    phases = [Phase("warm_start/ability", clean, STEPS)]
    if config.habit_steps:
        phases.append(Phase("warm_start/habits", careless, config.habit_steps, 1e-3))
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed)
    make(config, tokenizer, phases, on_held_out(CLIConfig(), SAMPLES, folds=[0]), model)


if __name__ == "__main__":
    run_cli(main, Config)
