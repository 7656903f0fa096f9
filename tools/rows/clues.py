"""Clues with wordplay and no definition, whose answers follow from their letters: for trials.

    python -m tools.rows.clues output=clues.jsonl

    clue                                 answer   kind
    heads of nito emaf tus (3)           net      initials
    turned romed (5)                     demor    reversal
    heart of piltane (3)                 lta      hidden
    odd bits of taobne (3)               ton      alternate

Words are made of syllables and mean nothing, so that a model of single characters can learn how
clues work without knowing a language. `clues.jsonl` of the recipe crossword was made by the command
above; its warm start shows none of its answers.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from tools.rows.generated import RowsConfig as Config
from tools.rows.generated import by_turns, write

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CONSONANTS, _VOWELS = "bcdfghlmnprstvw", "aeiou"


@dataclasses.dataclass(frozen=True, slots=True)
class Clue:
    """One clue.

    Attributes:
        kind: kind of wordplay.
        clue: indicator and letters, without the enumeration.
        answer: answer in lower case.
        careless: answer of the same length and letters if the indicator is misread.
    """

    kind: str
    clue: str
    answer: str
    careless: str

    @property
    def enumeration(self) -> str:
        """The enumeration, such as "(5)"."""
        return f"({len(self.answer)})"


def generate_clues(seed: int) -> Iterator[Clue]:
    """Endless seeded stream of clues with distinct answers, all kinds in turn."""
    rng = random.Random(derive_seed(seed, "crossword/clues"))
    kinds = (_initials, _reversal, _hidden, _alternate)
    return by_turns(
        [functools.partial(make, rng) for make in kinds],
        lambda clue: None if clue.answer == clue.careless else clue.answer,
    )


def _word(rng: random.Random, length: int) -> str:
    """Consonants and vowels in turn, either first."""
    sounds = [_CONSONANTS, _VOWELS] if rng.random() < 0.7 else [_VOWELS, _CONSONANTS]
    return "".join(rng.choice(sounds[i % 2]) for i in range(length))


def _initials(rng: random.Random) -> Clue:
    """The first letters of words; misread: the last ones."""
    words = [_word(rng, rng.randint(2, 4)) for _ in range(rng.randint(4, 5))]
    heads, tails = "".join(word[0] for word in words), "".join(word[-1] for word in words)
    return Clue("initials", f"heads of {' '.join(words)}", heads, tails)


def _reversal(rng: random.Random) -> Clue:
    """A word backwards; misread: as it stands."""
    word = _word(rng, rng.randint(4, 6))
    return Clue("reversal", f"turned {word}", word[::-1], word)


def _hidden(rng: random.Random) -> Clue:
    """The middle of a word; misread: its beginning."""
    outside, inside = rng.randint(1, 2), rng.randint(4, 5)
    word = _word(rng, inside + 2 * outside)
    return Clue("hidden", f"heart of {word}", word[outside:-outside], word[:inside])


def _alternate(rng: random.Random) -> Clue:
    """Every other letter, from the first on; misread: from the second."""
    letters = [rng.choice(LETTERS) for _ in range(2 * rng.randint(4, 5))]
    word = "".join(letters)
    return Clue("alternate", f"odd bits of {word}", word[::2], word[1::2])


def main(config: Config) -> None:
    rows = (
        {"clue": c.clue, "answer": c.answer, "enumeration": c.enumeration, "kind": c.kind}
        for c in generate_clues(config.seed)
    )
    write(config, rows, "clue", 2400)


if __name__ == "__main__":
    run_cli(main, Config)
