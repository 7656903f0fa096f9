"""A small closed world of people, towns and rivers, as sentences that can be searched.

    bela lives in rudo
    river of rudo is mika

Names are two syllables and mean nothing. The world is the same for every seed of a run.
"""

import dataclasses
import functools
import random
from collections.abc import Sequence

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.search.bm25 import BM25

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou")
NUM_PEOPLE, NUM_TOWNS = 2000, 100


@dataclasses.dataclass(frozen=True, slots=True)
class Person:
    """Somebody, their town, and its river."""

    name: str
    town: str
    river: str

    @property
    def sentence(self) -> str:
        """Where they live."""
        return f"{self.name} lives in {self.town}"


@functools.cache
def people() -> Sequence[Person]:
    """All people of the world."""
    rng = random.Random(derive_seed(0, "search/world"))
    names = [first + second for first in SYLLABLES for second in SYLLABLES if first != second]
    rng.shuffle(names)
    towns = list(zip(names[:NUM_TOWNS], names[NUM_TOWNS : 2 * NUM_TOWNS], strict=True))
    named = names[2 * NUM_TOWNS : 2 * NUM_TOWNS + NUM_PEOPLE]
    return [Person(name, *rng.choice(towns)) for name in named]


def river_sentence(person: Person) -> str:
    """What river is in a person's town."""
    return f"river of {person.town} is {person.river}"


@functools.cache
def index() -> BM25:
    """All sentences, people first."""
    rivers = dict.fromkeys(map(river_sentence, people()))
    return BM25([*(person.sentence for person in people()), *rivers])
