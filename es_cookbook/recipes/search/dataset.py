"""Questions that need two searches, the second for what the first has found.

A search for a town's name alone finds people who live there. Its river is found by who asks for it.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.generated import Fold, GeneratedDatasetBuilder, fold_of
from es_cookbook.recipes.recipe import built_field
from es_cookbook.recipes.search.corpus import Person, index, people, terms
from es_cookbook.rl.messages.chat import Chat, ChatOptions, Limit
from es_cookbook.rl.messages.message import Form, Message, ToolCall, call_text
from es_cookbook.rl.messages.message_env import Reply, ToolEnv
from es_cookbook.rl.messages.tools import tool
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Tokenizer

PromptStyle: TypeAlias = Literal["compact", "words"]


@tool(quick=True)
def search(query: str) -> str:
    """Search an archive of sentences about people, towns and rivers.

    Args:
        query: words; the sentence that fits them best is returned
    """
    return "\n".join(index().search(query, 1)) or "nothing found"


@functools.cache
def people_of(fold: Fold) -> Sequence[Person]:
    """Those about whom a fold asks, by a hash of the name."""
    return [person for person in people() if fold_of("search", *map(ord, person.name)) == fold]


def generate_problems(seed: int, fold: Fold) -> Iterator[Person]:
    """The people of a fold, in an order that follows from the seed."""
    shuffled = list(people_of(fold))
    random.Random(derive_seed(seed, f"search/{fold}")).shuffle(shuffled)
    return iter(shuffled)


def chat_of(person: Person, form: Form, *, asks_for_river: bool = True) -> tuple[str, ...]:
    """What the model says, turn by turn: two searches, and the last word that it has found."""
    queries = person.name, f"river {person.town}" if asks_for_river else person.town
    calls = [call_text(ToolCall("search", {"query": query}), form) for query in queries]
    return (*calls, terms(index().search(queries[-1], 1)[0])[-1])


class SearchEnv(ToolEnv):
    """One attempt at one question."""

    def __init__(self, chat: Chat, person: Person, style: PromptStyle) -> None:
        super().__init__(chat)
        self.person = person
        self.style: PromptStyle = style

    @override
    async def initial_messages(self) -> Sequence[Message]:
        return [Message("user", question(self.person, self.style))]

    @override
    async def answer(self, text: str) -> Reply:
        words = terms(text)
        is_right = words[-1:] == [self.person.river]
        return self._end(is_right=is_right, is_word=len(words) == 1)

    @override
    def out_of_room(self, limit: Limit) -> Reply:
        return self._end(is_right=False, is_word=False)

    def _end(self, *, is_right: bool, is_word: bool) -> Reply:
        failed = self.counts["malformed_calls"] + self.counts["tool_errors"]
        metrics = {
            "correct": float(is_right),
            "well_formed": float(is_word and not failed),
        }
        return Reply(float(is_right), done=True, metrics=metrics)


def question(person: Person, style: PromptStyle) -> str:
    """The question in words, or in the bundled model's shorthand.

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
class SearchDatasetBuilder(GeneratedDatasetBuilder):
    """Questions for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=1000, doc="most held-out problems used; 0 for none")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, which knows the tool and is told of none; words: for "
        "a model that reads",
    )
    chat: ChatOptions = built_field(
        functools.partial(ChatOptions, max_turns=4),
        "how chats go, and where words tell of the tool",
    )

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        told = {"tools_in": "nowhere"} if self.prompt == "compact" else {}
        chat = Chat(tokenizer, chz.replace(self.chat, **told), [search])
        for person in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(SearchEnv, chat, person, self.prompt),
                f"generated problem {person.name}",
                gold=chat_of(person, chat.form),
            )
