"""What a model's turn says and calls, by the tokenizer's response template where it has one.

A response template says how a model writes thoughts, calls and the rest, as a chat template says
how they are shown; `parse_response` of transformers reads by it. So calls are read in any form for
which a tokenizer has such a template: Python and XML too, and between special tokens, which an
action's text has not.

It is given what a turn says, up to a stop text, and not what it thinks. It fails as a whole where
one call of a turn is damaged, it ends a call at the first closing tag, also in an argument, and it
keeps of the text around calls the last part alone, so that text is read here. Where it fails or
finds no call, the turn is read in the forms of `es_cookbook.rl.messages.message`; so is every turn
of a tokenizer without a template, as most are.

Source: https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

import bisect
import dataclasses
import logging
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from es_cookbook.common.terminal import one_line
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.encoder import Controls
from es_cookbook.rl.messages.message import (
    CLOSE,
    OPEN,
    Form,
    Parsed,
    as_json,
    parse_tool_calls,
    said_in,
)
from es_cookbook.rl.messages.thoughts import TAGS, THOUGHTS, opened_thought, spoken, whole_turn
from es_cookbook.rl.types import Action, Tokenizer

logger = logging.getLogger(__name__)

_tried: "weakref.WeakKeyDictionary[Tokenizer, tuple[object, bool]]" = weakref.WeakKeyDictionary()
"""Tokenizers -> the response template that was tried, and whether it reads a plain turn."""


def has_response_template(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer says how its model's turns are read; one that cannot is said once."""
    template: object = getattr(tokenizer, "response_template", None)
    if template is None:
        return False
    tried, is_usable = _tried.get(tokenizer, (None, False))
    if tried is not template:
        try:
            tokenizer.parse_response("Yes.", prefix="")
            is_usable = True
        except Exception as error:  # It is code of strangers.
            is_usable = False
            logger.warning(
                "the tokenizer's response template cannot be used, so tool calls are read in the "
                "forms of Hermes and Llama alone (%.200s)",
                one_line(str(error)),
            )
        _tried[tokenizer] = template, is_usable
    return is_usable


def is_text_enough(tokenizer: Tokenizer) -> bool:
    """Whether turns are read by their text, not by special tokens beside it."""
    names = Controls.of(tokenizer).names
    return not has_response_template(tokenizer) and frozenset(TAGS).isdisjoint(names)


def read_turn(
    tokenizer: Tokenizer,
    form: Form,
    prompt_T: Sequence[int],
    action: Action,
    *,
    text: str | None = None,
    opening: str = "",
    schemas: Sequence[Mapping[str, object]] = (),
) -> Parsed:
    """Read a turn.

    Args:
        tokenizer: of the model.
        form: how it writes calls where no response template reads them.
        prompt_T: what the turn was sampled behind.
        action: the turn.
        text: the turn's, where that is not the action's own.
        opening: what the turn begins with, and the prompt ends in.
        schemas: of the tools, by which a response template reads arguments.
    """
    text = action.text if text is None else text
    opened = opened_thought(tokenizer, prompt_T)
    shown = opening + _shown(tokenizer, text, action)
    whole = whole_turn(shown, opened)
    read = parse_tool_calls(whole, form)
    if whole != shown:
        read = dataclasses.replace(read, content=read.content.removeprefix(opened))
    if not has_response_template(tokenizer):
        return read
    own = text if action.text.startswith(text) else text.removeprefix(opened)
    marked = opening + _marked(tokenizer, own, action)
    said = said_in(whole_turn(marked, opened), form)
    prefix = str(tokenizer.decode(list(prompt_T))).removesuffix(opening) + THOUGHTS.get(opened, "")
    return _by_template(tokenizer, form, said, prefix, schemas, read) if said.strip() else read


def _by_template(
    tokenizer: Tokenizer,
    form: Form,
    said: str,
    prefix: str,
    schemas: Sequence[Mapping[str, object]],
    ours: Parsed,
) -> Parsed:
    """What the response template finds in what a turn says, or else what we did."""
    try:
        found = tokenizer.parse_response(
            said, prefix=prefix, tools=[dict(schema) for schema in schemas]
        )
        parsed = _parsed(cast("Mapping[str, Any]", found))
    except Exception as error:  # Of whatever kind, for whatever cause.
        problem = f"a tool call cannot be read: {one_line(str(error))[:200]}"
        return ours if ours.calls else Parsed(ours.content, (), (problem,))
    if not parsed.calls and not parsed.problems:
        return ours
    read = parse_tool_calls(_plain(tokenizer, said), form)
    if read.calls == parsed.calls:
        return dataclasses.replace(parsed, content=read.content)
    content = _plain(tokenizer, "".join(_around_calls(tokenizer, said))).strip()
    return dataclasses.replace(parsed, content=content or parsed.content)


def _around_calls(tokenizer: Tokenizer, said: str) -> Iterator[str]:
    """The text around calls, where a response template says what opens and closes them."""
    calls = cast("Any", tokenizer).response_template.get("fields", {}).get("tool_calls", {})
    opens, closes = (
        re.compile(calls.get(f"{side}_pattern") or re.escape(calls.get(side) or ""), re.DOTALL)
        for side in ("open", "close")
    )
    if not opens.pattern:
        return
    at = 0
    while begun := opens.search(said, at):
        yield said[at : begun.start()]
        ended = closes.search(said, begun.end())
        at = ended.end() if closes.pattern and ended else len(said)
    yield said[at:]


def _plain(tokenizer: Tokenizer, text: str) -> str:
    """A text without special tokens."""
    return "".join(list(Controls.of(tokenizer).pieces(text))[::2])


def _marked(tokenizer: Tokenizer, text: str, action: Action) -> str:
    """An action's text, which a stop text may have cut, with special tokens."""
    texts, tokens_T = AnswerTexts(tokenizer), action.tokens_T
    whole = texts.text(tokens_T)
    if text == whole or text == tokenizer.decode(list(tokens_T), skip_special_tokens=True):
        return str(tokenizer.decode(list(tokens_T)))
    if not whole.startswith(text):
        return text
    lengths = range(len(tokens_T) + 1)
    count = bisect.bisect(lengths, len(text), key=lambda i: len(texts.text(tokens_T[:i]))) - 1
    begun_T = list(tokens_T[:count])
    return str(tokenizer.decode(begun_T)) + text[len(texts.text(begun_T)) :]


def _shown(tokenizer: Tokenizer, text: str, action: Action) -> str:
    """The text; where tags of thoughts are special tokens, with all of these but the last."""
    if spoken(text) != text:
        return text
    tokens_T, special = list(action.tokens_T), Controls.of(tokenizer).ids
    while tokens_T and tokens_T[-1] in special:
        tokens_T.pop()
    whole = str(tokenizer.decode(tokens_T))
    return text if spoken(whole) == whole else whole


def _parsed(found: Mapping[str, Any]) -> Parsed:
    """What a response template found in a turn."""
    bodies: list[str] = []
    for call in found.get("tool_calls") or ():
        called = call.get("function", call)
        arguments = called.get("arguments", called.get("parameters", {}))
        bodies.append(as_json({"name": called.get("name"), "arguments": arguments}))
    # What is wrong with a call is found, and told, as of any other.
    read = parse_tool_calls("".join(f"{OPEN}{body}{CLOSE}" for body in bodies), "hermes")
    return Parsed(str(found.get("content") or "").strip(), read.calls, read.problems)
