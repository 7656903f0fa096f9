"""KL to the frozen base model, from one answer of a genome to each prompt."""

import dataclasses
import math
from collections.abc import Sequence

import chz
from typing_extensions import override

from es_cookbook import Env, EnvGroupBuilder, Observation, SamplingParams, StepResult
from es_cookbook.common.checks import in_range
from es_cookbook.common.seeds import derive_seed
from es_cookbook.plugins.regularisers.rows import check_texts, dealt
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.rl.problem_env import check_prompt
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.regularisers import AddedProblems, Regulariser
from es_cookbook.rl.types import SOURCE_DOC, Action, EnvGroup, Tokenizer


def kl_per_token(genome_T: Sequence[float], base_T: Sequence[float]) -> float:
    """Return Schulman's k3, the mean over tokens that the genome sampled.

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

    An Env in the prompt's place has the prompt as its first observation, and is closed after it:
    it may hold one of few turns, for which other Envs wait.
    """

    def __init__(self, prompt: Observation | Env, max_tokens: int) -> None:
        self.prompt = prompt
        self.params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=True)

    async def initial_observation(self) -> Observation:
        if isinstance(env := self.prompt, Env):
            env.policy = self.policy
            self.prompt = await env.initial_observation()
            await env.close()
        return self.prompt

    @override
    async def close(self) -> None:
        if isinstance(self.prompt, Env):
            await self.prompt.close()

    async def act(self, observation: Observation) -> Action:
        """Sample an answer from the genome's own distribution."""
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

    @property
    @override
    def is_graded(self) -> bool:
        return False


@chz.chz
class KLToBase(Regulariser):
    """KL to the base: how far a genome's answers have moved from the frozen base model's.

    On each prompt the genome samples an answer, the base scores the same tokens, and the reward is
    minus the KL (`kl_per_token`). The genome's log-probabilities come with its sample, so only the
    base scores, once per rollout. This works on every engine, also where genomes cannot score.

    Pitfall: it estimates the KL only if the answer was drawn from π_genome itself. A run often
    samples greedily, and the most likely answer is not representative of the distribution. So
    answers are always drawn here at temperature 1 and without top-p; genomes share
    the sampling seeds.

    The centre's KL is measured at every held-out evaluation, as `test/env/kl/kl`: on the held-out
    problems, or the rows of `source`. A run with weight 0 reports both and is not changed by them.

    Left out: a sum over tokens. It would grow with the length of the answer, and a run could lower
    it by answering shorter. Only the first turn of an Env's prompt is answered.
    """

    source: str | None = chz.field(
        default=None, doc=f"{SOURCE_DOC}; of prompts; None: the batch's problems"
    )
    chat: bool = chz.field(
        default=True, doc="render a row's prompt as a chat, if the model has a chat template"
    )
    max_tokens: int = chz.field(default=32, doc="most tokens of an answer")

    _max_tokens = in_range("max_tokens", at_least=1)

    @override
    def check(self) -> None:
        if self.source is not None:
            check_texts(self.source, "kl.source", "prompt")

    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load and render the prompts, if there are any to load."""
        if self.source is None:
            count = self.problems_per_generation
            return lambda _, batch_P: [KLProblem(p, self.max_tokens) for p in batch_P[:count]]
        problems: list[KLProblem] = []
        for row in load_rows(self.source, option="kl.source"):
            tokens_T = render_prompt(tokenizer, row.text("prompt"), chat=self.chat)
            check_prompt(row.where, len(tokens_T), context_length)
            problems.append(KLProblem(Observation(tokens_T), self.max_tokens))
        return dealt(problems, self.problems_per_generation, derive_seed(run_seed, "kl"))

    @override
    def held_out(
        self,
        tokenizer: Tokenizer,
        context_length: int,
        run_seed: int,
        test_P: Sequence[EnvGroupBuilder],
    ) -> Sequence[EnvGroupBuilder]:
        if self.source is None:
            return [KLProblem(problem, self.max_tokens) for problem in test_P]
        return self(tokenizer, context_length, run_seed)(0, test_P)
