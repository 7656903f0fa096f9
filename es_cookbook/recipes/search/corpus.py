"""A small closed world of people, towns and rivers, as sentences that can be searched.

    bela lives in rudo
    river of rudo is mika

Names are two syllables and mean nothing. The world is the same for every seed of a run.
"""

import dataclasses
import functools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from es_cookbook.common.seeds import derive_seed

K1, B = 1.2, 0.75


class BM25:
    """Which text fits a query best, by BM25 (Robertson and Zaragoza, 2009): an inverted index.

    Terms are lower-case words, without stemming. A query costs time in the texts that share a word
    with it, not in all of them.

    >>> index = BM25(["the river of rust", "anna lives in rust", "the river of oslo"])
    >>> index.search("river rust", 1), index.search("nothing", 1)
    (['the river of rust'], [])
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        counts = [Counter(terms(text)) for text in texts]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(len(lengths), 1)
        self._postings: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for term, n in count.items():
                weight = n * (K1 + 1) / (n + K1 * (1 - B + B * length / mean))
                self._postings[term].append((i, weight))

    def search(self, query: str, most: int) -> list[str]:
        """The texts that fit best, the best first, equal ones in their order; of each some word."""
        scores: Counter[int] = Counter()
        for term in set(terms(query)):
            found = self._postings.get(term, [])
            rarity = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for i, weight in found:
                scores[i] += rarity * weight  # pyright: ignore[reportArgumentType]
        ranked = sorted(scores, key=lambda i: (-scores[i], i))
        return [self._texts[i] for i in ranked[:most]]


def terms(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


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
        return f"{self.name} lives in {self.town}"


@functools.cache
def people() -> Sequence[Person]:
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
    rivers = dict.fromkeys(map(river_sentence, people()))
    return BM25([*(person.sentence for person in people()), *rivers])
