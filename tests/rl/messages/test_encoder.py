"""Texts as tokens, in threads that share a tokenizer."""

import threading
from typing import Any

import pytest

from es_cookbook.rl.messages.encoder import inside
from tests.byte_tokenizers import byte_tokenizer


@pytest.mark.parametrize("others_split", [False, True])
def test_threads_that_encode_in_two_ways_wait_for_one_another(others_split: bool) -> None:
    """How special tokens are read is a setting of the tokenizer, which is theirs together."""
    tokenizer: Any = byte_tokenizer(["<x>"])
    usual, begun, goes_on = tokenizer.encode, threading.Event(), threading.Event()
    found: dict[str, tuple[int, ...]] = {}

    def encode(text: str, **options: Any) -> list[int]:
        if text.startswith("long"):
            begun.set()
            goes_on.wait(30)
        return list(usual(text, **options))

    def run(text: str, splits: bool) -> None:
        found[text] = inside(tokenizer, text, split_special_tokens=splits)

    tokenizer.encode = encode
    first = threading.Thread(target=run, args=("long <x>", True))
    second = threading.Thread(target=run, args=("<x>", others_split))
    first.start()
    begun.wait(30)
    second.start()
    second.join(0.2 if others_split is False else 30)
    assert ("<x>" in found) == others_split
    goes_on.set()
    for thread in (first, second):
        thread.join(30)
    assert len(found["<x>"]) == (3 if others_split else 1) and len(found["long <x>"]) == 8
