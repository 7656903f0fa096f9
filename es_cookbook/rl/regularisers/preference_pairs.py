"""Preference pairs: the chosen answer should be more likely than the rejected one.

Nothing is sampled; the genome scores both answers, y⁺ and y⁻, to a prompt x:

    margin = log π(y⁺ | x) − log π(y⁻ | x)        reward = log sigmoid(β (margin − margin_base))

which is minus the loss of DPO (Rafailov et al. 2023, arXiv:2305.18290), whose gradient an evolution
strategy estimates like any reward's. With `relative_to_base` false the base's margin is left out,
and the reward is the likelihood of the preference under the model itself.

Pitfall: the reward depends on a difference, so both answers may become less likely together; adding
KL to the base limits that. And a margin is a sum over tokens, in which one long answer outweighs
many short ones.

The base scores a pair once per generation, not per genome: two scorings per genome and pair, and
two per pair. A genome's attempts at one pair are all the same.

An answer ends with the tokenizer's end-of-sequence token, where it has one, so that an answer which
is a prefix of another is not always likelier.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import cast

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.problem_dataset import EpochOrder
from es_cookbook.rl.data.rows import Row, check_source, load_rows
from es_cookbook.rl.problem_env import digest_of, render_prompt
from es_cookbook.rl.regularisers.base import AddedProblems, Regulariser
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    GroupReward,
    LostRollout,
    Observation,
    Policy,
    StepResult,
    Tokenizer,
    Trajectory,
)

MARGIN = "margin"


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and two answers to it, as tokens."""

    prompt_T: tuple[int, ...]
    chosen_T: tuple[int, ...]
    rejected_T: tuple[int, ...]


async def margin_of(policy: Policy, pair: Pair) -> float:
    """Log-probability of the chosen answer minus that of the rejected one, sums over tokens."""
    chosen_T = await policy.logprobs(pair.prompt_T, pair.chosen_T)
    rejected_T = await policy.logprobs(pair.prompt_T, pair.rejected_T)
    return math.fsum(chosen_T) - math.fsum(rejected_T)


def log_sigmoid(x: float) -> float:
    """The log of 1 / (1 + e^-x), for any finite x.

    >>> log_sigmoid(-1000.0), log_sigmoid(1000.0)
    (-1000.0, 0.0)
    """
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


class PairEnv(Env):
    """Scores both answers; samples nothing. The reward is the group's, which needs the base."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    async def initial_observation(self) -> Observation:
        """The prompt."""
        return Observation(self.pair.prompt_T)

    async def act(self, observation: Observation) -> Action:
        """No token."""
        return Action((), "", "stop")

    async def step(self, action: Action) -> StepResult:
        """Metrics `margin`, and `preferred`: whether the chosen answer is the likelier one."""
        margin = await margin_of(self.policy, self.pair)
        return StepResult(0.0, done=True, metrics={MARGIN: margin, "preferred": float(margin > 0)})


@dataclasses.dataclass(frozen=True, slots=True)
class PairProblem(EnvGroupBuilder):
    """One pair; `relative_to_base` subtracts the base's margin."""

    pair: Pair
    beta: float
    relative_to_base: bool

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Envs that score it."""
        return EnvGroup([PairEnv(self.pair) for _ in range(num_envs)])

    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        """Log-sigmoids of the margins."""
        base_margin = 0.0
        if self.relative_to_base:
            base_margin = await margin_of(policies[0].base, self.pair)
        return [
            GroupReward(0.0)
            if isinstance(trajectory, LostRollout)
            else GroupReward(
                log_sigmoid(self.beta * (trajectory.transitions[-1].metrics[MARGIN] - base_margin))
            )
            for trajectory in trajectories
        ]

    @property
    def tags(self) -> tuple[str, ...]:
        """`preference`."""
        return ("preference",)


@chz.chz
class PreferencePairs(Regulariser):
    """Makes chosen answers likelier than rejected ones."""

    source: str = chz.field(
        doc=".jsonl or .parquet file, or Hub set, of prompt, chosen and rejected"
    )
    chat: bool = chz.field(
        default=True, doc="render a row's prompt as a chat, if the model has a chat template"
    )
    beta: float = chz.field(default=0.1, doc="inverse scale of the margin, as in DPO")
    relative_to_base: bool = chz.field(
        default=True, doc="subtract the base's own margin, as in DPO"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "beta", above=0)

    @override
    def check(self) -> None:
        check_source(self.source, "preference.source")

    @override
    def trained_on(self, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
        if self.weight > 0:
            for row in load_rows(self.source, option="preference.source"):
                prompt_T = render_prompt(tokenizer, row.text("prompt"), chat=self.chat)
                yield (digest_of(prompt_T),)

    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load the pairs as tokens."""
        problems = [
            PairProblem(
                _pair(row, tokenizer, self.chat, context_length), self.beta, self.relative_to_base
            )
            for row in load_rows(self.source, option="preference.source")
        ]
        if not problems:
            raise DataError(f"{self.source}: there are no preference pairs")
        order = EpochOrder(len(problems), derive_seed(run_seed, "preference"))
        count = self.problems_per_generation
        return lambda generation, _: [problems[i] for i in order.batch(generation, count)]


def _pair(row: Row, tokenizer: Tokenizer, chat: bool, context_length: int) -> Pair:
    end = cast("int | None", tokenizer.eos_token_id)

    def answer(name: str) -> tuple[int, ...]:
        tokens_T = tokenizer.encode(row.text(name), add_special_tokens=False)
        return (*tokens_T, *([] if end is None else [end]))

    prompt_T = render_prompt(tokenizer, row.text("prompt"), chat=chat)
    pair = Pair(prompt_T, answer("chosen"), answer("rejected"))
    if pair.chosen_T == pair.rejected_T:
        raise row.error("its chosen and its rejected answer are the same tokens")
    length = len(prompt_T) + max(len(pair.chosen_T), len(pair.rejected_T))
    if length > context_length:
        raise row.error(
            f"its prompt and longer answer have {length} tokens together, more than the engine's "
            f"context of {context_length} tokens"
        )
    return pair
