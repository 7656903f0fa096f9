"""Make the bundled model: small, able to add three-digit numbers, and often forgetting to carry.

    python -m es_cookbook.recipes.arithmetic.warm_start output=/tmp/arithmetic_model

A model that is taught additions from nothing learns two things: to add each column, soon, and to
carry, later. This one learns from demonstrations of which about half never carry, more often with
large numbers, and it stops while the carry is still being learned. So it is between two
algorithms, and answers in good form from the beginning: a held-out answer is three or four digits,
ones first, and nothing else. `careless=0` demonstrates right answers alone.

Demonstrations are drawn from all training problems; held-out ones are never shown.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import chz
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
    answer,
    build_model,
    build_tokenizer,
    fit,
    happens,
    new_directory,
    save,
)
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.arithmetic.env import ArithmeticEnv, gold_answer, question
from es_cookbook.recipes.arithmetic.problems import (
    Problem,
    draw_problem,
    generate_problems,
    without_carries,
)
from es_cookbook.recipes.generated import Fold
from es_cookbook.rl.types import Observation

CHARACTERS = "0123456789+="
WIDTH, DEPTH = 64, 2
MAX_ANSWER_TOKENS = 8
NUM_TEST = 1000
SAMPLES = 16


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    steps: int = chz.field(default=800, doc="optimizer steps")
    batch_size: int = chz.field(default=128, doc="demonstrations a step")
    careless: float = chz.field(
        default=0.5, doc="about which share of the demonstrations never carries; 0: none, 1: all"
    )
    num_terms: int = chz.field(default=2, doc="numbers that are added")
    num_digits: int = chz.field(default=3, doc="digits of each")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "steps", "batch_size", "num_digits", at_least=1)
        check_range(self, "num_terms", at_least=2)
        check_range(self, "careless", at_least=0, at_most=1)


def forgets_to_carry(problem: Problem, careless: float, rng: random.Random) -> bool:
    """Whether this demonstration does: by chance, and more often the larger the sum is.

    The chance crosses one half on the middle of the problems, so that greedy decoding is right on
    some and wrong on others.
    """
    if careless in (0, 1):
        return careless == 1
    size = problem.total / (len(problem.terms) * 10 ** len(str(max(problem.terms))))
    leaning = math.log(careless / (1 - careless)) + 4 * (size - 0.55)
    return happens(leaning, rng)


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, config: Config, rng: random.Random
) -> None:
    """Learn demonstrations of training problems, drawn anew for every step."""

    def draw_training_problem() -> Problem:
        while True:
            problem = draw_problem(rng, config.num_terms, config.num_digits)
            if problem.fold == "train":
                return problem

    def draw() -> tuple[list[str], list[str]]:
        batch = [draw_training_problem() for _ in range(config.batch_size)]
        questions = [question(problem.terms, "compact") for problem in batch]
        answers = [
            without_carries(problem.terms)
            if forgets_to_carry(problem, config.careless, rng)
            else gold_answer(problem.terms, "compact")
            for problem in batch
        ]
        return questions, [text + EOS for text in answers]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)


def grades(problems: Sequence[Problem], texts: Sequence[str]) -> list[Mapping[str, float]]:
    """The Env's metrics of each answer."""
    return [
        ArithmeticEnv(Observation(()), problem.terms).grade(text).metrics
        for problem, text in zip(problems, texts, strict=True)
    ]


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], seed: int
) -> dict[str, float]:
    """Means of the Env's metrics, greedy; and of 16 samples at temperature 1: right, any right."""
    questions = [question(problem.terms, "compact") for problem in problems]
    greedy = answer(model, tokenizer, questions, MAX_ANSWER_TOKENS)
    with torch.random.fork_rng():  # generate draws from torch's global generator
        torch.manual_seed(derive_seed(seed, "warm_start/measure"))
        sampled = answer(model, tokenizer, questions, MAX_ANSWER_TOKENS, samples=SAMPLES)
    metrics = grades(problems, [text for (text,) in greedy])
    solved = [
        [text == gold_answer(problem.terms, "compact") for text in texts]
        for problem, texts in zip(problems, sampled, strict=True)
    ]
    count = len(problems)
    means = {name: sum(each[name] for each in metrics) / count for name in metrics[0]}
    return means | {
        "sampled_correct": sum(map(sum, solved)) / (count * SAMPLES),
        f"pass_at_{SAMPLES}": sum(map(any, solved)) / count,
    }


def main(config: Config) -> None:
    """Train, measure on held-out problems, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed, WIDTH, DEPTH)
    rng = random.Random(derive_seed(config.seed, "arithmetic/warm_start"))
    train(model, tokenizer, config, rng)
    folds: tuple[Fold, ...] = ("development", "test")
    for fold in folds:
        shape = {"num_terms": config.num_terms, "num_digits": config.num_digits}
        held_out = list(itertools.islice(generate_problems(0, fold, **shape), NUM_TEST))
        measured = measure(model, tokenizer, held_out, config.seed)
        said = "  ".join(f"{name} {value:.1%}" for name, value in measured.items())
        print(f"{fold}: {said}", flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
