"""A mark from a language model behind an OpenAI-compatible HTTP server, as a reward.

The server gets one chat message, made of a template, the answer and the row, and answers with a
mark: the last number of its text.

    reward=judge reward.url=http://127.0.0.1:8000/v1 reward.model=my-judge

Without a mark in the end (`es_cookbook.rl.judge_server`) the score is lost, not 0. The exception
loses the rollout, whose reward is then NaN.

Pitfall: the time that the judge takes is the Env's, so `rollout_timeout` must allow for it. And a
policy learns to please its judge, not to be right: look at samples.
"""

import functools
import re
from collections.abc import Mapping

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.servers.chat import AskAgainError
from es_cookbook.rl.judge_server import JudgeServer
from es_cookbook.rl.rewards.answers import field_of
from es_cookbook.rl.rewards.base import Fields, Reward
from es_cookbook.rl.rewards.number import last_number

TEXT = "text"
"""Stands in a template for the model's answer; every other name for a field of the row."""
TEMPLATE = """\
Question:
{question}

Answer of a student:
{text}

How good is the answer? Reply with a number from 0 (worthless) to 10 (perfect), and nothing else."""


@chz.chz
class Judge(JudgeServer, Reward):
    """A language model's mark as a share of the best one."""

    template: str = chz.field(
        default=TEMPLATE, doc="the message; {text} is the answer, and {name} a field of the row"
    )
    best: float = chz.field(default=10.0, doc="the best mark, which gives 1; the worst is 0")

    @chz.validate
    def _valid(self) -> None:
        if f"{{{TEXT}}}" not in self.template:
            raise ConfigError("template must have {text}, where the model's answer goes")
        check_range(self, "best", above=0)

    @override
    def __call__(self, text: str, row: Fields) -> float:
        """Ask here and now, blocking; in an Env `grade` does not."""
        return anyio.run(self.grade, text, row)

    @override
    async def grade(self, text: str, row: Fields) -> float:
        """The mark's share of the best.

        Raises:
            EnvError: No mark after all attempts, or a refusal that another would not change.
        """
        message = filled_message(self.template, {TEXT: text}, row)
        mark = functools.partial(mark_in, best=self.best)
        return await self.reply(message, mark, "mark") / self.best

    @override
    def check(self) -> None:
        if not self.model:
            raise ConfigError("reward=judge needs a model: the name of one that the server has")

    @override
    def check_row(self, row: Fields) -> None:
        filled_message(self.template, {TEXT: ""}, row)


def filled_message(template: str, answers: Mapping[str, str], row: Fields) -> str:
    """The template with answers by name and fields of the row, in one pass: names in them stay.

    >>> filled_message("{question} {text}", {"text": "{question}"}, {"question": "6 * 7?"})
    '6 * 7? {question}'

    Raises:
        DataError: The row lacks a field.
    """

    def value(found: re.Match[str]) -> str:
        return answers[found[1]] if found[1] in answers else str(field_of(row, found[1]))

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)


def mark_in(said: str, best: float) -> float:
    """The mark in a judge's reply: the last number of its text.

    Raises:
        AskAgainError: There is none from 0 to `best`.
    """
    mark = last_number(said)
    if mark is None or not 0 <= mark <= best:
        raise AskAgainError(f"no mark from 0 to {best:g} in {said!r:.60}")
    return float(mark)
