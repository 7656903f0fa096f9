"""A task that is a prompt and a score: rows, a template, and a function. No class is needed.

    def score(text, row):
        return float(text.strip() == row["answer"])

    Task(source="rows.jsonl", prompt="{question}", reward=score)

The function gets the answer's text and the row, and returns a number, or a number and metrics to
report beside it; it may be `async`. It runs on the event loop, once per rollout: what takes longer
than microseconds awaits `es_cookbook.rl.grading.workers.in_worker`. In its place may stand one of
the shared rewards (`es_cookbook.rl.rewards`): `Task(..., reward=Number())`.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook.common.configs import Names
from es_cookbook.common.errors import DataError, EnvError
from es_cookbook.rl.data.row_dataset import RowDatasetBuilder
from es_cookbook.rl.data.rows import Row, check_template, filled
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, render_prompt
from es_cookbook.rl.rewards.base import (
    REWARD_NAMES,
    Reward,
    RewardFunction,
    check_arity,
    graded,
    name_of,
)
from es_cookbook.rl.types import Observation, Tokenizer

REWARDS = Names(REWARD_NAMES, default=None, functions=True)


@chz.chz
class Task(RowDatasetBuilder):
    """Rows that are asked by a template and scored by a function."""

    prompt: str = chz.field(
        default="{question}", doc="what the model is asked: text with fields of the row in braces"
    )
    reward: Reward | RewardFunction = chz.field(
        meta_factory=REWARDS,
        doc="scores an answer: a shared reward, or my_module:function or "
        "path/to/script.py:function, which gets the text and the row",
    )
    system: str = chz.field(default="", doc="system message before the prompt; empty: none")
    chat: bool = chz.field(
        default=True, doc="put the prompt into the tokenizer's chat template, if it has one"
    )
    gold: str | None = chz.field(
        default=None,
        doc="a row's perfect answer, as a template like prompt; its `answer`, if it has one, if "
        "unset",
    )
    full_reward: float | None = chz.field(
        default=1.0,
        doc="what a row's perfect answer must earn, where it has one; None: it is not scored",
    )
    tag: str | None = chz.field(
        default=None, doc="field of the row under whose values metrics are reported as well"
    )

    @chz.validate
    def _template(self) -> None:
        check_template(self.prompt)
        check_template(self.gold or "", "gold")
        check_arity(self.reward)

    @property
    @override
    def label(self) -> str:
        return Path(self.source).stem

    @override
    def check(self) -> None:
        super().check()
        if isinstance(self.reward, Reward):
            self.reward.check()

    @override
    def key(self, row: Row) -> str:
        return filled(self.prompt, row) if self.split_by is None else super().key(row)

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        tokens_T = render_prompt(
            tokenizer, filled(self.prompt, row), chat=self.chat, system=self.system
        )
        if isinstance(self.reward, Reward):
            try:
                self.reward.check_row(row.fields)
            except DataError as error:
                raise row.error(str(error)) from error
        answer = row.fields.get("answer") if self.gold is None else filled(self.gold, row)
        checked = self.full_reward is not None and isinstance(answer, str | int | float)
        return ProblemGroupBuilder(
            self.env_maker(Observation(tokens_T), row),
            row.where,
            gold=str(answer) if checked else None,
            problem_tags=(str(row.value(self.tag)),) if self.tag else (),
        )

    def env_maker(self, observation: Observation, row: Row) -> Callable[[], ProblemEnv]:
        """Makes an Env of a row; importable, so that the problem pickles."""
        return functools.partial(TaskEnv, observation, self.reward, row, self.full_reward)


class TaskEnv(ProblemEnv):
    """One row: its prompt, and what scores the answer."""

    def __init__(
        self,
        observation: Observation,
        reward: RewardFunction,
        row: Row,
        full_reward: float | None,
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
    def grade(self, text: str) -> Grade:
        raise EnvError(f"{self._row.where}: a reward may wait, so `graded` is what to await")

    @override
    async def graded(self, text: str) -> Grade:
        return await graded(self._reward, text, self._row.fields, self._row.where)
