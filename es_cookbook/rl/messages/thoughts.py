r"""Separates what a model says from what it thinks: thoughts stand between tags.

    <think>It may be 3.</think>It is 4.

Calls of tools and answers count in what is said alone. A thought that is not closed goes to the
text's end. A closing tag that closes nothing ends a thought which the prompt has opened, as chat
templates of many thinking models do: nothing before it was said. Where such a text closes no
thought, it is one, which its prompt alone can tell (`opened_thought`, `whole_turn`).

The tags are those of well-known models, as vLLM's reasoning parsers know them too; where they are
special tokens of the tokenizer, they stay in an answer's text all the same
(`es_cookbook.rl.messages.answer_texts`). Left out: thoughts in words, as in Granite ("Here is my
thought process:").
"""

import functools
import re
from collections.abc import Mapping, Sequence

from es_cookbook.rl.messages.encoder import inside
from es_cookbook.rl.types import Tokenizer

THOUGHTS: Mapping[str, str] = {
    "<think>": "</think>",  # DeepSeek-R1, Qwen3, GLM, Kimi K2, MiniMax-M2, Nemotron, SmolLM3, ...
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",  # EXAONE Deep
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",  # Magistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<mm:think>": "</mm:think>",  # MiniMax-M3
    "<longcat_think>": "</longcat_think>",  # LongCat
    "<scratchpad>": "</scratchpad>",  # Nous Hermes
    "<reflection>": "</reflection>",  # Reflection-Llama
    "<ifm|think>": "</ifm|think>",  # K2 Horizon, with two that are shorter
    "<ifm|think_fast>": "</ifm|think_fast>",
    "<ifm|think_faster>": "</ifm|think_faster>",
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A
    "<|begin_of_thought|>": "<|end_of_thought|>",  # OpenThinker
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",  # Kimi K3
    "<unused94>thought": "<unused95>",  # MedGemma
    "◁think▷": "◁/think▷",  # Kimi-VL
}
"""The tag before a thought -> the tag behind it."""
TAGS = tuple(tag for pair in THOUGHTS.items() for tag in pair)
MOST_THOUGHTS = 1000
"""Thoughts in a text; where there are more, nothing is said."""
_END = 64
"""Tokens of a prompt's end in which a tag is looked for: more than one has, even in characters."""
_NAMES = "|".join(tag[1:-1] for tag in THOUGHTS if re.fullmatch(r"<[a-z:_]+>", tag))
_TAG = re.compile(rf"<(/?)((?i:{_NAMES}))(\s*)>", re.ASCII)
"""A tag as models also write it: `<Think>`, `</think >`."""
_STEMS = ("think", "thought", "reason", "reflect", "scratch")
_CAPITALS = (*map(str.title, _STEMS), *map(str.upper, _STEMS))
_WORDS = (*_STEMS, *_CAPITALS, "channel", "inner_", "unused95")
"""Each tag has one of these. They are found faster than tags in a text full of brackets."""


def spoken(text: str) -> str:
    r"""The text without its thoughts and the line ends around them.

    >>> spoken(r"<think>\boxed{3}?</think>\boxed{4}"), spoken(r"3?</think>4"), spoken("<think>3")
    ('\\boxed{4}', '4', '')
    """
    spans = said_spans(text)
    if spans == [(0, len(text))]:
        return text
    parts = (text[start:stop].strip("\n") for start, stop in spans)
    return "\n".join(part for part in parts if part)


def said_spans(text: str) -> Sequence[tuple[int, int]]:
    """The spans of a text outside of its thoughts, in order; takes linear time."""
    # Searching from the right is several times faster.
    if not any(end in text for end in ">]▷") or not _has(text, _WORDS):
        return [(0, len(text))]
    text = canonical(text)
    present = [pair for pair in THOUGHTS.items() if _has(text, pair)]
    if not present:
        return [(0, len(text))]
    spans: list[tuple[int, int]] = []
    opened = dict.fromkeys((start for start, _ in present), -1)  # tag -> where it stands next
    at = 0
    for _ in range(MOST_THOUGHTS):
        for tag, place in opened.items():
            if place < at:
                found = text.find(tag, at)
                opened[tag] = len(text) if found < 0 else found
        tag = min(opened, key=lambda tag: opened[tag])
        start = opened[tag]
        closed = max((text.rfind(end, at, start), end) for _, end in present)
        if closed[0] >= 0:  # It closes what the prompt has opened.
            spans.clear()
            at = closed[0] + len(closed[1])
        spans.append((at, start))
        stop = text.find(THOUGHTS[tag], start)
        if start == len(text) or stop < 0:
            return spans
        at = stop + len(THOUGHTS[tag])
    return []


def canonical(text: str) -> str:
    """The text with its tags spelled as in `THOUGHTS`; its length is unchanged."""
    return _TAG.sub(_as_listed, text) if _has(text, (" >", "\n>", *_CAPITALS)) else text


def _has(text: str, parts: Sequence[str]) -> bool:
    # One character is looked for many times faster than a tag, and few texts have these.
    return any(_rare(part) in text and text.rfind(part) >= 0 for part in parts)


@functools.cache
def _rare(part: str) -> str:
    return next((each for each in part if each in "◁▷|:_[]"), "")


def _as_listed(tag: re.Match[str]) -> str:
    # What fills the place of blanks belongs to the thought.
    filler, name = "\0" * len(tag[3]), tag[2].lower()
    return f"{filler}</{name}>" if tag[1] else f"<{name}>{filler}"


def opened_thought(tokenizer: Tokenizer, prompt_T: Sequence[int], prefill: str = "") -> str:
    """The tag of a thought that the prompt has opened, as some chat templates do; "" for none.

    Args:
        tokenizer: tokenizer of the prompt.
        prompt_T: ends in the tag, before the prefill.
        prefill: text at the prompt's end; may open a thought itself, or close it.
    """
    end = prompt_end(tokenizer, prompt_T, prefill).rstrip()
    begun = next((tag for tag in THOUGHTS if end.endswith(tag)), "") + canonical(prefill)
    spans = said_spans(begun)
    left = begun[spans[-1][1] :] if spans else ""
    return next((tag for tag in THOUGHTS if left.startswith(tag)), "")


def prompt_end(tokenizer: Tokenizer, tokens_T: Sequence[int], prefill: str = "") -> str:
    """The last characters of a prompt before its prefill, as text."""
    most = _END + len(prefill.encode("utf-8", "replace"))
    end = str(tokenizer.decode(list(tokens_T[-most:])))
    if not prefill.strip():
        return end
    # Some tokenizers read it in other letters.
    for shown in (prefill, str(tokenizer.decode(list(inside(tokenizer, prefill))))):
        before = end.rstrip().removesuffix(shown.rstrip())
        if before != end.rstrip():
            return before
    return ""


def whole_turn(text: str, opened: str) -> str:
    """A text with the opening tag from its prompt, unless it closes the thought.

    >>> whole_turn("It may be 3", "<think>"), whole_turn("3?</think>4", "<think>")
    ('<think>It may be 3', '3?</think>4')
    """
    return text if not opened or _closes(text, opened) else opened + text


def closed_turn(text: str, opened: str) -> str:
    r"""A text with the closing tag of the thought that its prompt has opened, unless it has it.

    >>> closed_turn("4", "<think>"), closed_turn("3?</think>4", "<think>")
    ('</think>\n\n4', '3?</think>4')
    """
    return text if not opened or _closes(text, opened) else f"{THOUGHTS[opened]}\n\n{text}"


def _closes(text: str, opened: str) -> bool:
    """Whether a text closes the thought before it opens one."""
    text = canonical(text)
    first, closing = text.find(opened), text.find(THOUGHTS[opened])
    return first == 0 or (closing >= 0 and not 0 <= first < closing)
