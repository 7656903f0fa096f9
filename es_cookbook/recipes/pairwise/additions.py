"""Additions as rows, and pairs of answers to them, better and worse.

    python -m es_cookbook.recipes.pairwise.additions output=additions.jsonl

    {"question": "347+285=", "answer": "236"}

The answer is 632, ones first, as in the recipe arithmetic. The recipe's own `additions.jsonl` was
made by the command above, of problems that its warm start shows to nobody.
"""

import random
import re

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.arithmetic.dataset import (
    ArithmeticEnv,
    Problem,
    generate_problems,
    gold_answer,
    question,
    without_carries,
)
from es_cookbook.rl.data.generated import RowsConfig as Config
from es_cookbook.rl.data.generated import with_a_wrong_character, write
from es_cookbook.rl.letters import composed
from es_cookbook.rl.rewards.base import Fields
from es_cookbook.rl.types import Observation

JUDGED = "{question}{first};{question}{second}?"
"""What the bundled model is asked as a judge; each answer stands behind its question."""
VERDICTS = ("A", "B")
"""What it says where the first answer is the better one, and where the second is."""

_ADDITION = re.compile(r"([0-9]{1,30})\+([0-9]{1,30})=")


def measured(text: str, row: Fields) -> tuple[float, dict[str, float]]:
    """1 for the row's answer, and the metric `correct`; nothing where the row has none.

    For additions also `digits`, `well_formed` and `forgot_carry`.

    >>> measured("225", {"question": "347+285=", "answer": "236"})[0]
    0.0
    >>> measured("225", {"question": "Why?"})
    (0.0, {})
    """
    if "answer" not in row:
        return 0.0, {}
    given, gold = composed(text.strip()), composed(str(row["answer"]))
    correct = float(given == gold)
    metrics = {"correct": correct}
    if addition := _ADDITION.fullmatch(str(row.get("question", ""))):
        terms = tuple(int(term) for term in addition.groups())
        metrics = {**ArithmeticEnv(Observation(()), terms).grade(text).metrics, **metrics}
    return correct, metrics


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
