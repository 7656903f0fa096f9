"""Reads a model's turn, by the tokenizer's response template if it has one.

A response template describes how a model writes tool calls, as a chat template describes how they
are shown. `parse_response` of transformers (5.13 and newer) reads turns by it, in any format: XML,
Python, or between special tokens, which an action's text does not have. It gets the turn up to a
stop text, without its thoughts.

It fails as a whole if one call is damaged or has a closing tag inside an argument. A turn in which
it fails or finds no call is read in the formats of `es_cookbook.rl.messages.message`, as is every
turn of a tokenizer without a response template.

Source: https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

import bisect
import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
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
)
from es_cookbook.rl.messages.thoughts import THOUGHTS, opened_thought, spoken, whole_turn
from es_cookbook.rl.types import Action, Tokenizer

logger = logging.getLogger(__name__)


@functools.lru_cache(16)
def has_response_template(tokenizer: Tokenizer) -> bool:
    """Whether a response template reads turns; logs a warning if there is one that cannot."""
    if getattr(tokenizer, "response_template", None) is None:
        return False
    try:
        tokenizer.parse_response("Yes.", prefix="")
    except Exception as error:  # Response templates come with models, as code does.
        logger.warning(
            "the tokenizer's response template cannot be used, so tool calls are read only in the "
            "formats of Hermes and Llama (%.200s)",
            one_line(str(error)),
        )
        return False
    return True


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
    """Read the calls and the content of a turn.

    Args:
        tokenizer: of the model.
        form: of calls that the response template does not read.
        prompt_T: the prompt of the turn.
        action: the turn.
        text: its text, if not the action's own.
        opening: the end of the prompt, if the turn begins with it.
        schemas: of the tools; a response template reads arguments by them.
    """
    text = action.text if text is None else text
    opened = opened_thought(tokenizer, prompt_T)
    shown = opening + text
    whole = whole_turn(shown, opened)
    read = parse_tool_calls(whole, form)
    if whole != shown:
        read = dataclasses.replace(read, content=read.content.removeprefix(opened))
    if not has_response_template(tokenizer):
        return read
    own = text if action.text.startswith(text) else text.removeprefix(opened)
    said = spoken(whole_turn(opening + _marked(tokenizer, own, action), opened))
    prefix = str(tokenizer.decode(list(prompt_T))).removesuffix(opening) + THOUGHTS.get(opened, "")
    try:
        found = _by_template(tokenizer, said, prefix, schemas)
    except Exception as error:  # As above.
        problem = f"a tool call cannot be read: {one_line(str(error))[:200]}"
        return read if read.calls or not said else Parsed(read.content, (), (problem,))
    if not found.calls and not found.problems:
        return read
    return found


def _marked(tokenizer: Tokenizer, text: str, action: Action) -> str:
    """An action's text, which a stop text may have cut, with special tokens."""
    texts, tokens_T = AnswerTexts(tokenizer), action.tokens_T
    whole = texts.text(tokens_T)
    if text == whole:
        return str(tokenizer.decode(list(tokens_T)))
    if not whole.startswith(text):
        return text
    lengths = range(len(tokens_T) + 1)
    count = bisect.bisect(lengths, len(text), key=lambda i: len(texts.text(tokens_T[:i]))) - 1
    begun_T = list(tokens_T[:count])
    return str(tokenizer.decode(begun_T)) + text[len(texts.text(begun_T)) :]


def _by_template(
    tokenizer: Tokenizer, said: str, prefix: str, schemas: Sequence[Mapping[str, object]]
) -> Parsed:
    """What the response template finds: calls, checked as others are, and the text around them."""
    template = cast("Any", tokenizer).response_template
    fields = dict(template["fields"])
    if "join" not in fields.get("content", {"join": ""}):
        # By default only the last text is kept.
        fields["content"] = {**fields["content"], "repeats": True}
    found = cast(
        "Mapping[str, Any]",
        tokenizer.parse_response(
            said,
            schema={**template, "fields": fields},
            prefix=prefix,
            tools=[dict(each) for each in schemas],
        ),
    )
    bodies: list[str] = []
    for call in found.get("tool_calls") or ():
        called = call.get("function", call)
        arguments = called.get("arguments", called.get("parameters", {}))
        bodies.append(as_json({"name": called.get("name"), "arguments": arguments}))
    read = parse_tool_calls("".join(f"{OPEN}{body}{CLOSE}" for body in bodies), "hermes")
    content = Controls.of(tokenizer).pieces("".join(found.get("content") or ""))
    return Parsed("".join(list(content)[::2]).strip(), read.calls, read.problems)
