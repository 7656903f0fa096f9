"""A question, its answer, and sums to be worked out: generated, split, and with their thoughts.

A sum is numbers with signs between them. Its hand-written thought are the running totals: what it
comes to after each number, so that the last total is the answer. Multiplication binds tighter, as
is usual: a product counts as one number.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator

from es_cookbook.recipes.generated import Fold, fold_of, fold_of_text, problems_of


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        question: all that the answer needs.
        answer: what is to be found; not empty.
        thought: a hand-written chain of thought, where one is known.
        tags: names under which metrics are reported.
        source: the text that the question was cut from, if it was.
    """

    question: str
    answer: str
    thought: str | None = None
    tags: tuple[str, ...] = ()
    source: str = ""

    @property
    def key(self) -> str:
        return self.question

    @property
    def fold(self) -> int:
        """Which fold it belongs to, by its question."""
        return fold_of_text(self.question)


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """Numbers, and the sign before each: `+`, `-` or `*`; the first has `+`."""

    terms: tuple[int, ...]
    signs: tuple[str, ...]

    @property
    def question(self) -> str:
        """As it is asked.

        >>> Sum((3, 5, 2), ("+", "-", "*")).question
        '3-5*2'
        """
        pairs = zip(self.signs, self.terms, strict=True)
        return "".join(f"{sign}{term}" for sign, term in pairs).removeprefix("+")

    @property
    def totals(self) -> list[int]:
        """What it comes to after each number, or product, but the first; the last is the answer.

        >>> Sum((3, 5, 9, 2), ("+",) * 4).totals, Sum((3, 5, 2), ("+", "-", "*")).totals
        ([8, 17, 19], [-7])
        """
        parts: list[int] = []
        for sign, term in zip(self.signs, self.terms, strict=True):
            if sign == "*":
                parts[-1] *= term
            else:
                parts.append(-term if sign == "-" else term)
        totals = list(itertools.accumulate(parts))
        return totals[1:] or totals

    @property
    def thought(self) -> str:
        """The totals, as a chain of thought."""
        return ",".join(map(str, self.totals))

    @property
    def problem(self) -> Problem:
        return Problem(self.question, str(self.totals[-1]), self.thought)

    @property
    def fold(self) -> Fold:
        """Which split it belongs to: of its numbers and signs in any order."""
        pairs = sorted(zip(map(ord, self.signs), self.terms, strict=True))
        return fold_of("markovian", *itertools.chain.from_iterable(pairs))


def draw_sum(
    rng: random.Random, num_terms: int = 4, num_digits: int = 1, operations: str = "+"
) -> Sum:
    """Any sum, of any split; numbers are from 1 to the highest of so many digits."""
    terms = tuple(rng.randint(1, 10**num_digits - 1) for _ in range(num_terms))
    return Sum(terms, ("+", *(rng.choice(operations) for _ in terms[1:])))


def generate_sums(
    seed: int, fold: Fold, *, num_terms: int, num_digits: int, operations: str
) -> Iterator[Sum]:
    """Seeded stream of distinct sums of one split.

    Args:
        seed: same seed, same stream.
        fold: "train", "development" or "test"; they are disjoint whatever the seeds.
        num_terms: how many numbers.
        num_digits: most digits of each.
        operations: signs that may stand between them.
    """
    shape = {"num_terms": num_terms, "num_digits": num_digits}
    draw = functools.partial(draw_sum, operations=operations, **shape)
    return problems_of("markovian", seed, fold, draw)


def chance(problems_P: list[Problem]) -> float:
    """How often the answer is right that is given most: the best without question and thought.

    >>> chance([Problem("a", "1"), Problem("b", "2"), Problem("c", "2")])
    0.6666666666666666
    """
    answers = [problem.answer for problem in problems_P]
    return max(map(answers.count, set(answers)), default=math.nan) / max(len(answers), 1)
