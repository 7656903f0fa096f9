"""A task whose answers are compared: rows, a template, a judge and a tournament.

    JudgedTask(source="questions.jsonl", prompt="{question}", judge=BaseJudge())

The reward of an answer is its win rate in the group (`es_cookbook.rl.judging.comparison`). A reward
function is measured beside it, as `task_reward` and by its own metrics, and counts with
`task_weight`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import chz
from typing_extensions import override

from es_cookbook.common.configs import Names
from es_cookbook.common.errors import DataError
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import REWARDS, Task, TaskEnv
from es_cookbook.rl.judging.comparison import Comparison
from es_cookbook.rl.judging.judges import JUDGE_NAMES, PairJudge
from es_cookbook.rl.judging.tournament import Tournament
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.rewards.base import Fields, Reward, RewardFunction
from es_cookbook.rl.types import (
    Action,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    StepResult,
    Tokenizer,
    Trajectory,
)

_JUDGES = Names(JUDGE_NAMES, default="base")


def unscored(text: str, row: Fields) -> float:
    """No reward of its own."""
    return 0.0


@chz.chz
class JudgedTask(Task):
    """Rows that are asked by a template; answers are compared with each other by a judge."""

    reward: Reward | RewardFunction = chz.field(
        default=unscored,
        meta_factory=REWARDS,
        doc="measured beside the win rate: a shared reward or a function, as for a task",
    )
    full_reward: float | None = chz.field(
        default=None, doc="what a row's own `answer` must earn by `reward`; None: it is not scored"
    )
    task_weight: float = chz.field(
        default=0.0, doc="of `reward`, added to the win rate; 0: it is only measured"
    )
    judge: PairJudge = chz.field(
        meta_factory=_JUDGES, default_factory=_JUDGES.build_default, doc="compares two answers"
    )
    tournament: Tournament = chz.field(
        default_factory=Tournament,
        blueprint_unspecified=Tournament,
        doc="which answers are compared",
    )

    @override
    def check(self) -> None:
        super().check()
        self.judge.check()

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        try:
            self.judge.message(row.fields, "", "")
        except DataError as error:
            raise row.error(str(error)) from error
        made = super().problem(row, tokenizer)
        return JudgedProblem(
            made.make_env,
            made.name,
            made.gold,
            made.problem_tags,
            comparison=Comparison(row.fields, self.judge, self.tournament, tokenizer, self.seed),
        )

    @override
    def env_maker(self, observation: Observation, row: Row) -> Callable[[], ProblemEnv]:
        given = observation, self.reward, row, self.full_reward
        return functools.partial(JudgedEnv, self.task_weight, *given)


class JudgedEnv(TaskEnv):
    """One answer, whose own reward counts with a weight: the win rate is the group's."""

    def __init__(
        self,
        weight: float,
        observation: Observation,
        reward: RewardFunction,
        row: Row,
        full_reward: float | None,
    ) -> None:
        super().__init__(observation, reward, row, full_reward)
        self._weight = weight

    @override
    async def step(self, action: Action) -> StepResult:
        """Adds the metric `task_reward`."""
        result = await super().step(action)
        metrics = {**result.metrics, "task_reward": result.reward}
        return dataclasses.replace(result, reward=self._weight * result.reward, metrics=metrics)


@dataclasses.dataclass(frozen=True, slots=True)
class JudgedProblem(ProblemGroupBuilder):
    """One row, whose answers are compared."""

    comparison: Comparison = dataclasses.field(kw_only=True)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout]:
        return await self.comparison.rewards(trajectories, policies)
