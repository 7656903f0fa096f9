"""Group rewards by comparison: the answers to one problem, judged in pairs.

An `EnvGroupBuilder` of one's own calls it where group rewards are asked:

    async def compute_group_rewards(self, trajectories, policies):
        return await self.comparison.rewards(trajectories, policies)

The reward of an answer is its win rate in the group (`tournament`). A group of one, as the centre
is on held-out problems, is compared with the base's own answer: its win rate is one half until it
differs from the base, and then says how often the judge prefers it. Several attempts of the centre
alone (`eval_attempts`) are a group like any other, and tell nothing of the kind.

An answer of which no judgement was made is lost: its reward is NaN, not 0.
"""

import dataclasses
import math
from collections.abc import Sequence

from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.judging.judges import PairJudge
from es_cookbook.rl.judging.tournament import Tally, Tournament
from es_cookbook.rl.rewards.base import Fields
from es_cookbook.rl.types import GroupReward, LostRollout, Policy, Tokenizer, Trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers to one problem are compared.

    Attributes:
        fields: the problem's row, which fills the judge's template.
        tokenizer: the model's own.
        seed: of the tournament's draws.
    """

    fields: Fields
    judge: PairJudge
    tournament: Tournament
    tokenizer: Tokenizer
    seed: int = 0

    async def rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> list[GroupReward | LostRollout]:
        """For each trajectory its win rate, or how it was lost.

        Metrics: `win_rate`, `cut` (1 where the judge saw the beginning of the answer alone),
        `answers` (how many different ones the group has), and those of `Tally`.
        """
        finished = [each for each in trajectories if isinstance(each, Trajectory)]
        if not finished:
            return [LostRollout("no answer to compare", "") for _ in trajectories]
        other = await self._opponent(finished, policies[0])
        answers = [_answer(each) for each in finished]
        # Most answers of a group are alike.
        shown_of = {answer: self.judge.shown(answer, self.tokenizer) for answer in set(answers)}
        shown = [shown_of[answer] for answer in answers]
        texts = [text for text, _ in shown]

        async def compare(first: str, second: str) -> float:
            message = self.judge.message(self.fields, first, second)
            return await self.judge.prefers_first(message, policies[0], self.tokenizer)

        seed = derive_seed(self.seed, "\0".join(["judging", *texts]))
        rates, tally = await self.tournament.win_rates(texts, compare, seed, other)
        of_group = {"answers": float(len(set(texts))), **tally.metrics}
        found = iter(
            _rewarded(rate, {"win_rate": rate, "cut": float(was_cut), **of_group}, tally)
            for rate, (_, was_cut) in zip(rates, shown, strict=True)
        )
        return [next(found) if isinstance(each, Trajectory) else each for each in trajectories]

    async def _opponent(self, finished: Sequence[Trajectory], policy: Policy) -> str | None:
        """The one answer with which all are compared, if there is one."""
        if len(finished) == 1:
            whose = policy.base
        elif self.tournament.pattern == "centre":
            whose = policy.centre
        else:
            return None
        action = await whose.sample(finished[0].transitions[0].observation)
        return self.judge.shown(action.text, self.tokenizer)[0]


def _answer(trajectory: Trajectory) -> str:
    return trajectory.transitions[-1].action.text


def _rewarded(rate: float, metrics: dict[str, float], tally: Tally) -> GroupReward | LostRollout:
    if math.isnan(rate):
        return LostRollout(f"no judgement of this answer: {tally.lost[0]}", "")
    return GroupReward(rate, metrics)
