"""Additions as rows, and pairs of answers to them, better and worse.

    python -m tools.rows.additions output=additions.jsonl

    {"question": "347+285=", "answer": "236"}

The answer is 632, ones first, as in the recipe arithmetic. `additions.jsonl` of the recipe pairwise
was made by the command above, from problems that its warm start does not show.
"""

import random

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.arithmetic.dataset import (
    Problem,
    generate_problems,
    gold_answer,
    question,
)
from tools.bundled.arithmetic import without_carries
from tools.rows.generated import RowsConfig as Config
from tools.rows.generated import with_a_wrong_character, write


def draw_pair(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Two different answers: the right one, one without carries, one with a wrong digit."""
    gold = gold_answer(problem.terms, "compact")
    found = {gold, without_carries(problem.terms), with_a_wrong_character(gold, rng)}
    one, other = rng.sample(sorted(found), 2)
    return one, other


def main(config: Config) -> None:
    rows = (
        {
            "question": question(problem.terms, "compact"),
            "answer": gold_answer(problem.terms, "compact"),
        }
        for problem in generate_problems(config.seed, "test")
    )
    write(config, rows, "addition", 2000)


if __name__ == "__main__":
    run_cli(main, Config)
