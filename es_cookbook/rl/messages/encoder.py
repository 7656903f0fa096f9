"""Texts as tokens: the only place in which prompts are encoded.

A tokenizer may put tokens before a text, behind it, or both. A prompt begins with the former, once,
and never ends with the latter: what follows an end of sequence is another text.

The names of control tokens (`<|im_end|>`, `<s>`) are read as these tokens in a whole prompt that is
given as text. Inside a chat template they are plain text: a question or a tool result that names
such a token must not end its own turn. `shielded`
puts a placeholder for each name before a template is rendered, and `framed` encodes a name behind
it as text, cut in two so that no tokenizer reads it as the token.

transformers has `split_special_tokens` for a text as a whole, and nothing for parts of it.
"""

import functools
import re
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import cast

from es_cookbook.common.errors import ModelError
from es_cookbook.rl.types import Tokenizer

_FIRST = 0x100000
"""The first placeholder, in Unicode's private use area."""
_ITSELF = chr(0x10FFFD)
"""Escapes a private character that was in the text."""
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{_ITSELF}]")
_PLACEHOLDER = re.compile(f"{_ITSELF}.|{_PRIVATE.pattern}")
_TOKENIZERS = 16
"""Number of tokenizers whose properties are cached."""


class Controls:
    """The control tokens of a tokenizer: its special tokens.

    Attributes:
        ids: all of them, but for what stands for an unknown text.
        names: their texts, the longest first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        # Of Qwen's tokenizers it is the end of a text, which no unknown text becomes.
        is_unknown = "unk" in str(getattr(tokenizer, "unk_token", "")).lower()
        unknown = {cast("int | None", tokenizer.unk_token_id)} if is_unknown else set[int]()
        self.ids = (frozenset(special) | set(tokenizer.all_special_ids)) - unknown
        names = {*special.values(), *map(str, tokenizer.all_special_tokens)} - {""}
        self.names = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        # A name of one character cannot be told apart in texts.
        self._placeholders = {
            name: chr(_FIRST + at) for at, name in enumerate(self.names) if len(name) > 1
        }

    @staticmethod
    @functools.lru_cache(_TOKENIZERS)
    def of(tokenizer: Tokenizer) -> "Controls":
        return Controls(tokenizer)

    def named_in(self, text: str) -> str | None:
        """Return the first name of a control token in a text."""
        found = self._pattern.search(text)
        return found and found[0]

    def shielded(self, text: str, but: Collection[str] = ()) -> str:
        """Replace each name in a text by a placeholder, which a template shows as it is.

        So are characters that look like placeholders; the names in `but` stay.
        """
        text = _PRIVATE.sub(lambda found: _ITSELF + found[0], text)
        stands = self._placeholders
        return self._pattern.sub(
            lambda at: at[0] if at[0] in but else stands.get(at[0], at[0]), text
        )

    def unshielded(self, text: str) -> str:
        """Return the text that `shielded` was given."""
        return _PLACEHOLDER.sub(lambda found: self._meant(found[0]), text)

    def _meant(self, placeholder: str) -> str:
        if placeholder.startswith(_ITSELF):
            return placeholder[1:]
        return self.names[ord(placeholder) - _FIRST]

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text before and behind each name."""
        end = 0
        for found in self._pattern.finditer(text):
            yield from (text[end : found.start()], found[0])
            end = found.end()
        yield text[end:]

    def halves(self, text: str) -> Iterator[str]:
        """Cut a shielded text within each name that a placeholder stands for."""
        begin = ""
        end = 0
        for found in _PLACEHOLDER.finditer(text):
            name = self._meant(found[0])
            yield begin + text[end : found.start()] + name[: len(name) // 2]
            begin, end = name[len(name) // 2 :], found.end()
        yield begin + text[end:]


def plain(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a whole prompt, with the tokens that the tokenizer begins texts with, once."""
    begin_T = _beginning(tokenizer)
    tokens_T = inside(tokenizer, text)
    shared = range(len(begin_T), 0, -1)
    num_there = next((num for num in shared if tokens_T[:num] == begin_T[-num:]), 0)
    return begin_T[: len(begin_T) - num_there] + tokens_T


def inside(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a part of a text, in which names of control tokens are these tokens."""
    # Half of a surrogate pair, which JSON can name, is not text for tokenizers.
    text = text.encode("utf-8", "replace").decode()
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def as_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a part of a text, in which names of control tokens are text like any other."""
    return framed(tokenizer, Controls.of(tokenizer).shielded(text))


def behind(tokenizer: Tokenizer, before: str, text: str) -> tuple[int, ...]:
    """Encode a text that follows another, without the blank that some tokenizers add."""
    if not _begins_with_blank(tokenizer):
        return framed(tokenizer, text)
    before_T, whole_T = framed(tokenizer, before), framed(tokenizer, before + text)
    is_prefix = whole_T[: len(before_T)] == before_T
    return whole_T[len(before_T) :] if is_prefix else framed(tokenizer, text)


@functools.lru_cache(_TOKENIZERS)
def _begins_with_blank(tokenizer: Tokenizer) -> bool:
    tokens_T = list(inside(tokenizer, "x"))[:1]
    first = "".join(map(str, tokenizer.convert_ids_to_tokens(tokens_T)))
    return first[:1] in ("\N{LOWER ONE EIGHTH BLOCK}", "\u0120", " ")


def framed(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a template's text with shielded names; the names are plain text.

    Raises:
        ModelError: The tokenizer reads more control tokens than the template has named.
    """
    controls = Controls.of(tokenizer)
    if not _PLACEHOLDER.search(text):
        tokens_T = inside(tokenizer, text)
    else:
        tokens_T = tuple(_with_names(tokenizer, controls, text))
    num_named = sum(1 for _ in controls.pieces(text)) // 2
    if sum(token in controls.ids for token in tokens_T) > num_named:
        raise ModelError(
            "a message has a text that the tokenizer reads as a control token, in other letters "
            f"than its name: {controls.unshielded(text)[-80:]!r}"
        )
    return tokens_T


def _with_names(tokenizer: Tokenizer, controls: Controls, text: str) -> Iterator[int]:
    for has_names, run in groupby(controls.pieces(text), lambda at: bool(_PLACEHOLDER.search(at))):
        shielded = "".join(run)
        for piece in controls.halves(shielded) if has_names else [shielded]:
            yield from inside(tokenizer, piece)


@functools.lru_cache(_TOKENIZERS)
def _beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before a text, found on a known text."""
    for probe in ("a", "1"):
        if inner := tokenizer.encode(probe, add_special_tokens=False):
            whole = tokenizer.encode(probe)
            starts = range(len(whole) - len(inner) + 1)
            at = next((at for at in starts if whole[at : at + len(inner)] == inner), 0)
            return tuple(whole[:at])
    return ()
