"""Preference pairs: the chosen answer should be likelier than the rejected one."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import cast

import chz
import numpy as np
from typing_extensions import override

from es_cookbook import Env, EnvGroupBuilder, Observation, StepResult
from es_cookbook.common.checks import in_range
from es_cookbook.common.seeds import derive_seed
from es_cookbook.plugins.regularisers.rows import check_texts, dealt
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.rl.messages.encoder import Controls, inside
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.template import ChatTemplate
from es_cookbook.rl.problem_env import digest_of
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.regularisers import AddedProblems, Regulariser
from es_cookbook.rl.types import (
    SOURCE_DOC,
    Action,
    EnvGroup,
    GroupReward,
    LostRollout,
    Policy,
    Tokenizer,
    Trajectory,
)

_OPTION = "preference.source"
MARGIN = "margin"
"""The metric of a preference pair from which its reward is made."""


class _PairEnv(Env):
    """Scores both answers; samples nothing. The reward is the group's, which needs the base."""

    def __init__(self, pair: "PairProblem") -> None:
        self.pair = pair

    @override
    async def initial_observation(self) -> Observation:
        return Observation(self.pair.prompt_T)

    @override
    async def act(self, observation: Observation) -> Action:
        return Action((), "", "stop")

    @override
    async def step(self, action: Action) -> StepResult:
        """Return metrics: `margin`, and `preferred`, whether the chosen answer is likelier."""
        margin = await self.pair.margin(self.policy)
        return StepResult(0.0, done=True, metrics={MARGIN: margin, "preferred": float(margin > 0)})


@dataclasses.dataclass(frozen=True, slots=True)
class PairProblem(EnvGroupBuilder):
    """A prompt and two answers to it, as tokens."""

    prompt_T: tuple[int, ...]
    chosen_T: tuple[int, ...]
    rejected_T: tuple[int, ...]
    beta: float

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([_PairEnv(self) for _ in range(num_envs)])

    async def margin(self, policy: Policy) -> float:
        """Return log-probability of the chosen answer minus that of the rejected one."""
        chosen_T = await policy.logprobs(self.prompt_T, self.chosen_T)
        rejected_T = await policy.logprobs(self.prompt_T, self.rejected_T)
        return math.fsum(chosen_T) - math.fsum(rejected_T)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        base = await self.margin(policies[0].base)
        return [
            GroupReward(0.0)
            if isinstance(trajectory, LostRollout)
            else self._reward(trajectory.transitions[-1].metrics[MARGIN] - base)
            for trajectory in trajectories
        ]

    def _reward(self, margin: float) -> GroupReward:
        """Return log sigmoid(β margin)."""
        return GroupReward(-float(np.logaddexp(0.0, -self.beta * margin)))

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return ("preference",)


@chz.chz
class PreferencePairs(Regulariser):
    """Preference pairs: the chosen answer should be more likely than the rejected one.

    Nothing is sampled; the genome scores both answers, y⁺ and y⁻, to a prompt x:

        margin = log π(y⁺ | x) − log π(y⁻ | x)       reward = log sigmoid(β (margin − margin_base))

    which is minus the loss of DPO (Rafailov et al. 2023, arXiv:2305.18290), whose gradient an
    evolution strategy estimates like any reward's.

    Pitfall: the reward depends on a difference, so both answers may become less likely together;
    adding KL to the base limits that. And a margin is a sum over tokens, in which one long answer
    outweighs many short ones.

    The base scores a pair once per generation, not per genome: two scorings per genome and pair,
    and two per pair. A genome's attempts at one pair are all the same.

    An answer ends with the tokenizer's end-of-sequence token, where it has one, so that an answer
    which is a prefix of another is not always likelier.
    """

    source: str = chz.field(doc=f"{SOURCE_DOC}; of prompt, chosen and rejected")
    chat: bool = chz.field(
        default=True, doc="render a row's prompt as a chat, if the model has a chat template"
    )
    beta: float = chz.field(default=0.1, doc="inverse scale of the margin, as in DPO")

    _beta = in_range("beta", above=0)

    @override
    def check(self) -> None:
        check_texts(self.source, _OPTION, "prompt", "chosen", "rejected")

    @override
    def trained_on(self, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
        rows = load_rows(self.source, option=_OPTION) if self.weight > 0 else ()
        return ((digest_of(self._prompt(row, tokenizer)),) for row in rows)

    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load the pairs as tokens."""
        problems = [
            self._problem(row, tokenizer, context_length)
            for row in load_rows(self.source, option=_OPTION)
        ]
        seed = derive_seed(run_seed, "preference")
        return dealt(problems, self.problems_per_generation, seed)

    def _prompt(self, row: Row, tokenizer: Tokenizer) -> tuple[int, ...]:
        return render_prompt(tokenizer, row.text("prompt"), chat=self.chat)

    def _problem(self, row: Row, tokenizer: Tokenizer, context_length: int) -> PairProblem:
        prompt_T = self._prompt(row, tokenizer)
        chosen_T, rejected_T = (
            self._answer(row.text(name), tokenizer) for name in ("chosen", "rejected")
        )
        if chosen_T == rejected_T:
            raise row.error("its chosen and its rejected answer are the same tokens")
        length = len(prompt_T) + max(len(chosen_T), len(rejected_T))
        if length > context_length:
            raise row.error(
                f"its prompt and longer answer have {length} tokens together, more than the "
                f"engine's context of {context_length} tokens"
            )
        return PairProblem(prompt_T, chosen_T, rejected_T, self.beta)

    def _answer(self, text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens of an answer and its end, which its text may already have."""
        if self.chat and tokenizer.chat_template is not None:
            said_T = ChatTemplate.of(tokenizer).turn(Message("assistant", text))
        else:
            said_T = inside(tokenizer, text)
        end = cast("int | None", tokenizer.eos_token_id)
        if end is None or (said_T and said_T[-1] in Controls.of(tokenizer).ids):
            return said_T
        return (*said_T, end)
