"""Questions of a small closed world, whose answers follow from the question: for trials.

    python -m tools.rows.questions output=questions.jsonl

    what comes after 419?      420
    which is more, 301 or 87?  301
    what is tabo backwards?    obat

Words are made of syllables and mean nothing. `questions.jsonl` of the recipe conciseness was
made by the command above; its warm start shows none of them.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from tools.rows.generated import RowsConfig as Config
from tools.rows.generated import by_turns, write

_CONSONANTS, _VOWELS = "bdfglmnprst", "aeiou"


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One question, its shortest good answer, and the same as a whole sentence."""

    kind: str
    question: str
    answer: str
    sentence: str


def generate_questions(seed: int) -> Iterator[Question]:
    """Endless seeded stream of distinct questions: a number, two of them, a word, and again."""
    rng = random.Random(derive_seed(seed, "conciseness/questions"))
    kinds = (_after, _more, _backwards)
    return by_turns([functools.partial(make, rng) for make in kinds], lambda q: q.question)


def _after(rng: random.Random) -> Question:
    a = rng.randrange(1, 10_000)
    return Question("after", f"what comes after {a}?", f"{a + 1}", f"{a + 1} comes after {a}.")


def _more(rng: random.Random) -> Question:
    a, b = rng.sample(range(1, 1000), 2)
    more, less = max(a, b), min(a, b)
    return Question(
        "more", f"which is more, {a} or {b}?", f"{more}", f"{more} is more than {less}."
    )


def _backwards(rng: random.Random) -> Question:
    syllables = [rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))]
    word = "".join(syllables) + rng.choice(["", *_CONSONANTS])
    turned = word[::-1]
    return Question(
        "backwards", f"what is {word} backwards?", turned, f"{word} backwards is {turned}."
    )


def main(config: Config) -> None:
    rows = (
        {"question": q.question, "answer": q.answer, "kind": q.kind}
        for q in generate_questions(config.seed)
    )
    write(config, rows, "question", 1500)


if __name__ == "__main__":
    run_cli(main, Config)
