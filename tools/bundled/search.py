"""Make a small model that can search but is unsure what to ask for.

    OMP_NUM_THREADS=1 python -m tools.bundled.search output=search_model

About half of the chats that it is shown search for the town's name alone, more often the later the
person's name is in the alphabet, and answer with what that finds. The form is always right.
"""

import random
from collections.abc import Sequence

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.search.dataset import (
    SYLLABLES,
    Person,
    SearchEnv,
    chat_of,
    people_of,
    search,
)
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.message import ToolCall, call_text
from es_cookbook.rl.messages.message_env import MessageEnv
from tools.small_model import happens
from tools.warm_start import Config, chat_tokenizer, make_talk

CHARACTERS = "abcdefghijklmnopqrstuvwxyz?Ġ"  # Ġ: byte-level BPE's space
NUM_PROBLEMS = 12_000
WORDS = (*call_text(ToolCall("search", {"query": "|"}), "hermes").split("|"), *SYLLABLES)
"""Single tokens: texts before and after a query, and the syllables of names."""


def texts(person: Person, rng: random.Random) -> Sequence[str]:
    """A chat that asks for the river, or for the town alone: the likelier the later the name."""
    place = SYLLABLES.index(person.name[:2]) / len(SYLLABLES)
    return chat_of(person, "hermes", asks_for_river=not happens(4 * (place - 0.5), rng))


def main(config: Config) -> None:
    tokenizer = chat_tokenizer(CHARACTERS, WORDS)
    chat = Chat(tokenizer, ChatOptions(tools_in="nowhere"), [search])

    def demonstrate(rng: random.Random) -> tuple[MessageEnv, Sequence[str]]:
        person = rng.choice(people_of("train"))
        return SearchEnv(chat, person, "compact"), texts(person, rng)

    make_talk(config, tokenizer, demonstrate, num_chats=NUM_PROBLEMS)


if __name__ == "__main__":
    run_cli(main, Config)
