"""Sampled tokens as the text of an answer, and where stop texts end it; the same for all engines.

Special tokens are left out of the text, as they are by default in vLLM, TRL and what prime-rl asks
of its server: ends of turns are no part of what is said, and a model that is exported and served
says what its rewards saw. Tags of thoughts and answers stay in the text, since rewards look for
them. A gold answer with another special token is refused before a run.

A stop text is looked for in that text. One that *is* a special token ends answers as a stop token
does. One that has a special token in it is looked for in the text that has them as well.
"""

import bisect
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
"""What of tags may be a special token."""
_CUT = "\ufffd"
"""What tokens are decoded to that are part of a character."""


_FEW = 32
"""Tokens that tell of most that a long stop text is not at their end."""
_BESIDE = 8
"""Characters before a stop text in which tokens may be decoded in another way."""


class _Stops(NamedTuple):
    """Stop texts that are text, tokens that are a stop text, and stop texts with such tokens."""

    plain: tuple[str, ...]
    tokens: frozenset[int]
    marked: tuple[str, ...]


class AnswerTexts:
    """What tokens of one tokenizer say."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        self._stops = functools.lru_cache(maxsize=256)(self._read)
        self._pieces: dict[int, str] = {}

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """Special tokens, and their names."""
        ids = Controls.of(self.tokenizer).ids
        return {token: str(self.tokenizer.convert_ids_to_tokens(token)) for token in ids}

    @functools.cached_property
    def _shown(self) -> frozenset[int]:
        """Those of them that are in an answer's text."""
        return frozenset(token for token, name in self.special.items() if name in _MARKS)

    def text(self, tokens_T: Sequence[int]) -> str:
        """The text of an answer."""
        if not self._shown or self._shown.isdisjoint(tokens_T):
            return self._decode(list(tokens_T), skip_special_tokens=True)
        kept_T = [token for token in tokens_T if token in self._shown or token not in self.special]
        return self._marked(kept_T)

    def said(self, text: str, stop: tuple[str, ...] = ()) -> str:
        """What becomes of a text that the model says, with these stop texts."""
        tokens_T = inside(self.tokenizer, text)
        return self.before(stop, tokens_T, self.text(tokens_T))

    def lost_in(self, text: str) -> str:
        """Special tokens that a text loses, as a clause that says what helps; "" without any."""
        tokens_T = (token for token in inside(self.tokenizer, text) if token not in self._shown)
        names = list(dict.fromkeys(self.special.get(token) for token in tokens_T))
        lost = [name for name in names if name and name in text]
        if not lost:
            return ""
        are, them = (
            ("are special tokens", "them") if len(lost) > 1 else ("is a special token", "it")
        )
        return (
            f"{', '.join(lost)} {are} of the model's tokenizer, and left out of the text of "
            f'answers; make {them} ordinary there ("special": false in tokenizer.json, and not '
            "among the special tokens of tokenizer_config.json), or ask for other tags"
        )

    def stop_tokens(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Special tokens that are a stop text."""
        return self._stops(stop).tokens

    def has_marked(self, stop: tuple[str, ...]) -> bool:
        """Whether a stop text has a special token in it, beside others or other text."""
        return bool(self._stops(stop).marked)

    def is_ended(self, tokens_T: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the last of these tokens completes a stop text; costs nothing of those before."""
        stops, last = self._stops(stop), tokens_T[-1]
        if last in stops.tokens:
            return True
        for texts, decode in ((stops.plain, self.text), (stops.marked, self._marked)):
            for each in texts:
                if self._may_end(each, last) and self._is_at_end(each, tokens_T, decode):
                    return True
        return False

    def before(self, stop: tuple[str, ...], tokens_T: Sequence[int], text: str) -> str:
        """An answer's text up to the first of some stop texts.

        Args:
            stop: the texts.
            tokens_T: of the answer.
            text: theirs.
        """
        stops = self._stops(stop)
        if stops.marked:
            marked = self._marked(tokens_T)
            ends = [at for each in stops.marked if (at := marked.find(each)) >= 0]
            text = self._up_to(min(ends), tokens_T) if ends else text
        shown = (self.special[token] for token in stops.tokens & self._shown)
        for each in (*stops.plain, *shown):
            text = text.partition(each)[0]
        return text

    def _up_to(self, end: int, tokens_T: Sequence[int]) -> str:
        """The text of what stands before a place in the text with special tokens."""
        lengths = range(len(tokens_T) + 1)
        near = bisect.bisect(lengths, end, key=lambda count: len(self._marked(tokens_T[:count])))
        count = min(near + _BESIDE, len(tokens_T))  # Parts of a character may be longer than it.
        while len(self._marked(tokens_T[:count])) > end:
            count -= 1
        part = ""  # Of an ordinary token in which the stop text begins.
        if count < len(tokens_T) and tokens_T[count] not in self.special:
            part = self._marked(tokens_T)[len(self._marked(tokens_T[:count])) : end]
        return self.text(tokens_T[:count]) + part

    def _marked(self, tokens_T: Sequence[int]) -> str:
        return self._decode(list(tokens_T), skip_special_tokens=False)

    def _may_end(self, stop: str, token: int) -> bool:
        """Whether a token may complete a stop text; whether it does shows in the whole text alone.

        A space is not always decoded by itself, and of some characters a token is a part.
        """
        piece, last = self._piece(token), stop[-1]
        return last in piece or last == " " or _CUT in piece

    def _piece(self, token: int) -> str:
        """What a token says alone."""
        if token not in self._pieces:
            self._pieces[token] = self._marked([token])
        return self._pieces[token]

    def _is_at_end(
        self, stop: str, tokens_T: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> bool:
        """Whether a stop text is in what tokens say, of which none before the last completed it.

        So it is in their last characters. Whether it is shows in all of them alone, since tokens
        may be decoded in another way where they are the first.
        """
        length = len(stop) + _BESIDE
        size = min(length, _FEW)
        while size < len(tokens_T):
            start = len(tokens_T) - size
            while self._joins_bytes and start and _CUT in self._piece(tokens_T[start]):
                start -= 1
            tail = decode(tokens_T[start:])
            if stop in tail:
                break
            if len(tail) >= length or not self._may_be_behind(stop, tail, tokens_T[-1]):
                return False
            size *= 2  # Tokens that say nothing, a part of a character, or the end of a long stop.
        return stop in decode(tokens_T)

    def _may_be_behind(self, stop: str, tail: str, last: int) -> bool:
        """Whether a stop text that ends in the last token may begin before some characters."""
        surely = tail[_BESIDE:]
        ends = range(len(surely) - len(self._piece(last)) - _BESIDE, len(surely) + 1)
        return any(stop.endswith(surely[: max(end, 0)]) for end in ends)

    @functools.cached_property
    def _joins_bytes(self) -> bool:
        """Whether bytes of characters are decoded with all that stand behind each other, or not."""
        return "<0x0A>" in self.tokenizer.get_vocab()

    def _read(self, stop: tuple[str, ...]) -> _Stops:
        texts = {text: token for token, text in self.special.items() if text} if stop else {}
        marked = tuple(
            each for each in stop if each not in texts and any(text in each for text in texts)
        )
        tokens = frozenset(texts[each] for each in stop if each in texts)
        return _Stops(tuple(each for each in stop if each not in marked), tokens, marked)


def _decoder(tokenizer: Tokenizer) -> Callable[..., str]:
    """The tokenizer's `decode`, without its look at every number."""
    from transformers import PreTrainedTokenizerBase  # A Config does without.

    usual = getattr(tokenizer.decode, "__func__", None) is PreTrainedTokenizerBase.decode
    found = tokenizer._decode if usual else tokenizer.decode  # pyright: ignore[reportPrivateUsage]
    return cast("Callable[..., str]", found)
