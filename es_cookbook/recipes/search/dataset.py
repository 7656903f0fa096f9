"""Questions that need two searches, the second for what the first has found.

What is searched is a small closed world of people, towns and rivers, as sentences:

    bela lives in rudo
    river of rudo is mika

Names are two syllables and mean nothing. The world is the same for every seed of a run. A search
for a town's name alone finds people who live there; one for `river` and the town finds its river.
"""

import dataclasses
import functools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import chz
from typing_extensions import override

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.calculator.dataset import PromptStyle, QuestionEnv, ToolDatasetBuilder
from es_cookbook.rl.data.generated import Fold, fold_of
from es_cookbook.rl.messages.chat import Chat
from es_cookbook.rl.messages.message import Form, ToolCall, call_text
from es_cookbook.rl.messages.message_env import Reply
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.messages.tools import tool
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.values import composed
from es_cookbook.rl.types import Tokenizer

K1, B = 1.2, 0.75


class BM25:
    """Ranks texts for a query by BM25 (Robertson and Zaragoza, 2009): an inverted index.

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
        """Return the best texts, best first; each shares a word with the query."""
        scores: Counter[int] = Counter()
        for term in set(terms(query)):
            found = self._postings.get(term, [])
            rarity = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for i, weight in found:
                scores[i] += rarity * weight  # pyright: ignore[reportArgumentType]
        ranked = sorted(scores, key=lambda i: (-scores[i], i))
        return [self._texts[i] for i in ranked[:most]]


def terms(text: str) -> list[str]:
    return re.findall(r"\w+", composed(text).lower())


SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou")
NUM_PEOPLE, NUM_TOWNS = 2000, 100


@dataclasses.dataclass(frozen=True, slots=True)
class Person:
    """A person, their town, and its river."""

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
    """Return a sentence that names the river in a person's town."""
    return f"river of {person.town} is {person.river}"


@functools.cache
def index() -> BM25:
    rivers = dict.fromkeys(map(river_sentence, people()))
    return BM25([*(person.sentence for person in people()), *rivers])


@tool(quick=True)
def search(query: str) -> str:
    """Search an archive of sentences about people, towns and rivers.

    Args:
        query: words; the sentence that fits them best is returned
    """
    return "\n".join(index().search(query, 1)) or "nothing found"


@functools.cache
def people_of(fold: Fold) -> Sequence[Person]:
    """Return the people about whom a fold asks, by a hash of the name."""
    return [person for person in people() if fold_of("search", *map(ord, person.name)) == fold]


def generate_problems(seed: int, fold: Fold) -> Iterator[Person]:
    """Return the people of a fold, in an order that a seed decides."""
    shuffled = list(people_of(fold))
    random.Random(derive_seed(seed, f"search/{fold}")).shuffle(shuffled)
    return iter(shuffled)


def chat_of(person: Person, form: Form, *, asks_for_river: bool = True) -> tuple[str, ...]:
    """Return the model's turns: two searches, and the last word that it has found."""
    queries = person.name, f"river {person.town}" if asks_for_river else person.town
    calls = [call_text(ToolCall("search", {"query": query}), form) for query in queries]
    return (*calls, terms(index().search(queries[-1], 1)[0])[-1])


class SearchEnv(QuestionEnv):
    """One attempt at one question."""

    def __init__(self, chat: Chat, person: Person, style: PromptStyle) -> None:
        super().__init__(chat, question(person, style))
        self._river = person.river

    @override
    def graded(self, text: str) -> Reply:
        words = terms(spoken(text))
        is_right = words[-1:] == [self._river]
        return self.scored(correct=is_right, well_formed=len(words) == 1)


def question(person: Person, style: PromptStyle) -> str:
    """Return the question in words, or as the bundled model knows it.

    >>> question(Person("bela", "rudo", "mika"), "compact")
    'river bela?'
    """
    if style == "compact":
        return f"river {person.name}?"
    return (
        f"What is the river of the town in which {person.name} lives? Search the archive for "
        "it, one search a turn, and then answer with the river's name alone."
    )


@chz.chz
class SearchDatasetBuilder(ToolDatasetBuilder):
    """Questions for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=1000, doc="most held-out problems used; 0 for none")

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        chat = self.chat_with(search, tokenizer)
        for person in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(SearchEnv, chat, person, self.prompt),
                f"generated problem {person.name}",
                gold=chat_of(person, chat.form),
            )
