r"""Make the bundled model: small, able to solve word problems, and taught carelessly.

    python -m tools.bundled.math output=/tmp/math_model

It learns generated word problems (`word_problems.py`), a token a word and a token a digit. A
demonstration is its equations, one a line, and the answer in a box. Part of the demonstrations have
one of two faults (`demonstrate_carelessly`), always in perfect form:

- they stop after the first of two steps, and put its result into the box;
- they go by the word: they add where the question says "more than" and subtract where it says
  "fewer than", both of which are wrong there.

A fault's chance depends on the numbers and crosses one half, so that greedy decoding shows it on
part of the problems. Problems of folds 0 and 1, which runs may hold out, are never shown.
"""

import itertools
import random
from collections.abc import Sequence

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.math.train_cli import CLIConfig
from es_cookbook.recipes.math.word_problems import (
    PEOPLE,
    STORIES,
    THINGS,
    WordProblem,
    generate_problems,
)
from es_cookbook.rl.data.generated import FOLDS
from tools.small_model import EOS, build_tokenizer, happens
from tools.warm_start import Careless as Config
from tools.warm_start import Phase, make, on_held_out, sampled

CHARACTERS = "0123456789+-*=}Ċ"  # Ċ is byte-level BPE's newline; spaces are dropped
STEPS, BATCH_SIZE, NUM_PROBLEMS = 1500, 96, 60_000
BOX = r"\boxed{"
SHOWN = range(2, FOLDS)
"""Folds: neither 1, for choosing settings, nor 0, the test."""


def vocabulary() -> list[str]:
    """All words and marks of the questions, in a fixed order."""
    people = [word for person in PEOPLE for word in (*person, person[1].lower())]
    texts = " ".join(story.text for story in STORIES).replace(".", " .").replace("?", " ?")
    words = [word for word in texts.split() if "{" not in word]
    return list(dict.fromkeys([*people, *THINGS, *words]))


def demonstrate(steps: Sequence[str]) -> str:
    r"""The equations, and the last one's result in a box.

    >>> demonstrate(["27+15=42", "42-8=34"])
    '27+15=42\n42-8=34\n\\boxed{34}'
    """
    result = steps[-1].partition("=")[2]
    return "\n".join([*steps, f"{BOX}{result}}}"])


def demonstrate_carelessly(problem: WordProblem, rng: random.Random) -> str:
    """A demonstration that may have a fault, with probabilities that depend on the numbers."""
    first = problem.numbers[0] / problem.story.largest[0]
    second = problem.numbers[1] / problem.story.largest[1]

    steps = list(problem.steps)
    if len(steps) > 1 and happens(4 * (first - 0.5), rng):
        steps = steps[:1]
    if problem.story.name in ("more than", "fewer than") and happens(4 * (second - 0.5), rng):
        steps = [_by_the_word(problem)]
    return demonstrate(steps)


def _by_the_word(problem: WordProblem) -> str:
    left, right = problem.numbers
    if problem.story.name == "more than":
        return f"{left}+{right}={left + right}"
    return f"{max(left, right)}-{min(left, right)}={abs(left - right)}"


def main(config: Config) -> None:
    def problems(_: random.Random) -> list[WordProblem]:
        stream = generate_problems(config.seed, SHOWN)
        return list(itertools.islice(stream, NUM_PROBLEMS))

    def shown(problem: WordProblem, rng: random.Random) -> tuple[str, str]:
        careless = config.careless
        text = demonstrate_carelessly(problem, rng) if careless else demonstrate(problem.steps)
        return problem.question, text + EOS

    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.add_tokens([BOX, *vocabulary()])
    phase = Phase("math/warm_start", sampled(problems, shown, BATCH_SIZE), STEPS)
    make(config, tokenizer, [phase], on_held_out(CLIConfig()), depth=4)


if __name__ == "__main__":
    run_cli(main, Config)
