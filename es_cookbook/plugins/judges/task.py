"""A task whose answers are compared: rows, a template, a judge and a tournament.

    JudgedTask(source="questions.jsonl", prompt="{question}", judge=BaseJudge())

The reward of an answer is its win rate in the group (`Comparison`, which other `EnvGroupBuilder`s
may use too). A reward function is measured beside it, as `task_reward` and by its own metrics, and
counts with `task_weight`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import chz
from typing_extensions import override

from es_cookbook import Observation, ProblemEnv, StepResult, Task
from es_cookbook.common.errors import DataError
from es_cookbook.common.names import Names
from es_cookbook.common.seeds import derive_seed
from es_cookbook.plugins.judges.judges import JUDGE_NAMES, PairJudge
from es_cookbook.plugins.judges.tournament import Tournament
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import REWARDS, TaskEnv
from es_cookbook.rl.messages.thoughts import whole_turn
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.base import Fields, Reward, RewardFunction
from es_cookbook.rl.types import Action, GroupReward, LostRollout, Policy, Tokenizer, Trajectory


def unscored(text: str, row: Fields) -> float:
    return 0.0


@chz.chz
class JudgedTask(Task):
    """Rows asked by a template, whose answers a judge compares with each other."""

    reward: Reward | RewardFunction = chz.field(
        default=unscored,
        meta_factory=REWARDS,
        doc="measured beside the win rate: a shared reward or a function",
    )
    full_reward: float | None = chz.field(
        default=None, doc="reward that a row's own `answer` must earn; None: it is not scored"
    )
    task_weight: float = chz.field(
        default=0.0, doc="weight of `reward` in the sum with the win rate; 0: it is only measured"
    )
    judge: PairJudge = Names(JUDGE_NAMES, default="base").field("compares two answers")
    tournament: Tournament = chz.field(
        default_factory=Tournament,
        blueprint_unspecified=Tournament,
        doc="which answers are compared",
    )

    @override
    def check(self) -> None:
        self.judge.check()
        super().check()

    @override
    def check_fields(self, row: Row) -> None:
        with row.named_in(DataError):
            self.judge.message(row.fields, "", "")
        super().check_fields(row)

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        self.check_fields(row)
        asked = super().problem(row, tokenizer)
        comparison = Comparison(row.fields, self.judge, self.tournament, tokenizer, self.seed)
        own = {each.name: getattr(asked, each.name) for each in dataclasses.fields(asked)}
        return _JudgedProblem(**own, comparison=comparison)

    @override
    def env_maker(
        self, observation: Observation, reward: RewardFunction, row: Row
    ) -> Callable[[], ProblemEnv]:
        return functools.partial(
            JudgedEnv, observation, reward, row, self.full_reward, self.task_weight
        )


class JudgedEnv(TaskEnv):
    """One row, whose own score counts with a weight and is the metric `task_reward`."""

    def __init__(
        self,
        observation: Observation,
        reward: RewardFunction,
        row: Row,
        full_reward: float | None,
        weight: float,
    ) -> None:
        super().__init__(observation, reward, row, full_reward)
        self._weight = weight

    @override
    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        metrics = {**result.metrics, "task_reward": result.reward}
        return dataclasses.replace(result, reward=self._weight * result.reward, metrics=metrics)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of the answers to one problem, for `compute_group_rewards`.

    The reward of an answer is its win rate in the group (`tournament`). A group of one, as the
    centre is on held-out problems, is compared with the base's own answer: its win rate is one half
    until it differs from the base, and then says how often the judge prefers it. Several attempts
    of the centre alone (`eval_attempts`) are a group like any other, and tell nothing of the kind.

    An answer without a judgement is lost: its reward is NaN, not 0.

    Attributes:
        fields: the problem's row, which fills the judge's template.
        tokenizer: the model's own.
        seed: seed of the tournament's draws.
    """

    fields: Fields
    judge: PairJudge
    tournament: Tournament
    tokenizer: Tokenizer
    seed: int = 0

    async def rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> list[GroupReward | LostRollout]:
        """Return each trajectory's win rate, or how it was lost.

        Metrics: `win_rate`, `cut` (1 where the judge saw the beginning of the answer alone),
        `answers` (how many different ones the group has), and those of `Judgements`.
        """
        finished = [each for each in trajectories if isinstance(each, Trajectory)]
        if not finished:
            return [LostRollout("no answer to compare", "") for _ in trajectories]
        opened = finished[0].transitions[0].observation.opened
        other = await self._opponent(finished, policies[0], opened)
        answers = [whole_turn(each.transitions[-1].action.text, opened) for each in finished]
        # Most answers of a group are alike.
        shown_of = {answer: self.judge.shown(answer, self.tokenizer) for answer in set(answers)}
        shown = [shown_of[answer] for answer in answers]
        texts = [text for text, _ in shown]

        async def compare(first: str, second: str) -> float:
            message = self.judge.message(self.fields, first, second)
            return await self.judge.prefers_first(message, policies[0], self.tokenizer)

        seed = derive_seed(self.seed, "\0".join(["judging", *texts]))
        rates, judged = await self.tournament.win_rates(texts, compare, seed, other)
        of_group = {"answers": float(len(set(texts))), **judged.metrics}
        found = iter(
            LostRollout(f"no judgement of this answer: {judged.lost[0]}", "")
            if math.isnan(rate)
            else GroupReward(rate, {"win_rate": rate, "cut": float(was_cut), **of_group})
            for rate, (_, was_cut) in zip(rates, shown, strict=True)
        )
        return [next(found) if isinstance(each, Trajectory) else each for each in trajectories]

    async def _opponent(
        self, finished: Sequence[Trajectory], policy: Policy, opened: str
    ) -> str | None:
        """Return the one answer with which all are compared, if there is one."""
        if len(finished) == 1:
            whose = policy.base
        elif self.tournament.pattern == "centre":
            whose = policy.centre
        else:
            return None
        action = await whose.sample(finished[0].transitions[0].observation)
        return self.judge.shown(whole_turn(action.text, opened), self.tokenizer)[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _JudgedProblem(ProblemGroupBuilder):
    """One row, whose answers are compared."""

    comparison: Comparison = dataclasses.field(kw_only=True)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward | LostRollout]:
        return await self.comparison.rewards(trajectories, policies)
