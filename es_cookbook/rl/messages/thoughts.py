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

import re
from collections.abc import Iterator, Mapping, Sequence

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
_END = 64
"""Tokens of a prompt's end in which a tag is looked for: more than one has, even in characters."""
_NAMES = "|".join(tag[1:-1] for tag in THOUGHTS if re.fullmatch(r"<[a-z:_]+>", tag))
_OTHERS = "|".join(re.escape(tag) for tag in TAGS if not re.fullmatch(r"</?[a-z:_]+>", tag))
_TAG = re.compile(rf"</?(?i:{_NAMES})\s*>|{_OTHERS}", re.ASCII)
"""Any tag, also as models write it: `<Think>`, `</think >`."""


def spoken(text: str) -> str:
    r"""Return the text without its thoughts and the line ends around them.

    >>> spoken(r"<think>\boxed{3}?</think>\boxed{4}"), spoken(r"3?</think>4"), spoken("<think>3")
    ('\\boxed{4}', '4', '')
    """
    spans = said_spans(text)
    if spans == [(0, len(text))]:
        return text
    parts = (text[start:stop].strip("\n") for start, stop in spans)
    return "\n".join(part for part in parts if part)


def said_spans(text: str) -> Sequence[tuple[int, int]]:
    """Return the spans of a text outside of its thoughts, in order, in linear time."""
    return _read(text)[0]


def _read(text: str) -> tuple[Sequence[tuple[int, int]], str]:
    """Return the spans outside of thoughts, and the tag of a thought that is not closed."""
    spans: list[tuple[int, int]] = []
    at, opened = 0, ""
    for start, end, tag in _tags(text):
        if opened:
            if tag == THOUGHTS[opened]:
                at, opened = end, ""
        elif tag in THOUGHTS:
            spans.append((at, start))
            opened = tag
        else:  # It closes what the prompt has opened.
            spans.clear()
            at = end
    if not opened:
        spans.append((at, len(text)))
    return spans, opened


def _tags(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the tags in a text: start, end, and the tag as `THOUGHTS` has it."""
    for found in _TAG.finditer(text):
        tag = found[0]
        yield found.start(), found.end(), tag if tag in TAGS else "".join(tag.split()).lower()


def opened_thought(tokenizer: Tokenizer, prompt_T: Sequence[int], prefill: str = "") -> str:
    """Return the tag of a thought that the prompt opens, as some templates do; else "".

    Args:
        tokenizer: tokenizer of the prompt.
        prompt_T: ends in the tag, before the prefill.
        prefill: text at the prompt's end; may open a thought itself, or close it.
    """
    end = prompt_end(tokenizer, prompt_T, prefill).rstrip()
    return _read(next((tag for tag in THOUGHTS if end.endswith(tag)), "") + prefill)[1]


def prompt_end(tokenizer: Tokenizer, tokens_T: Sequence[int], prefill: str = "") -> str:
    """Return the last characters of a prompt before its prefill, as text."""
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
    """Return a text with the opening tag from its prompt, unless it closes the thought.

    >>> whole_turn("It may be 3", "<think>"), whole_turn("3?</think>4", "<think>")
    ('<think>It may be 3', '3?</think>4')
    """
    return text if not opened or _closes(text, opened) else opened + text


def closed_turn(text: str, opened: str) -> str:
    r"""Return a text with the closing tag of its prompt's thought, unless it has one.

    >>> closed_turn("4", "<think>"), closed_turn("3?</think>4", "<think>")
    ('</think>\n\n4', '3?</think>4')
    """
    return text if not opened or _closes(text, opened) else f"{THOUGHTS[opened]}\n\n{text}"


def _closes(text: str, opened: str) -> bool:
    """Return whether a text opens the thought itself, or closes it before it opens it."""
    pair = opened, THOUGHTS[opened]
    start, tag = next(((start, tag) for start, _, tag in _tags(text) if tag in pair), (0, ""))
    return tag == THOUGHTS[opened] or (tag == opened and start == 0)
