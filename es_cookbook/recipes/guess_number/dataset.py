"""Guessing a number as a chat: after each guess the model hears where the number is.

There are just as many guesses as halving the range needs. Halving always finds the number; other
guesses find it by luck, which says little about a genome. So half of the reward is for how well the
guesses halve what is left.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.names import built_field
from es_cookbook.rl.data.generated import Fold, GeneratedDatasetBuilder, fold_of, problems_of
from es_cookbook.rl.messages.chat import Chat, ChatOptions, Limit
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.message_env import MessageEnv, Reply
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.types import Tokenizer

PromptStyle: TypeAlias = Literal["compact", "words"]

HIGHEST = 99
WIDTHS = range(12, 61)
"""Number of candidates that a problem may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A number to find in a range, ends included."""

    low: int
    high: int
    number: int

    @property
    def guesses(self) -> int:
        """Number of guesses that halving needs."""
        return (self.high - self.low + 1).bit_length()

    @property
    def fold(self) -> Fold:
        return fold_of("guess_number", self.low, self.high, self.number)


def generate_problems(seed: int, fold: Fold) -> Iterator[Problem]:
    """Yield distinct problems of one fold, in an order that a seed decides."""
    return problems_of("guess_number", seed, fold, draw_problem)


def draw_problem(rng: random.Random) -> Problem:
    """Draw a problem, of any fold."""
    width = rng.choice(WIDTHS)
    low = rng.randint(1, HIGHEST - width + 1)
    high = low + width - 1
    return Problem(low, high, rng.randint(low, high))


def halving(problem: Problem) -> list[int]:
    """Return the guesses that always halve the remaining range.

    >>> halving(Problem(10, 30, 25))
    [20, 25]
    """
    low, high, guesses = problem.low, problem.high, list[int]()
    while not guesses or guesses[-1] != problem.number:
        guesses.append((low + high) // 2)
        low, high = narrowed(low, high, guesses[-1], problem.number)
    return guesses


def halves(low: int, high: int, guess: int) -> float:
    """Return how well a guess halves the remaining range: 1 in the middle, 0 at an edge.

    >>> halves(10, 30, 20), halves(10, 30, 15), halves(10, 30, 30), halves(7, 7, 7)
    (1.0, 0.5, 0.0, 1.0)
    """
    most = (high - low) // 2
    return min(guess - low, high - guess, most) / most if most else 1.0


def narrowed(low: int, high: int, guess: int, number: int) -> tuple[int, int]:
    """Return the remaining range after a wrong guess."""
    return (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))


class GuessEnv(MessageEnv):
    """One attempt at finding a number."""

    def __init__(self, chat: Chat, problem: Problem, style: PromptStyle) -> None:
        super().__init__(chat)
        self.style: PromptStyle = style
        self._number, self._left = problem.number, problem.guesses
        self._low, self._high = problem.low, problem.high
        self._halves: list[float | None] = []

    @override
    async def initial_messages(self) -> Sequence[Message]:
        question = self._range
        if self.style == "words":
            question = (
                f"I am thinking of a whole number, {question}. You have {self._left} guesses. "
                "Answer each time with one number alone; I will say whether mine is higher or "
                "lower."
            )
        return [Message("user", question)]

    @override
    async def reply(self, message: Message) -> Reply:
        guess = self._read(message.content)
        self._halves.append(None if guess is None else halves(self._low, self._high, guess))
        self._left -= 1
        if guess == self._number or self._left == 0:
            return self._end(found=guess == self._number)
        return Reply(messages=[Message("user", self._hint(guess))])

    @override
    def out_of_room(self, limit: Limit) -> Reply:
        return self._end(found=False)

    def _end(self, *, found: bool) -> Reply:
        count = len(self._halves)
        halving = sum(value or 0.0 for value in self._halves) / count
        well_formed = sum(value is not None for value in self._halves) / count
        metrics = {"correct": float(found), "halving": halving, "well_formed": well_formed}
        return Reply(0.5 * found + 0.5 * halving, done=True, metrics=metrics)

    def _read(self, text: str) -> int | None:
        """Read a guess within the range; in the compact style nothing else may be said."""
        value = last_number(text)
        if self.style == "compact" and not (text.isascii() and text.isdigit()):
            return None
        if value is None or value.denominator != 1 or not self._low <= value <= self._high:
            return None
        return int(value)

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return "?" + self._range if self.style == "compact" else f"It is {self._range}. Guess:"
        higher = guess < self._number
        self._low, self._high = narrowed(self._low, self._high, guess, self._number)
        if self.style == "compact":
            return f"{'+' if higher else '-'}{self._range}"
        return f"Mine is {'higher' if higher else 'lower'}: it is {self._range}. Guess:"

    @property
    def _range(self) -> str:
        if self.style == "compact":
            return f"{self._low}..{self._high}="
        return f"from {self._low} to {self._high}"


@chz.chz
class GuessNumberDatasetBuilder(GeneratedDatasetBuilder):
    """Numbers to guess, for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=400, doc="most held-out problems used; 0 for none")
    prompt: PromptStyle = chz.field(
        default="compact", doc="compact: for the bundled model; words: for a model that reads"
    )
    chat: ChatOptions = built_field(ChatOptions, "turns and lengths of chats")

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        chat = Chat(tokenizer, self.chat)
        for problem in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(GuessEnv, chat, problem, self.prompt),
                f"generated problem {problem.number} of {problem.low} to {problem.high}",
                gold=tuple(map(str, halving(problem))),
            )
