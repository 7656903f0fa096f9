"""What is kept of chats, tools and turns takes no more room after many of them than after some."""

import gc
import weakref

import pytest

from es_cookbook.rl.messages.chat import MOST_TOKENS, Chat, KeptTurns
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.types import Action
from tests.chat_templates import CHATML, tokenizer_with

TOKENIZER = tokenizer_with(CHATML)


class Text(str):
    """One of which it can be seen whether somebody still has it."""


def test_of_turns_the_last_ones_are_kept() -> None:
    renderer, kept = Chat(TOKENIZER).renderer, KeptTurns()
    beside, before_T = KeptTurns(kept), (1,) * 10_000
    chats = [(Message("user", str(n)), Message("assistant", "7")) for n in range(300)]
    for chat in chats:
        kept.keep(renderer, chat, before_T, Action((5,), "7", "stop"))
        assert kept.num_tokens == beside.num_tokens <= MOST_TOKENS
    assert kept.num_tokens > MOST_TOKENS / 2
    known = [kept.prompt(renderer, chat)[: len(before_T)] == before_T for chat in chats]
    assert known == sorted(known) and 50 < sum(known) < 150
    # Those of another model are its own.
    assert beside.prompt(renderer, chats[-1]) == renderer.prompt(chats[-1])


@pytest.mark.slow
def test_prompts_of_long_chats_are_forgotten() -> None:
    renderer, texts = Chat(TOKENIZER).renderer, []
    for n in range(120):
        text = Text(f"{n} " + "a b " * 5000)
        texts.append(weakref.ref(text))
        renderer.prompt([Message("user", text)])
        del text
    gc.collect()
    assert 10 < sum(text() is not None for text in texts) < 110
