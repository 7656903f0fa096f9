"""Rows for supervised training, as token sequences.

Only what the model should write has a loss: a completion and the end of sequence, or the
assistant's turns of a chat and the token that ends each. Tokens are put together as in a rollout:
prompt and answer are encoded separately and chats turn by turn (`rl.messages.chat`), so that
the model learns the form in which it will be prompted.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias, cast

import chz

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError, ModelError
from es_cookbook.common.terminal import plural
from es_cookbook.rl.data.rows import Row, SkippedRows, messages_of, tools_of
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.rl.messages.chat import Renderer
from es_cookbook.rl.messages.encoder import Controls, inside, plain
from es_cookbook.rl.messages.message import Message, with_system
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.types import ON_BAD_ROW_DOC, SOURCE_DOC, Action, OnBadRow, Tokenizer

Split: TypeAlias = tuple[Sequence[Example], Sequence[Example]]
"""Sequences to learn, and held-out ones whose loss is measured."""


@chz.chz
class SupervisedRows:
    """Rows of a file or a Hub set: `prompt` and `completion`, or a chat in `messages`."""

    source: str = chz.field(doc=f"{SOURCE_DOC}; of prompt and completion or of messages")
    chat: bool = chz.field(
        default=False, doc="apply the model's chat template to prompts; else they are unchanged"
    )
    system: str = chz.field(default="", doc="system message for chats without one")
    num_test: int = chz.field(default=0, doc="number of last rows held out, whose loss is measured")
    on_bad_row: OnBadRow = chz.field(default="refuse", doc=ON_BAD_ROW_DOC)

    _num_test = in_range("num_test", at_least=0)

    def check(self) -> None:
        """Check, before a model is loaded, that the source exists.

        Raises:
            DataError: It does not.
        """
        load_rows(self.source, option="dataset.source")

    def __call__(self, tokenizer: Tokenizer) -> Split:
        """Turn every row into a sequence, in order.

        Raises:
            DataError: A row cannot be used; names the file and the line.
            ModelError: The tokenizer cannot encode the rows.
        """
        encoder, skipped = _Encoder(tokenizer, self), SkippedRows(self.source, self.on_bad_row)
        rows = list(load_rows(self.source, option="dataset.source"))
        made = (
            skipped.unless_bad(row.where, functools.partial(encoder.example, row)) for row in rows
        )
        examples = [each for each in made if each is not None]
        if len(examples) <= self.num_test:
            raise DataError(
                f"{self.source}: {plural(len(examples), 'row')} can be used and dataset.num_test "
                f"is {self.num_test}, so none is left to learn from"
            )
        skipped.say(len(rows), "row", len(examples))
        split = len(examples) - self.num_test
        return examples[:split], examples[split:]


class _Encoder:
    def __init__(self, tokenizer: Tokenizer, how: SupervisedRows) -> None:
        eos = cast("int | None", tokenizer.eos_token_id)
        if eos is None:
            raise ModelError(
                "the model's tokenizer has no end-of-sequence token, so no row could teach the "
                "model to stop; set its eos_token"
            )
        self._tokenizer = tokenizer
        self._how = how
        self._eos = eos

    def example(self, row: Row) -> Example:
        if row.fields.get("messages") is not None:
            return self._of_chat(messages_of(row), row)
        prompt, completion = row.text("prompt"), row.text("completion")
        if self._how.chat:
            chat = [Message("user", prompt), Message("assistant", completion)]
            return self._of_chat(chat, row)
        prompt_T = plain(self._tokenizer, prompt)
        said = inside(self._tokenizer, completion)
        said = said if said[-1:] == (self._eos,) else (*said, self._eos)
        self._check_one_end(said, None, row)
        return joined([(prompt_T, False), (said, True)])

    def _of_chat(self, messages: Sequence[Message], row: Row) -> Example:
        renderer = Renderer.best(self._tokenizer, tools_of(row))
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns or turns[0] == 0 or any(b - a == 1 for a, b in pairwise(turns)):
            raise row.error(
                "messages must not begin with the assistant, who must speak at least once and "
                "never twice in a row"
            )
        if turns[-1] + 1 < len(messages):
            raise row.error("messages must end with the assistant's: nothing after it is learned")
        for turn in turns:
            if not messages[turn].content.strip() and not messages[turn].tool_calls:
                raise row.error(f"messages[{turn}] of the assistant says nothing")
        with row.named_in(ModelError):
            return self._in_turns(renderer, messages, turns, row)

    def _in_turns(
        self, renderer: Renderer, messages: Sequence[Message], turns: Sequence[int], row: Row
    ) -> Example:
        opening = with_system(self._how.system, messages[: turns[0]])
        parts: list[tuple[Sequence[int], bool]] = [(renderer.prompt(opening), False)]
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            said = self._said(renderer, messages[turn], row)
            parts.append((said, True))
            if after is not None:
                action = Action(said, messages[turn].content, "stop")
                parts.append((renderer.added(action, messages[turn + 1 : after]), False))
        return joined(parts)

    def _said(self, renderer: Renderer, message: Message, row: Row) -> tuple[int, ...]:
        """Return the assistant's turn and its end."""
        said = renderer.turn(message)
        if said[-1] not in Controls.of(self._tokenizer).ids:
            said = (*said, self._eos)
        self._check_one_end(said, renderer.end_of_turn, row)
        return said

    def _check_one_end(self, said: Sequence[int], end: int | None, row: Row) -> None:
        """Refuse tokens that end a turn, except at the end."""
        body = list(said)
        while body and body[-1] in Controls.of(self._tokenizer).ids:
            body.pop()
        ends = [token for token in said if token in (self._eos, end)]
        inner = [token for token in ends if token in body or ends.count(token) > 1]
        if inner:
            name = self._tokenizer.decode(inner[:1])
            raise row.error(f"an answer has the end of a turn in it, {name!r}: take it out")


def joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Example:
    """Join parts that are learned or not into one sequence.

    >>> found = joined([((5, 6), False), ((7,), True)])
    >>> found.tokens_T, found.learned_T
    ((5, 6, 7), (False, False, True))
    """
    return Example(
        tuple(token for tokens_T, _ in parts for token in tokens_T),
        tuple(learned for tokens_T, learned in parts for _ in tokens_T),
    )
