"""Additions as Envs: problems, generation, held-out split, and reward.

A problem is some numbers to be added. Its fold follows from the numbers in any order, so no test
problem is a training problem with its numbers exchanged.

Half of the reward is for the right sum, half for the share of its digits that are right: an answer
with one wrong digit is better than one with three, and a population has more to choose from.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.generated import Fold, GeneratedDatasetBuilder, fold_of, problems_of
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.prompts import render_observation
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.types import ANSWER, Observation, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Numbers to be added, in the order of the question."""

    terms: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.terms)

    @property
    def fold(self) -> Fold:
        """The problem's split, a pure function of its numbers in any order."""
        return fold_of("arithmetic", *sorted(self.terms))


def generate_problems(
    seed: int, fold: Fold, *, num_terms: int = 2, num_digits: int = 3
) -> Iterator[Problem]:
    """Yield distinct problems of one split, without end, in an order that a seed decides.

    Args:
        seed: same seed, same stream.
        fold: "train", "development" or "test"; they are disjoint for all seeds.
        num_terms: numbers per addition.
        num_digits: digits of each; the first one is not 0.
    """
    draw = functools.partial(draw_problem, num_terms=num_terms, num_digits=num_digits)
    return problems_of("arithmetic", seed, fold, draw)


def draw_problem(rng: random.Random, num_terms: int = 2, num_digits: int = 3) -> Problem:
    """Draw a problem, of any split."""
    lowest, highest = 10 ** (num_digits - 1), 10**num_digits - 1
    return Problem(tuple(rng.randint(lowest, highest) for _ in range(num_terms)))


def ones_first(number: int) -> str:
    """Return the digits of a number from the ones upwards.

    >>> ones_first(632)
    '236'
    """
    return str(number)[::-1]


def columns(terms: Sequence[int]) -> list[int]:
    """Return the sum of each column of digits, ones first, without carries.

    >>> columns([347, 285])
    [12, 12, 5]
    """
    length = max(len(str(term)) for term in terms)
    return [sum(term // 10**place % 10 for term in terms) for place in range(length)]


def forgot_a_carry(terms: Sequence[int], answer: str) -> bool:
    """Return whether an answer, ones first, is right but for one or more missing carries.

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


PromptStyle: TypeAlias = Literal["compact", "words"]


def question(terms: Sequence[int], style: PromptStyle) -> str:
    """Return the question in words, or as the bundled model knows it (answered ones first).

    >>> question([347, 285], "compact")
    '347+285='
    """
    numbers = "+".join(map(str, terms))
    if style == "compact":
        return f"{numbers}="
    return f"What is {numbers}? Answer with the number alone."


def gold_answer(terms: Sequence[int], style: PromptStyle) -> str:
    """Return the answer that earns the full reward.

    >>> gold_answer([347, 285], "compact"), gold_answer([347, 285], "words")
    ('236', '632')
    """
    return ones_first(sum(terms)) if style == "compact" else str(sum(terms))


def right_digits(answer: str, gold: str) -> float:
    """Share of the places, ones first, in which two numbers have the same digit.

    >>> right_digits("226", "236"), right_digits("23", "236"), right_digits("2361", "236")
    (0.6666666666666666, 0.6666666666666666, 0.75)
    """
    places = list(zip_longest(answer, gold))
    return sum(given == wanted for given, wanted in places) / len(places)


@dataclasses.dataclass(eq=False)
class ArithmeticEnv(ProblemEnv):
    """One attempt at one addition."""

    observation: Observation
    terms: tuple[int, ...]
    style: PromptStyle = "compact"

    def grade(self, text: str) -> Grade:
        """Return reward and metrics: `correct`, `digits`, `well_formed`, `forgot_carry`."""
        gold = ones_first(sum(self.terms))
        answer, well_formed = self._read(text.strip(), len(gold))
        correct = float(answer == gold)
        digits = right_digits(answer, gold) if answer else 0.0
        metrics = {
            "correct": correct,
            "digits": digits,
            "well_formed": float(well_formed),
            "forgot_carry": float(forgot_a_carry(self.terms, answer)),
        }
        return Grade(0.5 * correct + 0.5 * digits, metrics, {ANSWER: answer} if answer else None)

    def _read(self, text: str, longest: int) -> tuple[str, bool]:
        """Return the digits of the answer, ones first, and whether the text is nothing else.

        In words the last number of the text counts, in any context. Of a number longer
        than any sum can be, nothing counts.
        """
        is_number = text.isascii() and text.isdigit() and len(text) <= longest + 1
        if self.style == "compact":
            return (text, True) if is_number else ("", False)
        value = last_number(text)
        if value is None or value.denominator != 1 or not 0 <= value < 10 ** (longest + 1):
            return "", False
        return ones_first(int(value)), is_number


@chz.chz
class ArithmeticDatasetBuilder(GeneratedDatasetBuilder):
    """Additions for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=1000, doc="most held-out problems used; 0 for none")
    num_terms: int = chz.field(default=2, doc="numbers that are added; 2 to 9")
    num_digits: int = chz.field(default=3, doc="digits of each; 1 to 30")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, answered ones first; "
        "words: as a chat if the model has one, answered as numbers are written",
    )

    _num_terms = in_range("num_terms", at_least=2, at_most=9)
    _num_digits = in_range("num_digits", at_least=1, at_most=30)

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        shape = {"num_terms": self.num_terms, "num_digits": self.num_digits}
        for problem in generate_problems(seed, fold, **shape):
            terms = problem.terms
            name = f"generated problem {question(terms, 'compact')}"
            text = question(terms, self.prompt)
            observation = render_observation(tokenizer, text, chat=self.prompt == "words")
            if not observation.tokens_T:
                raise DataError(f"{name}: the model's tokenizer makes no tokens of it")
            env = functools.partial(ArithmeticEnv, observation, terms, self.prompt)
            yield ProblemGroupBuilder(env, name, gold_answer(terms, self.prompt))
