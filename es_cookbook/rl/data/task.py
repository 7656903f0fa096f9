"""A task that is a prompt and a score: rows, a template, and a function. No class is needed.

    def score(text, row):
        return float(text.strip() == row["answer"])

    Task(source="rows.jsonl", prompt="{question}", reward=score)

The function gets the answer's text and the row, and returns a number, or a number and metrics to
report beside it; it may be `async`. It runs on the event loop, once per rollout: what takes longer
than microseconds awaits `es_cookbook.rl.grading.workers.in_worker`. In its place may stand one of
the shared rewards (`es_cookbook.rl.rewards`): `Task(..., reward=Number())`.

Where a row becomes a problem in another way, subclass `RowDatasetBuilder` and say how. The rest is
there: loading from a file or the Hub, holding rows out, batches in an order that follows from the
seed, and the checks before the first generation. Fields that a subclass adds are options beside its
own: `dataset.seed=8`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal, cast

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError, ModelError
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import one_line, plural
from es_cookbook.rl.data.row_dataset import RowDatasetBuilder
from es_cookbook.rl.data.rows import (
    Chat,
    Row,
    chat_of,
    check_template,
    fields_of,
    filled,
    with_choices,
    without_tags,
)
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.thoughts import opened_thought, prompt_end
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.problem_env import NEWLINE, Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.prompts import PREFILL_DOC, render_prompt
from es_cookbook.rl.rewards.base import (
    REWARD_NAMES,
    Reward,
    RewardFunction,
    check_arity,
    graded,
    name_of,
)
from es_cookbook.rl.rewards.values import Scalar, printed
from es_cookbook.rl.types import Observation, Tokenizer

REWARDS = Names(REWARD_NAMES, default=None, functions=True)


@chz.chz
class ScoredRows(RowDatasetBuilder):
    """Dataset of rows with a prompt template and a reward function."""

    prompt: str = chz.field(
        default="{question}", doc="what the model is asked: text with fields of the row in braces"
    )
    reward: Reward | RewardFunction = chz.field(
        meta_factory=REWARDS,
        doc="scores an answer: a shared reward, or my_module:function or "
        "path/to/script.py:function, which gets the text and the row",
    )
    gold: str | None = chz.field(
        default=None,
        doc="a row's perfect answer, as a template like prompt; unset: its `answer`, the shortest "
        "of a list",
    )
    full_reward: float | None = chz.field(
        default=1.0,
        doc="what a row's perfect answer must earn, where it has one; None: it is not scored",
    )

    @chz.validate
    def _template(self) -> None:
        check_template(self.prompt)
        check_template(self.gold or "", "gold")
        check_arity(self.reward)

    @property
    @override
    def prompt_fields(self) -> Sequence[str]:
        return fields_of(self.prompt)

    @override
    def check_fields(self, row: Row) -> None:
        try:
            filled(self.prompt, row)
        except DataError as error:
            raise DataError(f"{error} (dataset.prompt={one_line(self.prompt):.60})") from None
        check_row(self.reward, row)
        self.gold_of(row)

    def gold_of(self, row: Row, full_reward: float | None = 1.0) -> str | None:
        """Return a row's perfect answer; None if it has none, or without a `full_reward`.

        Of a list of answers, any of which a shared reward accepts, it is the shortest.
        """
        answer = row.fields.get("answer") if self.gold is None else filled(self.gold, row)
        is_any_of = isinstance(answer, list) and isinstance(self.reward, Reward)
        answers = cast("list[object]", answer) if is_any_of else [answer]
        if full_reward is None or not all(isinstance(each, Scalar) for each in answers):
            return None
        return min(map(printed, answers), key=len, default=None)

    @override
    def check(self) -> None:
        if isinstance(self.reward, Reward):
            self.reward.check()
        super().check()


@chz.chz
class Task(ScoredRows):
    """Dataset of rows with a prompt template and a reward function."""

    prompt: str = chz.field(
        default="{question}",
        doc="what the model is asked: text with fields of the row in braces; a list of texts is "
        "shown as choices by letter, and a list of messages alone, as in {messages}, is a chat",
    )
    system: str = chz.field(default="", doc="system message before the prompt; empty: none")
    chat: bool = chz.field(default=True, doc="put the prompt into the chat template, if any")
    prefill: str = chz.field(default="", doc=PREFILL_DOC)
    examples: int = chz.field(
        default=0,
        doc="training rows that a prompt shows with their perfect answers before its question, as "
        "a base model needs it; never the row itself or a held-out one",
    )
    stray_tags: Literal["keep", "strip"] = chz.field(
        default="keep",
        doc="what to do with <think> and <answer> tags in the fields that the prompt shows",
    )
    tag: str | None = chz.field(
        default=None, doc="field of the row under whose values metrics are reported as well"
    )

    @override
    def check_fields(self, row: Row) -> None:
        super().check_fields(self._answered(row, chat_of(self.prompt, row)))
        if self.tag:
            row.printed(self.tag)

    _examples = in_range("examples", at_least=0)

    @override
    def shown(self, train: Sequence[Row]) -> Sequence[Row]:
        if not self.examples:
            return ()
        # One more than asked for, since no row shows itself.
        with_gold = (row for row in train if self.gold_of(row) is not None)
        rows = list(islice(with_gold, self.examples + 1))
        if len(rows) <= self.examples:
            raise DataError(
                f"dataset.examples={self.examples}: {self.source} has "
                f"{plural(len(rows), 'training row')} with a perfect answer, and one more is "
                "needed than are shown; dataset.gold says what a perfect answer is"
            )
        return rows

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        asked = self._shown(row)
        before: Sequence[Message] = ()
        tools: Sequence[ToolSchema] = ()
        question: str | None = None
        if (chat := chat_of(self.prompt, asked)) is None:
            question = filled(self.prompt, with_choices(asked))
        else:
            before, tools = chat.messages, chat.tools
            if before[-1].role == "user":
                before, question = before[:-1], before[-1].content
        others = row.shown[: self.examples]
        if others and chat is not None:
            raise row.error("dataset.examples goes with a prompt of text, not with a whole chat")
        if others and self._is_chat(tokenizer):
            before = [message for each in others for message in self._turns(each)]
        elif others:
            question = "".join([*map(self._example, others), question or ""])
        row = self._answered(row, chat)
        with row.named_in(ModelError):
            tokens_T = render_prompt(
                tokenizer,
                question,
                chat=self.chat,
                system=self.system,
                prefill=self.prefill,
                before=before,
                tools=tools,
            )
        check_row(self.reward, row)
        opened = opened_thought(tokenizer, tokens_T, self.prefill)
        reward = self.reward
        if isinstance(reward, Reward):
            reward = reward.after(opened or prompt_end(tokenizer, tokens_T))
        gold = self.gold_of(row, self.full_reward)
        stop = () if self._is_chat(tokenizer) else self._stop(others, gold)
        return ProblemGroupBuilder(
            self.env_maker(Observation(tokens_T, usual_stop=stop, opened=opened), reward, row),
            row.where,
            gold=gold,
            problem_tags=(row.printed(self.tag),) if self.tag else (),
        )

    def _stop(self, examples: Sequence[Row], gold: str | None) -> tuple[str, ...]:
        """Return a newline if a plain prompt has examples and all perfect answers have one line."""
        answers = [gold, *map(self.gold_of, examples)]
        are_lines = all(answer is not None and "\n" not in answer.strip() for answer in answers)
        return NEWLINE if examples and are_lines else ()

    def env_maker(
        self, observation: Observation, reward: RewardFunction, row: Row
    ) -> Callable[[], ProblemEnv]:
        """Return a function that makes an Env of a row; importable, so that the problem pickles."""
        return functools.partial(TaskEnv, observation, reward, row, self.full_reward)

    @staticmethod
    def _answered(row: Row, chat: Chat | None) -> Row:
        """Return the row with the answer that ends a chat in it, if there is one."""
        return row if chat is None else Row(row.where, {**chat.answer, **row.fields})

    def _is_chat(self, tokenizer: Tokenizer) -> bool:
        return self.chat and tokenizer.chat_template is not None

    def _example(self, row: Row) -> str:
        """Return a row and its perfect answer as text."""
        asked, answered = (message.content for message in self._turns(row))
        between = "" if asked[-1:].isspace() or self.prefill else " "
        return f"{asked}{between}{answered}\n\n"

    def _turns(self, row: Row) -> Sequence[Message]:
        """Return a row and its perfect answer as messages."""
        question = filled(self.prompt, with_choices(self._shown(row)))
        answer = f"{self.prefill}{self.gold_of(row)}"
        return Message("user", question), Message("assistant", answer)

    def _shown(self, row: Row) -> Row:
        """Return the row as the prompt shows it."""
        if self.stray_tags == "keep":
            return row
        named = set(fields_of(self.prompt)) & row.fields.keys()
        tagless = {name: without_tags(row.fields[name]) for name in named}
        return dataclasses.replace(row, fields={**row.fields, **tagless})


def check_row(reward: object, row: Row) -> None:
    """Refuse a row that lacks what a shared reward needs; functions are not checked.

    Raises:
        DataError: Names the row, and what is missing or wrong.
    """
    if isinstance(reward, Reward):
        with row.named_in(DataError):
            reward.check_row(row.fields)


class TaskEnv(ProblemEnv):
    """One row: its prompt, and what scores the answer."""

    def __init__(
        self, observation: Observation, reward: RewardFunction, row: Row, full_reward: float | None
    ) -> None:
        super().__init__(observation)
        self._reward, self._row = reward, row
        if full_reward is not None:
            self.full_reward = full_reward
        self.gold_hint = (
            f" by reward {name_of(reward)!r}; if a perfect answer reads otherwise, say how, as in "
            'dataset.gold="\\\\boxed{{{answer}}}", and if there is none, dataset.full_reward=None'
        )

    @override
    async def graded(self, text: str) -> Grade:
        return await graded(self._reward, text, self._row.fields, self._row.where)
