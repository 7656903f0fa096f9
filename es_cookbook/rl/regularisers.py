"""Regularisers: further terms of the objective, with problems of their own and a weight.

A regulariser adds problems of its own to every batch, the same for all genomes. A genome's total
score is its score on the batch plus weight times its mean reward on these, each minus the mean over
the genomes (`evolution.fitness.Added`). So the offset of a regulariser's reward does not matter: a
value that all genomes share, such as the centre's KL, has no effect.

Its problems come after the batch's own, whose sampling seeds stay what they were: with weight 0 a
run is the same to the bit, and the regulariser's metrics are measured all the same. They are a pure
function of the generation and the batch, so a resumed run needs no record of them.

There are two, KL to the frozen base and preference pairs. Left out: an objective over the attempts
at their problems, which count by their mean reward.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, cast

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural
from es_cookbook.rl.data.problem_dataset import in_epochs
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.sources import SOURCE_DOC, check_source, load_rows
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
    SamplingParams,
    StepResult,
    Tokenizer,
    Trajectory,
)

MARGIN = "margin"
"""The metric of a preference pair from which its reward is made."""
AddedProblems: TypeAlias = Callable[[int, Sequence[EnvGroupBuilder]], Sequence[EnvGroupBuilder]]
"""From a generation and its batch, `env_group_builders_P`, to a regulariser's own problems."""


@chz.chz
class Regulariser(ABC):
    """Builds the problems of one regulariser."""

    weight: float = chz.field(
        doc="of its mean reward, relative to the batch's; 0: only its metrics are measured"
    )
    problems_per_generation: int = chz.field(default=8, doc="its problems in a batch, at most")

    @chz.validate
    def _of_all(self) -> None:
        check_range(self, "weight", at_least=0)
        check_range(self, "problems_per_generation", at_least=1)

    def check(self) -> None:
        """Refuse, before a model is loaded, a source that is not there; by default nothing.

        Raises:
            DataError: Why.
        """
        return

    def trained_on(self, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
        """Digests of the problems of which it tells what is right, as of a training set's."""
        del tokenizer
        return ()

    @abstractmethod
    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load and check rows, whose order follows from `run_seed`.

        Raises:
            DataError: A row that cannot be used; names the file and the line.
        """

    def _in_epochs(
        self, problems: Sequence[EnvGroupBuilder], none: str, run_seed: int, name: str
    ) -> AddedProblems:
        if not problems:
            raise DataError(none)
        size, seed, count = len(problems), derive_seed(run_seed, name), self.problems_per_generation
        return lambda generation, _: [
            problems[i] for i in in_epochs(size, seed, generation * count, count)
        ]


def kl_per_token(genome_T: Sequence[float], base_T: Sequence[float]) -> float:
    """Schulman's k3 from log-probabilities of the tokens that the genome sampled, averaged.

    With the log ratio ℓ = log π_base(token) − log π_genome(token),

        KL(π_genome ‖ π_base) per token  ≈  mean over tokens of  e^ℓ − 1 − ℓ

    ("Approximating KL divergence", joschu.net/blog/kl-approx.html, 2020): unbiased as −ℓ is, but
    never negative and of lower variance while the two are close.

    >>> kl_per_token([-1.0, -2.0], [-1.0, -2.0])
    0.0
    """
    ratios_T = [base - own for own, base in zip(genome_T, base_T, strict=True)]
    return math.fsum(max(math.expm1(ratio) - ratio, 0.0) for ratio in ratios_T) / len(ratios_T)


class _KLEnv(Env):
    """Answers a prompt once, at temperature 1; the reward is minus the KL to the base.

    An Env in the prompt's place has the prompt as its first observation.
    """

    def __init__(self, prompt: Observation | Env, max_tokens: int) -> None:
        self.prompt = prompt
        self.params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=True)

    async def initial_observation(self) -> Observation:
        if isinstance(self.prompt, Env):
            self.prompt.policy = self.policy
            self.prompt = await self.prompt.initial_observation()
        return self.prompt

    async def act(self, observation: Observation) -> Action:
        """An answer drawn from the genome's own distribution."""
        return await self.policy.sample(observation, self.params)

    async def step(self, action: Action) -> StepResult:
        observation = await self.initial_observation()
        assert action.logprobs_T is not None, "asked for in `act`"
        base_T = await self.policy.base.logprobs(observation.tokens_T, action.tokens_T)
        kl = kl_per_token(action.logprobs_T, base_T)
        return StepResult(-kl, done=True, metrics={"kl": kl})


@dataclasses.dataclass(frozen=True, slots=True)
class KLProblem(EnvGroupBuilder):
    """One prompt, or the prompt with which another problem's Envs begin."""

    prompt: Observation | EnvGroupBuilder
    max_tokens: int

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        if isinstance(self.prompt, Observation):
            return EnvGroup([_KLEnv(self.prompt, self.max_tokens) for _ in range(num_envs)])
        group = await self.prompt.make_envs(num_envs)
        group.envs = [_KLEnv(env, self.max_tokens) for env in group.envs]
        return group

    @property
    def tags(self) -> tuple[str, ...]:
        return ("kl",)


@chz.chz
class KLToBase(Regulariser):
    """KL to the base: how far a genome's answers have moved from the frozen base model's.

    On each prompt the genome samples an answer, the base scores the same tokens, and the reward is
    minus the KL (`kl_per_token`). The genome's log-probabilities come with its sample, so only the
    base scores, once per rollout. This works on every engine, also where genomes cannot score.

    Pitfall: it estimates the KL only if the answer was drawn from π_genome itself. A run often
    samples greedily, and the most likely answer is not representative of the distribution. So
    answers are drawn here at temperature 1 and without top-p, whatever the run does; genomes share
    the sampling seeds.

    The centre's KL is measured at every held-out evaluation, as `test/env/kl/kl`: on the held-out
    problems, or the rows of `source`. A run with weight 0 reports both and is not changed by them.

    Left out: a sum over tokens. It would grow with the length of the answer, and a run could lower
    it by answering shorter. Only the first turn of an Env's prompt is answered.
    """

    source: str | None = chz.field(
        default=None,
        doc=f"{SOURCE_DOC}; of prompts; None: the batch's problems",
    )
    chat: bool = chz.field(
        default=True, doc="render a row's prompt as a chat, if the model has a chat template"
    )
    max_tokens: int = chz.field(default=32, doc="most tokens of an answer")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "max_tokens", at_least=1)

    @override
    def check(self) -> None:
        if self.source is not None:
            _check_texts(self.source, "kl.source", "prompt")

    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load and render the prompts, if there are any to load."""
        if self.source is None:
            count = self.problems_per_generation
            return lambda _, batch_P: [KLProblem(p, self.max_tokens) for p in batch_P[:count]]
        problems: list[KLProblem] = []
        for row in load_rows(self.source, option="kl.source"):
            tokens_T = render_prompt(tokenizer, row.text("prompt"), chat=self.chat)
            if len(tokens_T) >= context_length:
                raise row.error(
                    f"its prompt of {plural(len(tokens_T), 'token')} leaves no room in the "
                    f"engine's context of {plural(context_length, 'token')}"
                )
            problems.append(KLProblem(Observation(tokens_T), self.max_tokens))
        return self._in_epochs(problems, f"{self.source}: there are no prompts", run_seed, "kl")


def _check_texts(source: str, option: str, *names: str) -> None:
    """Refuse, before a model is loaded, a source without rows, or with one that lacks a text."""
    check_source(source, option)
    rows = list(load_rows(source, option=option))
    if not rows:
        raise DataError(f"{option}={source}: there are no rows")
    for row in rows:
        for name in names:
            row.text(name)


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


@chz.chz
class PreferencePairs(Regulariser):
    """Preference pairs: the chosen answer should be more likely than the rejected one.

    Nothing is sampled; the genome scores both answers, y⁺ and y⁻, to a prompt x:

        margin = log π(y⁺ | x) − log π(y⁻ | x)       reward = log sigmoid(β (margin − margin_base))

    which is minus the loss of DPO (Rafailov et al. 2023, arXiv:2305.18290), whose gradient an
    evolution strategy estimates like any reward's. With `relative_to_base` false the base's margin
    is left out, and the reward is the likelihood of the preference under the model itself.

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
    relative_to_base: bool = chz.field(
        default=True, doc="subtract the base's own margin, as in DPO"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "beta", above=0)

    @override
    def check(self) -> None:
        _check_texts(self.source, "preference.source", "prompt", "chosen", "rejected")

    @override
    def trained_on(self, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
        if self.weight > 0:
            for row in load_rows(self.source, option="preference.source"):
                prompt_T = render_prompt(tokenizer, row.text("prompt"), chat=self.chat)
                yield (digest_of(prompt_T),)

    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load the pairs as tokens."""
        rows = load_rows(self.source, option="preference.source")
        problems = [self._pair(row, tokenizer, context_length) for row in rows]
        none = f"{self.source}: there are no preference pairs"
        return self._in_epochs(problems, none, run_seed, "preference")

    def _pair(self, row: Row, tokenizer: Tokenizer, context_length: int) -> PairProblem:
        is_chat = self.chat and tokenizer.chat_template is not None
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

        prompt_T = render_prompt(tokenizer, row.text("prompt"), chat=self.chat)
        chosen_T, rejected_T = answer("chosen"), answer("rejected")
        if chosen_T == rejected_T:
            raise row.error("its chosen and its rejected answer are the same tokens")
        length = len(prompt_T) + max(len(chosen_T), len(rejected_T))
        if length > context_length:
            raise row.error(
                f"its prompt and longer answer have {length} tokens together, more than the "
                f"engine's context of {context_length} tokens"
            )
        return PairProblem(prompt_T, chosen_T, rejected_T, self.beta, self.relative_to_base)
