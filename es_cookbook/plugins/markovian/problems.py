"""Questions with answers and hand-written thoughts: generated sums, and rows of public sets.

A sum is numbers with signs between them. Its hand-written thought is its running totals, where
the last is the answer. Multiplication binds tighter: a product counts as one number.

Rows may have the formats of public sets, each recognised by its columns:

    any           question, answer
    GSM8K         question, answer that ends in #### 42   its steps are the thought
    MMLU          question, choices, answer: a number     subject is the tag
    ARC           question, choices {text, label}, answerKey
    SVAMP         Body, Question, Answer                  Equation is the thought, Type the tag
    Wikipedia     text                                    its start is the question

The answer to a choice is its letter, and its choices belong to the question: a reader who does not
see the question does not see them either. A field `thought` is the hand-written chain of thought in
any format. One file may mix formats.
"""

import dataclasses
import functools
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from es_cookbook.plugins.math.rows import MARK, Asked, one_answer
from es_cookbook.rl.data.generated import Fold, fold_of, problems_of
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.messages.encoder import as_text
from es_cookbook.rl.rewards.answers import lettered
from es_cookbook.rl.types import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Problem(Asked):
    """One problem.

    Attributes:
        answer: the right answer; not empty.
        thought: a hand-written chain of thought, where one is known.
        tags: names under which metrics are reported.
        source: the text that the question was cut from, if it was.
    """

    answer: str
    thought: str | None = None
    tags: tuple[str, ...] = ()
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """Numbers, and the sign before each: `+`, `-` or `*`; the first has `+`."""

    terms: tuple[int, ...]
    signs: tuple[str, ...]

    @property
    def question(self) -> str:
        """The text of the question.

        >>> Sum((3, 5, 2), ("+", "-", "*")).question
        '3-5*2'
        """
        pairs = zip(self.signs, self.terms, strict=True)
        return "".join(f"{sign}{term}" for sign, term in pairs).removeprefix("+")

    @property
    def totals(self) -> list[int]:
        """The running total after each number or product but the first; the last is the answer.

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
        """The sum's split, a function of its numbers and signs in any order."""
        pairs = sorted(zip(map(ord, self.signs), self.terms, strict=True))
        return fold_of("markovian", *itertools.chain.from_iterable(pairs))


def draw_sum(
    rng: random.Random, num_terms: int = 4, num_digits: int = 1, operations: str = "+"
) -> Sum:
    """Draw a sum, of any split; numbers are from 1 to the highest of so many digits."""
    terms = tuple(rng.randint(1, 10**num_digits - 1) for _ in range(num_terms))
    return Sum(terms, ("+", *(rng.choice(operations) for _ in terms[1:])))


def generate_sums(
    seed: int, fold: Fold, *, num_terms: int, num_digits: int, operations: str
) -> Iterator[Sum]:
    """Yield distinct sums of one split, in an order that a seed decides.

    Args:
        seed: same seed, same stream.
        fold: "train", "development" or "test"; they are disjoint for all seeds.
        num_terms: numbers per sum.
        num_digits: most digits of each.
        operations: signs that may stand between them.
    """
    shape = {"num_terms": num_terms, "num_digits": num_digits, "operations": operations}
    return problems_of("markovian", seed, fold, functools.partial(draw_sum, **shape))


def chance(problems_P: list[Problem]) -> float:
    """Return the share of the most common answer: the best accuracy without any question.

    >>> chance([Problem("a", "1"), Problem("b", "2"), Problem("c", "2")])
    0.6666666666666666
    """
    answers = [problem.answer for problem in problems_P]
    return max(map(answers.count, set(answers)), default=math.nan) / max(len(answers), 1)


LETTERS = "ABCDEFGHIJ"
_CHARACTERS_PER_TOKEN = 32
"""Characters at a long text's start that suffice for a token."""
_WHOLE = re.compile(r"(-?\d+)\.0+")


def read_problem(row: Row, tokenizer: "Tokenizer | None", lengths: tuple[int, int]) -> Problem:
    """Read the problem of a row.

    Args:
        row: one row.
        tokenizer: cuts texts; None leaves them whole, to check the rest of a row.
        lengths: numbers of tokens of the question and of the answer, for plain texts.

    Raises:
        DataError: Columns of no known format, or a question or answer that is empty.
    """
    found = {name for name, value in row.fields.items() if value is not None}
    tags: tuple[str, ...] = ()
    thought, source = None, ""
    if {"question", "choices"} <= found:
        question, answer, tags = _choice(row)
    elif {"Body", "Question", "Answer"} <= found:
        question = f"{row.text('Body').strip()} {row.text('Question').strip()}"
        answer = _one(row, "Answer")
        thought, tags = row.optional_text("Equation"), _tag(row, "Type")
    elif {"question", "answer"} <= found:
        question, answer = row.text("question").strip(), _one(row, "answer")
        if MARK in answer:
            steps, _, answer = answer.rpartition(MARK)
            thought, answer = steps.strip(), answer.strip().replace(",", "")
    elif "text" in found:
        source = row.text("text")
        question, answer = _cut(row, tokenizer, *lengths)
    else:
        raise row.error(
            "a row has question and answer (and choices), Body, Question and Answer, or text, "
            f"found: {', '.join(sorted(found)) or 'nothing'}"
        )
    if not question:
        raise row.error("the question is empty")
    if not answer:
        raise row.error("the answer is empty")
    written = row.optional_text("thought")
    return Problem(question, answer, written or thought, tags, source)


def _one(row: Row, name: str) -> str:
    """Return an answer as text; a whole number without decimals."""
    answer = one_answer(row, name)
    whole = _WHOLE.fullmatch(answer)
    return whole[1] if whole else answer


def _choice(row: Row) -> tuple[str, str, tuple[str, ...]]:
    """Read a choice: MMLU has a list and a number, ARC texts with labels and a key."""
    choices = row.value("choices")
    if isinstance(choices, Mapping):
        of = cast("Mapping[str, list[object]]", choices)
        texts, key = of.get("text"), row.text("answerKey").strip()
        places = [i for i, label in enumerate(of.get("label") or ()) if label == key]
        number = places[0] if len(places) == 1 else -1
    else:
        texts, key = choices, row.integer("answer")
        number = key
    items = cast("Sequence[object]", texts) if isinstance(texts, list | tuple) else ()
    is_good = 2 <= len(items) <= len(LETTERS) and 0 <= number < len(items)
    if not is_good or not all(isinstance(item, str) and item for item in items):
        raise row.error(
            f"field 'choices' must be 2 to {len(LETTERS)} texts, or text and label, one of which "
            f"answer (a number) or answerKey (a label) names, found {choices!r:.60} and {key!r:.20}"
        )
    question = f"{row.text('question').strip()}\n{lettered([str(item) for item in items])}"
    return question, LETTERS[number], _tag(row, "subject")


def _cut(row: Row, tokenizer: "Tokenizer | None", asked: int, answered: int) -> tuple[str, str]:
    """Return the start of a text, and what follows."""
    text = row.text("text")[: (asked + answered) * _CHARACTERS_PER_TOKEN]
    if tokenizer is None:
        return text, text
    tokens_T = as_text(tokenizer, text)
    if len(tokens_T) < asked + answered:
        raise row.error(
            f"field 'text' has {len(tokens_T)} tokens, and context_tokens={asked} and "
            f"continuation_tokens={answered} need {asked + answered}; give longer texts or less"
        )
    parts = tokens_T[:asked], tokens_T[asked : asked + answered]
    question, answer = (
        str(tokenizer.decode(list(part), skip_special_tokens=False)) for part in parts
    )
    return question.strip(), answer.strip()


def _tag(row: Row, name: str) -> tuple[str, ...]:
    value = row.optional_text(name)
    return (" ".join(value.lower().split()),) if value and value.strip() else ()
