"""Sampled tokens as the text of an answer, and where stop texts end it; the same for all engines.

Special tokens are left out of the text, as they are by default in vLLM, TRL and prime-rl: ends of
turns are not part of what is said, and an exported model that is served says what its rewards saw.
Tags of thoughts and answers stay in the text, since rewards look for them. A gold answer with
another special token is refused before a run.

A stop text is looked for in that text. A special token that is named in a stop text ends answers
as a stop token does, with any neighbours.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from es_cookbook.rl.messages.encoder import Controls, inside
from es_cookbook.rl.messages.thoughts import TAGS
from es_cookbook.rl.types import Tokenizer

_MARKS = frozenset(mark for tag in TAGS for mark in re.findall(r"<.+?>|\W\S+\W", tag)) | {
    "<answer>",
    "</answer>",
}
"""Parts of tags that may be special tokens."""
_CUT = "\ufffd"
"""The decoded form of a token that is a part of a character."""
_BESIDE = 8
"""Characters before a stop text in which tokens may be decoded differently."""
_TOKENS_OF_A_CHARACTER = 4


class _Stops(NamedTuple):
    """Stop texts without special tokens, and the special tokens that others name."""

    texts: tuple[str, ...]
    tokens: frozenset[int]


class AnswerTexts:
    """Decodes answers with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        self._stops = functools.lru_cache(maxsize=256)(self._read)
        self._pieces: dict[int, str] = {}

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """Special tokens and their names."""
        ids = Controls.of(self.tokenizer).ids
        return {token: str(self.tokenizer.convert_ids_to_tokens(token)) for token in ids}

    @functools.cached_property
    def _shown(self) -> frozenset[int]:
        """The special tokens that stay in an answer's text."""
        return frozenset(token for token, name in self.special.items() if name in _MARKS)

    def text(self, tokens_T: Sequence[int]) -> str:
        """Return the text of an answer."""
        if not self._shown or self._shown.isdisjoint(tokens_T):
            return self._decode(list(tokens_T), skip_special_tokens=True)
        kept_T = [token for token in tokens_T if token in self._shown or token not in self.special]
        return self._decode(kept_T, skip_special_tokens=False)

    def said(self, text: str, stop: tuple[str, ...] = ()) -> str:
        """Return a text as it comes back when the model says it, with these stop texts."""
        return self.before(stop, self.text(inside(self.tokenizer, text)))

    def stop_tokens(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens that are named in stop texts."""
        return self._stops(stop).tokens

    def is_ended(self, tokens_T: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Return whether the last of these tokens completes a stop text that none before it did."""
        stops = self._stops(stop)
        return tokens_T[-1] in stops.tokens or any(
            self._is_at_end(each, tokens_T) for each in stops.texts
        )

    def before(self, stop: tuple[str, ...], text: str) -> str:
        """Return an answer's text up to the first stop text."""
        stops = self._stops(stop)
        shown = (self.special[token] for token in stops.tokens & self._shown)
        for each in (*stops.texts, *shown):
            text = text.partition(each)[0]
        return text

    def _is_at_end(self, stop: str, tokens_T: Sequence[int]) -> bool:
        """Return whether a stop text ends with these tokens.

        No more of them are decoded than it may span.
        """
        last = self._piece(tokens_T[-1])
        # A space is not always decoded by itself, and some tokens are parts of a character.
        if stop[-1] not in last and stop[-1] != " " and _CUT not in last:
            return False
        start = max(0, len(tokens_T) - _TOKENS_OF_A_CHARACTER * (len(stop) + _BESIDE))
        while start and _CUT in self._piece(tokens_T[start]):  # Some decoders join all bytes.
            start -= 1
        if start and stop not in self.text(tokens_T[start:]):
            return False
        return stop in self.text(tokens_T)

    def _piece(self, token: int) -> str:
        """Return the text of a token by itself."""
        if token not in self._pieces:
            self._pieces[token] = self._decode([token], skip_special_tokens=False)
        return self._pieces[token]

    def _read(self, stop: tuple[str, ...]) -> _Stops:
        names = {
            token: name
            for token, name in (self.special.items() if stop else ())
            if any(name == each or (len(name) > 1 and name in each) for each in stop)
        }
        texts = tuple(each for each in stop if not any(name in each for name in names.values()))
        return _Stops(texts, frozenset(names))


def _decoder(tokenizer: Tokenizer) -> Callable[..., str]:
    """Return the tokenizer's `decode`, without its check of every number."""
    from transformers import PreTrainedTokenizerBase  # Configs are read without it.

    usual = getattr(tokenizer.decode, "__func__", None) is PreTrainedTokenizerBase.decode
    found = tokenizer._decode if usual else tokenizer.decode  # pyright: ignore[reportPrivateUsage]
    return cast("Callable[..., str]", found)
