"""Pairs of answers as problems, and the rows that they are read from."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import cast

from typing_extensions import override

from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.rl.messages.encoder import Controls, inside
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.template import ChatTemplate
from es_cookbook.rl.problem_env import digest_of
from es_cookbook.rl.prompts import render_prompt
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

OPTION = "preference.source"
"""Names the rows in sentences."""
MARGIN = "margin"
"""The metric of a preference pair from which its reward is made."""


def log_sigmoid(x: float) -> float:
    """The log of 1 / (1 + e^-x), for any finite x.

    >>> log_sigmoid(-1000.0), log_sigmoid(1000.0)
    (-1000.0, 0.0)
    """
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


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
        """Metrics `margin`, and `preferred`: whether the chosen answer is the likelier one."""
        margin = await self.pair.margin(self.policy)
        return StepResult(0.0, done=True, metrics={MARGIN: margin, "preferred": float(margin > 0)})


@dataclasses.dataclass(frozen=True, slots=True)
class PairProblem(EnvGroupBuilder):
    """A prompt and two answers to it, as tokens; `relative_to_base` subtracts the base's margin."""

    prompt_T: tuple[int, ...]
    chosen_T: tuple[int, ...]
    rejected_T: tuple[int, ...]
    beta: float
    relative_to_base: bool

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([_PairEnv(self) for _ in range(num_envs)])

    async def margin(self, policy: Policy) -> float:
        """Log-probability of the chosen answer minus that of the rejected one, over all tokens."""
        chosen_T = await policy.logprobs(self.prompt_T, self.chosen_T)
        rejected_T = await policy.logprobs(self.prompt_T, self.rejected_T)
        return math.fsum(chosen_T) - math.fsum(rejected_T)

    @override
    async def compute_group_rewards(
        self, trajectories: Sequence[Trajectory | LostRollout], policies: Sequence[Policy]
    ) -> Sequence[GroupReward]:
        base = await self.margin(policies[0].base) if self.relative_to_base else 0.0
        return [
            GroupReward(0.0)
            if isinstance(trajectory, LostRollout)
            else GroupReward(
                log_sigmoid(self.beta * (trajectory.transitions[-1].metrics[MARGIN] - base))
            )
            for trajectory in trajectories
        ]

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return ("preference",)


def digests(source: str, tokenizer: Tokenizer, *, chat: bool) -> Iterator[tuple[int, ...]]:
    """Digests that identify the prompt of each row, as for training problems."""
    for row in load_rows(source, option=OPTION):
        prompt_T = render_prompt(tokenizer, row.text("prompt"), chat=chat)
        yield (digest_of(prompt_T),)


def load_pairs(
    source: str,
    chat: bool,
    beta: float,
    relative_to_base: bool,
    tokenizer: Tokenizer,
    context_length: int,
) -> list[PairProblem]:
    """The rows as tokens; other arguments are as of `PreferencePairs`.

    Raises:
        DataError: A row that cannot be used; names the file and the line.
    """
    return [
        PairProblem(*_tokens(row, chat, tokenizer, context_length), beta, relative_to_base)
        for row in load_rows(source, option=OPTION)
    ]


def _tokens(
    row: Row, chat: bool, tokenizer: Tokenizer, context_length: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Prompt, chosen and rejected answer."""
    is_chat = chat and tokenizer.chat_template is not None
    end = cast("int | None", tokenizer.eos_token_id)

    def answer(name: str) -> tuple[int, ...]:
        said = row.text(name)
        if is_chat:
            said_T = ChatTemplate.of(tokenizer).turn(Message("assistant", said))
            if said_T[-1] in Controls.of(tokenizer).ids:
                return said_T
        else:
            said_T = inside(tokenizer, said)
        return (*said_T, *([] if end is None else [end]))

    prompt_T = render_prompt(tokenizer, row.text("prompt"), chat=chat)
    chosen_T, rejected_T = answer("chosen"), answer("rejected")
    if chosen_T == rejected_T:
        raise row.error("its chosen and its rejected answer are the same tokens")
    length = len(prompt_T) + max(len(chosen_T), len(rejected_T))
    if length > context_length:
        raise row.error(
            f"its prompt and longer answer have {length} tokens together, more than the "
            f"engine's context of {context_length} tokens"
        )
    return tuple(prompt_T), tuple(chosen_T), tuple(rejected_T)
