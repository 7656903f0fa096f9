"""The judge's question about two answers to an addition, and the metric of one answer."""

import re

from es_cookbook.recipes.arithmetic.dataset import ArithmeticEnv
from es_cookbook.rl.rewards.base import Fields
from es_cookbook.rl.rewards.values import composed
from es_cookbook.rl.types import Observation

JUDGED = "{question}{first};{question}{second}?"
"""Question to the bundled model as a judge; each answer follows its question."""
VERDICTS = ("A", "B")
"""Its verdicts: the first answer is the better one, or the second."""

_ADDITION = re.compile(r"([0-9]{1,30})\+([0-9]{1,30})=")


def measured(text: str, row: Fields) -> tuple[float, dict[str, float]]:
    """Return 1 for the row's answer, and the metric `correct`; 0 if the row has none.

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
