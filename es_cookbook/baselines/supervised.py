"""Supervised training: its options, and rows as token sequences.

What the model should write has a loss, and nothing else: a completion and the end of sequence, or
the assistant's turns of a chat and the token that ends each. Tokens are put together as in a
rollout, prompt and answer encoded apart and chats turn by turn (`rl.messages.renderer`), so that
the model learns in the form in which it will be asked.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias, cast

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, DataError, ModelError
from es_cookbook.common.schedules import Schedule, schedule_field
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.population.config import ENGINES
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.sources import SOURCE_DOC, check_source, load_rows
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.renderer import Renderer
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.types import Action, RLDatasetBuilder, SamplingParams, Tokenizer
from es_cookbook.runs.hub.background_push import CheckpointPush
from es_cookbook.runs.tracking.base import TrackerBuilder
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder

ROLES = ("system", "user", "assistant")


Split: TypeAlias = tuple[Sequence[Example], Sequence[Example]]
"""Sequences to learn, and held-out ones whose loss is measured."""


@chz.chz
class SupervisedRows:
    """Rows of a file or a Hub set: `prompt` and `completion`, or a chat in `messages`."""

    source: str = chz.field(doc=f"{SOURCE_DOC}; of prompt and completion or of messages")
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
        """Refuse, before a model is loaded, a source that is not there.

        Raises:
            DataError: Why.
        """
        check_source(self.source, "dataset.source")

    def __call__(self, tokenizer: Tokenizer) -> Split:
        """Every row as a sequence, in order.

        Raises:
            DataError: A row that cannot be used; names the file and the line.
            ModelError: The tokenizer cannot do what the rows need.
        """
        encoder = _Encoder(tokenizer, self)
        examples = [encoder.example(row) for row in load_rows(self.source, option="dataset.source")]
        if len(examples) <= self.num_test:
            raise DataError(
                f"{self.source}: there are {len(examples)} rows and dataset.num_test is "
                f"{self.num_test}, so none is left to learn from"
            )
        split = len(examples) - self.num_test
        return examples[:split], examples[split:]


_ROWS = Names({"rows": "es_cookbook.baselines.supervised:SupervisedRows"}, default="rows")
_PROBLEMS = Names({"rows": "es_cookbook.rl.data.task:Task"}, default=None)


_TRACKERS = functools.partial(StandardTrackersBuilder, live=None)


@chz.chz
class Evaluation:
    """Problems on which the model is measured while it learns."""

    dataset: RLDatasetBuilder = chz.field(
        meta_factory=_PROBLEMS, doc="of which the held-out problems are attempted"
    )
    sampling: SamplingParams = chz.field(default_factory=SamplingParams, doc="how tokens are drawn")
    engine: EngineBuilder = ENGINES.field("what samples")
    every: int = chz.field(default=0, doc="steps between; 0: before and after only")
    attempts: int = chz.field(default=1, doc="at each problem; several also measure test/pass@k")
    temperature: float = chz.field(default=0.0, doc="of the attempts; 0 is greedy")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "every", at_least=0, prefix="evaluation.")
        check_evaluation(self.attempts, self.temperature, "evaluation.")


@chz.chz
class SFTConfig:
    """Fine-tune a LoRA adapter, or all weights, on rows that say what the model should write."""

    model_name: str = chz.field(doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)")
    dataset: SupervisedRows = chz.field(meta_factory=_ROWS, doc="rows to learn from")
    output: str = chz.field(doc="directory to write the adapter or model to; it must not exist")
    rank: int = chz.field(default=8, doc="of the LoRA adapter; 0 trains all weights instead")
    alpha: int = chz.field(default=16, doc="the adapter is scaled by alpha / rank")
    targets: tuple[str, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), doc="last names of the adapted layers"
    )
    learning_rate: float = chz.field(default=2e-4, doc="of AdamW")
    learning_rate_schedule: Schedule = schedule_field(
        "factor on learning_rate over the steps", default="linear"
    )
    max_gradient_norm: float = chz.field(default=1.0, doc="longer gradients are cut to this length")
    batch_size: int = chz.field(default=32, doc="rows per step")
    epochs: float = chz.field(default=1.0, doc="passes over the rows")
    max_length: int = chz.field(default=1024, doc="tokens of a row; longer rows are truncated")
    packing: bool = chz.field(
        default=False, doc="several rows in one sequence of max_length, where none sees another"
    )
    tokens_per_pass: int | None = chz.field(
        default=None,
        doc="most tokens, padding included, of one backward pass; by the memory there is if unset",
    )
    log_every: int = chz.field(default=10, doc="steps between lines of metrics")
    checkpoint_every: int = chz.field(default=100, doc="steps between checkpoints; 0: none")
    trackers: TrackerBuilder = chz.field(
        default_factory=_TRACKERS,
        blueprint_unspecified=_TRACKERS,
        doc="where metrics go, beside the terminal",
    )
    hub: CheckpointPush | None = chz.field(
        default=None,
        doc="pushes checkpoints and the result to the Hugging Face Hub: hub.repo_id=...",
    )
    evaluation: Evaluation | None = chz.field(
        default=None, doc="problems on which the model is measured: evaluation.dataset=..."
    )
    seed: int = chz.field(default=0, doc="of the adapter's first factors and the order of the rows")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "alpha", "batch_size", "tokens_per_pass", "log_every", at_least=1)
        check_range(self, "max_length", at_least=2)
        check_range(self, "rank", "checkpoint_every", at_least=0)
        check_range(self, "learning_rate", "epochs", "max_gradient_norm", above=0)
        if self.rank and self.hub and self.hub.evaluate:
            raise ConfigError(
                "hub.evaluate measures whole models, and rank above 0 pushes adapters: give "
                "rank=0, or evaluation.dataset=..., which measures them while they learn"
            )
        if self.rank and not self.targets:
            raise ConfigError("targets must name a layer, for example targets=q_proj,v_proj")


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
