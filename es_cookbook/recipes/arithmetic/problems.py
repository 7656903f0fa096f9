"""Additions: what one is, how they are made, split, and sorted by what is wrong with an answer.

A problem is some numbers to be added. Its fold follows from the numbers in any order, so no test
problem is a training problem with its numbers exchanged.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

from es_cookbook.recipes.generated import Fold, fold_of, problems_of


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Numbers to be added, in the order in which they are asked."""

    terms: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.terms)

    @property
    def fold(self) -> Fold:
        """Which split the problem belongs to, a pure function of its numbers in any order."""
        return fold_of("arithmetic", *sorted(self.terms))


def generate_problems(
    seed: int, fold: Fold, *, num_terms: int = 2, num_digits: int = 3
) -> Iterator[Problem]:
    """Endless seeded stream of distinct problems of one split.

    Args:
        seed: same seed, same stream.
        fold: "train", "development" or "test"; they are disjoint whatever the seeds.
        num_terms: how many numbers are added.
        num_digits: digits of each; the first one is not 0.
    """
    draw = functools.partial(draw_problem, num_terms=num_terms, num_digits=num_digits)
    return problems_of("arithmetic", seed, fold, draw)


def draw_problem(rng: random.Random, num_terms: int = 2, num_digits: int = 3) -> Problem:
    """Any problem, of any split."""
    lowest, highest = 10 ** (num_digits - 1), 10**num_digits - 1
    return Problem(tuple(rng.randint(lowest, highest) for _ in range(num_terms)))


def ones_first(number: int) -> str:
    """The digits of a number from the ones upwards, as one finds them when adding by hand.

    >>> ones_first(632)
    '236'
    """
    return str(number)[::-1]


def columns(terms: Sequence[int]) -> list[int]:
    """The sum of each column of digits, ones first, without carries.

    >>> columns([347, 285])
    [12, 12, 5]
    """
    length = max(len(str(term)) for term in terms)
    return [sum(term // 10**place % 10 for term in terms) for place in range(length)]


def without_carries(terms: Sequence[int]) -> str:
    """The answer, ones first, of somebody who adds each column and forgets to carry.

    >>> without_carries([347, 285])
    '225'
    """
    return "".join(str(column % 10) for column in columns(terms))


def forgot_a_carry(terms: Sequence[int], answer: str) -> bool:
    """Whether an answer, ones first, is right but for one or more carries that were forgotten.

    >>> forgot_a_carry([347, 285], "225"), forgot_a_carry([347, 285], "226")
    (True, True)
    >>> forgot_a_carry([347, 285], "236"), forgot_a_carry([347, 285], "233")
    (False, False)
    """
    if not (answer.isascii() and answer.isdigit()) or answer == ones_first(sum(terms)):
        return False
    carries = {0}  # that may have reached this column: the one there is, or none
    for place, column in enumerate(columns(terms)):
        if place >= len(answer):
            return False
        reached = {column + carry for carry in carries}
        matching = {value for value in reached if value % 10 == int(answer[place])}
        carries = {carry for value in matching for carry in (value // 10, 0)}
    rest = answer[len(columns(terms)) :]
    return any(rest == (ones_first(carry) if carry else "") for carry in carries)
