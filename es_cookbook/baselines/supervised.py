"""Rows for supervised training: prompts with completions, or whole chats, as token sequences.

What the model should write has a loss, and nothing else: a completion and the end of sequence, or
the assistant's turns of a chat and the token that ends each. Tokens are put together as in a
rollout, prompt and answer encoded apart and chats turn by turn (`rl.messages.renderer`), so that
the model learns in the form in which it will be asked.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError, ModelError
from es_cookbook.common.fields.parts import parts
from es_cookbook.rl.data.rows import Row, check_source, load_rows
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.renderer import Renderer
from es_cookbook.rl.sequences import Example
from es_cookbook.rl.types import Action, Tokenizer

ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisedData:
    """What a builder builds: sequences to learn, and held-out ones whose loss is measured."""

    train: Sequence[Example]
    test: Sequence[Example] = ()


@chz.chz
class SupervisedDatasetBuilder(ABC):
    """Builds sequences to learn."""

    def check(self) -> None:
        """Refuse, before a model is loaded, sources that are not there; by default nothing.

        Raises:
            DataError: Which one, and why.
        """
        return

    @abstractmethod
    def __call__(self, tokenizer: Tokenizer) -> SupervisedData:
        """Load and encode.

        Raises:
            DataError: A row that cannot be used; names the file and the line.
            ModelError: The tokenizer cannot do what the rows need.
        """


parts(SupervisedDatasetBuilder, f"{__name__}:SupervisedRows")


@chz.chz
class SupervisedRows(SupervisedDatasetBuilder):
    """Rows of a file or a Hub set: `prompt` and `completion`, or a chat in `messages`."""

    source: str = chz.field(
        doc=".jsonl or .parquet file, or Hub set, of prompt and completion or of messages"
    )
    chat: bool = chz.field(
        default=False,
        doc="put a prompt into the model's chat template; else it is used unchanged, and must have "
        "the form in which the model will see it later",
    )
    system: str = chz.field(default="", doc="system message of chats that have none")
    keep_history: bool = chz.field(
        default=False, doc="accept a chat template that rewrites earlier turns; all stay as written"
    )
    num_test: int = chz.field(default=0, doc="last rows, held out: their loss is measured")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_test", at_least=0)

    def check(self) -> None:
        """Refuse a source that is not there."""
        check_source(self.source, "dataset.source")

    def __call__(self, tokenizer: Tokenizer) -> SupervisedData:
        """Every row as a sequence, in order."""
        encoder = _Encoder(tokenizer, self)
        examples = [encoder.example(row) for row in load_rows(self.source, option="dataset.source")]
        if len(examples) <= self.num_test:
            raise DataError(
                f"{self.source}: there are {len(examples)} rows and dataset.num_test is "
                f"{self.num_test}, so none is left to learn from"
            )
        split = len(examples) - self.num_test
        return SupervisedData(examples[:split], examples[split:])


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
        self._renderer: Renderer | None = None

    def example(self, row: Row) -> Example:
        if row.fields.get("messages") is not None:
            return self._of_chat(_messages(row), row)
        prompt, completion = row.text("prompt"), row.text("completion")
        if self._how.chat:
            return self._of_chat([Message("user", prompt), Message("assistant", completion)], row)
        prompt_T = self._tokenizer.encode(prompt)
        completion_T = [*self._tokenizer.encode(completion, add_special_tokens=False), self._eos]
        return joined([(prompt_T, False), (completion_T, True)])

    def _of_chat(self, messages: Sequence[Message], row: Row) -> Example:
        if self._renderer is None:
            self._renderer = Renderer(self._tokenizer, keep_history=self._how.keep_history)
        renderer, parts = self._renderer, list[tuple[Sequence[int], bool]]()
        if self._how.system and messages[0].role != "system":
            messages = [Message("system", self._how.system), *messages]
        turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not turns or turns[0] == 0 or any(b - a == 1 for a, b in pairwise(turns)):
            raise row.error(
                "messages must begin with somebody else than the assistant, who must speak at "
                "least once and never twice in a row"
            )
        parts.append((renderer.prompt(messages[: turns[0]]), False))
        end = self._eos if renderer.end_of_turn is None else renderer.end_of_turn
        for turn, after in zip(turns, [*turns[1:], None], strict=True):
            text = messages[turn].content
            said = (*self._tokenizer.encode(text, add_special_tokens=False), end)
            parts.append((said, True))
            if after is not None:
                between = renderer.added(Action(said, text, "stop"), messages[turn + 1 : after])
                parts.append((between, False))
        return joined(parts)


def joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Example:
    """One sequence of parts that are learned or not.

    >>> found = joined([((5, 6), False), ((7,), True)])
    >>> found.tokens_T, found.learned_T
    ((5, 6, 7), (False, False, True))
    """
    return Example(
        tuple(token for tokens_T, _ in parts for token in tokens_T),
        tuple(learned for tokens_T, learned in parts for _ in tokens_T),
    )


def _messages(row: Row) -> list[Message]:
    found = row.value("messages")
    messages: list[Message] = []
    for i, each in enumerate(cast("list[object]", found) if isinstance(found, list) else []):
        plain = cast("dict[str, object]", each) if isinstance(each, dict) else {}
        role, content = plain.get("role"), plain.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise row.error(
                f"messages[{i}] must have a role ({', '.join(ROLES)}) and a text as content, found "
                f"{repr(each)[:80]}"
            )
        messages.append(Message(role, content))
    if not messages:
        raise row.error(f"field 'messages' must be a list of messages, found {repr(found)[:80]}")
    return messages
