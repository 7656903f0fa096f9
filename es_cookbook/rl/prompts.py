"""Prompts as tokens: plain text, or a chat by the tokenizer's own template.

A plain prompt needs no chat template, so what renders templates is imported where there is one.
"""

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.messages.encoder import Controls, framed, inside, plain
from es_cookbook.rl.messages.thoughts import opened_thought
from es_cookbook.rl.types import Observation, Tokenizer

if TYPE_CHECKING:
    from es_cookbook.rl.messages.message import Message
    from es_cookbook.rl.messages.tools import ToolSchema

logger = logging.getLogger(__name__)

_MOST_SHOWN = 8
"""Number of unknown characters that are named."""
PREFILL_DOC = "text after the chat template, with which every answer begins: '<think>'"


def render_prompt(
    tokenizer: Tokenizer,
    question: str | None,
    *,
    chat: bool,
    system: str = "",
    prefill: str = "",
    before: "Sequence[Message]" = (),
    tools: "Sequence[ToolSchema]" = (),
) -> tuple[int, ...]:
    """Return the prompt as tokens.

    With `chat` a chat up to the assistant's turn, by the tokenizer's own template, if it has one;
    else plain text, in which a blank line separates the system message from the question. The name
    of a control token in the question is text in a chat, and that token in plain text. That is said
    once a name, and what the tokenizer does not know once a character: the model cannot see it.

    Args:
        tokenizer: the model's own.
        question: the user's message; None: the chat ends with the last message of `before`.
        chat: use the template.
        system: message before the question; empty for none.
        prefill: text behind all that, with which the answer begins.
        before: messages of the chat before the question.
        tools: tools that the template shows.

    Raises:
        ModelError: The template cannot render the chat; says why.
        ConfigError: The template ends in the prefill itself, or there are messages and no template.
    """
    _tell_unknown(tokenizer, f"{system}{question or ''}{prefill}")
    is_chat = chat and tokenizer.chat_template is not None
    if (before or tools) and not is_chat:
        raise ConfigError("a chat of several messages needs chat=True and a model's chat template")
    said = "\n".join([*(message.content for message in before), question or ""])
    if (name := Controls.of(tokenizer).named_in(said)) is not None:
        _warn_of(tokenizer, name, is_chat)

    if is_chat:
        text = _chat(tokenizer, question, system, before, tools)
        if prefill.strip() and text.rstrip().endswith(prefill.rstrip()):
            raise ConfigError(
                f"prefill={prefill!r}: the model's chat template already ends in it; leave it out"
            )
        return framed(tokenizer, text + prefill)
    opening = f"{system}\n\n" if system else ""
    return plain(tokenizer, f"{opening}{question or ''}{prefill}")


def render_observation(
    tokenizer: Tokenizer, question: str, *, chat: bool, prefill: str = ""
) -> Observation:
    """Return the prompt of `render_prompt` as an observation.

    The observation names the thought that the prompt opens.
    """
    tokens_T = render_prompt(tokenizer, question, chat=chat, prefill=prefill)
    return Observation(tokens_T, opened=opened_thought(tokenizer, tokens_T, prefill))


def _chat(
    tokenizer: Tokenizer,
    question: str | None,
    system: str,
    before: "Sequence[Message]",
    tools: "Sequence[ToolSchema]",
) -> str:
    """Return the text of a chat up to the assistant's turn."""
    from es_cookbook.rl.messages.chat import Renderer
    from es_cookbook.rl.messages.message import Message, with_system
    from es_cookbook.rl.messages.template import ChatTemplate

    last = [] if question is None else [Message("user", question)]
    template = Renderer.best(tokenizer, tools) if tools else ChatTemplate.of(tokenizer)
    return template.text(with_system(system, [*before, *last]))


@functools.lru_cache(64)
def _warn_of(tokenizer: Tokenizer, name: str, is_chat: bool) -> None:
    """Warn, once per name, of a control token in a question, which may be a rendered chat."""
    logger.warning(
        "%r in a question belongs to the model's chat template, and is shown to the model as text; "
        "questions that have been put into the template before need chat=False"
        if is_chat
        else "%r in a question is read as that control token of the model",
        name,
    )


_characters: "weakref.WeakKeyDictionary[Tokenizer, set[str]]" = weakref.WeakKeyDictionary()
"""Characters that were checked with a tokenizer."""


def _tell_unknown(tokenizer: Tokenizer, text: str) -> None:
    asked = _characters.setdefault(tokenizer, set())
    new = set(text) - asked
    asked |= new
    unknown = [character for character in sorted(new) if not _is_known(tokenizer, character)]
    if unknown:  # Alone; a tokenizer of words may know them inside of words.
        seen = set(str(tokenizer.decode(list(inside(tokenizer, text)))))
        unknown = [character for character in unknown if character not in seen]
    if unknown:
        shown = ", ".join(map(repr, unknown[:_MOST_SHOWN]))
        more = f" and {len(unknown) - _MOST_SHOWN} more" if len(unknown) > _MOST_SHOWN else ""
        logger.warning(
            "the model's tokenizer does not know %s%s: the model does not see them in %.60r",
            *(shown, more, text),
        )


def _is_known(tokenizer: Tokenizer, character: str) -> bool:
    tokens_T = inside(tokenizer, character)
    return character.isspace() or (bool(tokens_T) and tokens_T != (tokenizer.unk_token_id,))
