r"""Word problems of one or two steps, in the format of GSM8K, for runs without a download.

A row has `question` and `answer`; the answer works the problem out and ends in its number:

    Anna has 27 apples. She buys 15 more. Then she gives away 8. How many apples does Anna have now?

    27 + 15 = <<27+15=42>>42
    42 - 8 = <<42-8=34>>34
    #### 34

Some stories say "more" where one has to subtract. Numbers are whole and at most 99. A problem is
held out by its numbers: no test problem's numbers, in any order, occur in a training problem,
for all seeds. All sentences were written for this project.
"""

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence

from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.generated import FOLDS, distinct

PEOPLE = (
    ("Anna", "She"),
    ("Ben", "He"),
    ("Clara", "She"),
    ("David", "He"),
    ("Emma", "She"),
    ("Felix", "He"),
    ("Greta", "She"),
    ("Hugo", "He"),
)
THINGS = ("apples", "books", "coins", "cards", "marbles", "pencils", "shells", "stamps")
_LARGEST = 99
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclasses.dataclass(frozen=True, slots=True)
class _Story:
    """A kind of problem.

    Attributes:
        name: name of the kind.
        text: the question, with {name}, {other}, {she}, {things}, and the numbers {a}, {b} and {c}.
        steps: each a number, an operation and a number; `1` is the first step's result.
        largest: largest values of a, b and c.
    """

    name: str
    text: str
    steps: tuple[str, ...]
    largest: tuple[int, ...] = (60, 40, 30)


_HAS = "{name} has {a} {things}. "
_NOW = "How many {things} does {name} have now?"
_OTHER = "than {other} has. How many {things} does {other} have?"
STORIES = (
    _Story("get", f"{_HAS}{{she}} finds {{b}} more. {_NOW}", ("a+b",)),
    _Story("give", f"{_HAS}{{she}} gives away {{b}}. {_NOW}", ("a-b",)),
    _Story("fewer than", f"{_HAS}That is {{b}} fewer {_OTHER}", ("a+b",)),
    _Story("more than", f"{_HAS}That is {{b}} more {_OTHER}", ("a-b",)),
    _Story(
        "get, give",
        f"{_HAS}{{she}} finds {{b}} more. Then {{she}} gives away {{c}}. {_NOW}",
        ("a+b", "1-c"),
    ),
    _Story(
        "give, get",
        f"{_HAS}{{she}} gives away {{b}}. Then {{she}} finds {{c}} more. {_NOW}",
        ("a-b", "1+c"),
    ),
    _Story(
        "give twice",
        f"{_HAS}{{she}} gives away {{b}}. Then {{she}} loses {{c}}. {_NOW}",
        ("a-b", "1-c"),
    ),
    _Story(
        "together",
        _HAS + "{other} has {b} more than {name}. How many {things} do they have together?",
        ("a+b", "1+a"),
    ),
    _Story(
        "boxes",
        "{name} has {a} boxes of {b} {things} and {c} more. How many {things} is that?",
        ("a*b", "1+c"),
        largest=(6, 10, 30),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class WordProblem:
    """A problem.

    Attributes:
        story: its kind.
        question: the question in words.
        steps: the equations, for example "27+15=42".
        numbers: those in the question, in its order.
        result: the answer.
    """

    story: _Story
    question: str
    steps: tuple[str, ...]
    numbers: tuple[int, ...]
    result: int

    @property
    def fold(self) -> int:
        """The problem's fold, a pure function of its numbers in any order."""
        return derive_seed(0, "word_problems/fold", *sorted(self.numbers)) % FOLDS

    @property
    def row(self) -> dict[str, str]:
        """The row in GSM8K's format."""
        spaced = [re.sub(r"[-+*]", r" \g<0> ", step.partition("=")[0]) for step in self.steps]
        values = [step.partition("=")[2] for step in self.steps]
        each = zip(spaced, self.steps, values, strict=True)
        lines = [f"{left} = <<{step}>>{value}" for left, step, value in each]
        return {"question": self.question, "answer": "\n".join([*lines, f"#### {self.result}"])}


def generate_problems(seed: int, folds: Sequence[int]) -> Iterator[WordProblem]:
    """Yield problems of some folds, in an order that a seed decides, each question once.

    It ends only where no further question is found in 100,000 draws.
    """
    rng = random.Random(derive_seed(seed, "word_problems", *folds))
    return distinct(
        lambda: _drawn(rng), lambda problem: problem.fold in folds, lambda problem: problem.question
    )


def _drawn(rng: random.Random) -> WordProblem | None:
    """Draw a random problem; None if a result is negative or too large."""
    story = rng.choice(STORIES)
    given = dict(zip("abc", (rng.randint(2, most) for most in story.largest), strict=True))
    numbers = tuple(number for key, number in given.items() if f"{{{key}}}" in story.text)
    steps: list[str] = []
    values = dict(given)
    for position, (left, operation, right) in enumerate(story.steps, 1):
        value = _OPERATIONS[operation](values[left], values[right])
        if not 0 < value <= _LARGEST:
            return None
        values[str(position)] = value
        steps.append(f"{values[left]}{operation}{values[right]}={value}")
    (name, she), (other, _) = rng.sample(PEOPLE, 2)
    words = {"name": name, "other": other, "she": she, "things": rng.choice(THINGS)}
    question = story.text.format(**words, **given).replace(f"Then {she}", f"Then {she.lower()}")
    return WordProblem(story, question, tuple(steps), numbers, values[str(len(steps))])
