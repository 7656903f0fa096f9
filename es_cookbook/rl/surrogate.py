"""The policy gradient's surrogate as a score: genomes score answers in place of giving them.

In each generation the centre answers every problem K times at temperature 1, as in a policy
gradient, and rewards become weights: a reward less the mean of the K, over their standard deviation
(the group baseline of GRPO, Shao et al. 2024, arXiv:2402.03300). A genome's score on the problem is

    1/K · Σ over the K answers  weight · Σ_t log π_genome(token_t | all tokens before it)

Its gradient at the centre is the one that REINFORCE with that baseline takes a step along. A
population estimates it by differences, as any gradient, with forward passes alone; MeZO does so for
a supervised loss (Malladi et al. 2023, arXiv:2305.17333).

Why it helps: a rollout of a genome's own says one number about that genome, and where most genomes
give the same greedy answer their rewards are equal. Here every answer tells something of every
genome, and a score is a smooth function of the perturbation, so it has no luck in it. A generation
needs P · K rollouts for any size of the population. In exchange each genome reads all answers
that have a weight (equal ones once): N scorings of them, without sampling a token.

It is the surrogate at the centre: where a step goes so far that other answers become likely, their
rewards are not known. Left out: PPO's ratios and clipping, which matter for several steps on one
batch; answers of earlier generations; an objective other than the mean of the rewards.

Where problems have gold answers, genomes may score those (`GoldAnswers`): maximum likelihood, as in
MeZO. The centre still attempts the problems, once, so that the run shows what it earns.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.rl.data.problem_dataset import with_gold
from es_cookbook.rl.objectives import AnswerSource
from es_cookbook.rl.rollouts import Example, sequences_of
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Observation,
    SamplingParams,
    StepResult,
    Tokenizer,
    TrajectoryGroup,
)

_Weighted: TypeAlias = tuple[float, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]

_SCORED = "surrogate=gold has genomes score; leave surrogate out"
NOTHING = Observation((0,))
"""The observation of an Env that samples nothing; no policy sees it."""


@chz.chz
class Surrogate(AnswerSource):
    """Genomes score the centre's answers, weighted by their rewards."""

    attempts: int = chz.field(default=16, doc="answers of the centre to each problem of a batch")
    normalise: bool = chz.field(default=True, doc="divide rewards by their standard deviation")

    _attempts = in_range("attempts", at_least=2, prefix="surrogate.")

    @override
    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with temperature 1.

        The gradient is that of the whole distribution, so top-p must be 1.
        """
        if sampling.temperature not in (0.0, 1.0) or sampling.top_p != 1:
            raise ConfigError(
                f"sampling.temperature={sampling.temperature:g} sampling.top_p={sampling.top_p:g}: "
                "with surrogate the centre answers at temperature 1 and from its whole "
                "distribution, whose gradient is meant; leave both out"
            )
        return chz.replace(sampling, temperature=1.0)

    @override
    async def problem(
        self, asked: EnvGroupBuilder, answered: TrajectoryGroup, tokenizer: Tokenizer
    ) -> "AnswersProblem":
        found: Counter[Example] = Counter()
        finished, rewards_G_K = [*answered.finished], answered.rewards_G_K
        weights = self.weights([rewards_G_K[g][k] for (g, k), _ in finished])
        for (_, trajectory), weight in zip(finished, weights, strict=True):
            if weight:
                share = weight / len(finished)
                found.update(
                    dataclasses.replace(each, sampled_T=())
                    for each in sequences_of(trajectory, share)
                )
        examples = tuple(dataclasses.replace(each, count=n) for each, n in found.items())
        return AnswersProblem(examples, answered.tags)

    def weights(self, rewards_K: Sequence[float]) -> Sequence[float]:
        """Return the weight of each of the centre's answers to a problem."""
        return group_weights(rewards_K, normalise=self.normalise)


@chz.chz
class BestAnswers(Surrogate):
    """Genomes score the best of the centre's answers to each problem.

    That is reward-ranked fine-tuning (Dong et al. 2023, arXiv:2304.06767) without backpropagation.
    A problem counts by how far its best reward is above the mean, so one that the centre always or
    never solves says nothing and costs nothing. A genome reads one answer to a problem in place of
    all of them: a generation takes about 1/K of the time of `Surrogate`.
    """

    attempts: int = chz.field(default=8, doc="answers of the centre to each problem of a batch")
    normalise: bool = chz.field(default=False, doc="divide rewards by their standard deviation")

    @override
    def tokens_read(self, answer: float, gold: float) -> float:
        return answer

    @override
    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters as given; where they are greedy, with temperature 0.5.

        No gradient of the whole distribution is meant, and cooler answers are right more often.
        """
        return chz.replace(sampling, temperature=sampling.temperature or 0.5)

    @override
    def weights(self, rewards_K: Sequence[float]) -> Sequence[float]:
        """Return the usual weight for the first of the best answers, and 0 for the others.

        >>> BestAnswers().weights([0.0, 1.0, 0.0, 1.0])
        [0.0, 0.5, 0.0, 0.0]
        """
        weights = super().weights(rewards_K)
        best = max(range(len(weights)), key=weights.__getitem__, default=None)
        return [weight if k == best else 0.0 for k, weight in enumerate(weights)]


@chz.chz
class GoldAnswers(AnswerSource):
    """Genomes score each problem's gold answer: its log-probability, the end of sequence included.

    A gold answer of several turns is scored in all of them, after its Env's messages in between.
    """

    attempts: int = chz.field(default=1, doc="answers of the centre to each problem, for metrics")

    _attempts = in_range("attempts", at_least=1, prefix="surrogate.")

    @override
    def tokens_read(self, answer: float, gold: float) -> float:
        return gold

    @override
    def check(self, batch_P: Sequence[EnvGroupBuilder]) -> None:
        for asked in batch_P:
            with_gold(asked, _SCORED)

    @override
    async def check_fit(
        self, problems_P: Sequence[EnvGroupBuilder], tokenizer: Tokenizer, context_length: int
    ) -> None:
        for asked in problems_P:
            name, answers = await _gold_of(asked, tokenizer)
            if (length := max((len(a.tokens_T) for a in answers), default=0)) > context_length:
                raise DataError(
                    f"{name}: its prompt and gold answer have {length} tokens, more than the "
                    f"engine's context of {context_length}; raise engine.max_model_len"
                )

    @override
    async def problem(
        self, asked: EnvGroupBuilder, answered: TrajectoryGroup, tokenizer: Tokenizer
    ) -> "AnswersProblem":
        return AnswersProblem((await _gold_of(asked, tokenizer))[1], answered.tags)


async def _gold_of(asked: EnvGroupBuilder, tokenizer: Tokenizer) -> tuple[str, list[Example]]:
    """Return a problem's name and its gold answer, as sequences of tokens."""
    from es_cookbook.rl.messages.message_env import told_gold  # Few runs score gold answers.

    problem, gold = with_gold(asked, _SCORED)
    told = await told_gold(problem.make_env(), gold, tokenizer)
    return problem.name, sequences_of(told, 1.0)


def group_weights(rewards_K: Sequence[float], *, normalise: bool) -> list[float]:
    """Return rewards minus their mean, if `normalise` over their (population) deviation.

    >>> group_weights([0.0, 1.0, 0.0, 1.0], normalise=False)
    [-0.5, 0.5, -0.5, 0.5]
    >>> group_weights([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], normalise=True)
    [0.0, 0.0]
    """
    # Those that differ by rounding are equal.
    if math.isclose(max(rewards_K, default=0), min(rewards_K, default=0), rel_tol=1e-12):
        return [0.0] * len(rewards_K)
    mean = math.fsum(rewards_K) / len(rewards_K)
    above_K = [reward - mean for reward in rewards_K]
    if not normalise:
        return above_K
    deviation = math.sqrt(math.fsum(above**2 for above in above_K) / len(above_K))
    return [above / deviation for above in above_K]


class _AnswersEnv(Env):
    """Scores answers, samples nothing.

    `answers` has for each its weight, and its learned tokens behind all before them.
    """

    def __init__(self, answers: Sequence[_Weighted]) -> None:
        self.answers = answers

    async def initial_observation(self) -> Observation:
        return NOTHING

    async def act(self, observation: Observation) -> Action:
        return Action((), "", "stop")

    async def step(self, action: Action) -> StepResult:
        """Return the sum over answers of weight times log-probability."""
        scored: list[float] = []
        for weight, spans in self.answers:
            logprobs = [await self.policy.logprobs(before_T, said_T) for before_T, said_T in spans]
            scored.append(weight * math.fsum(itertools.chain(*logprobs)))
        return StepResult(math.fsum(scored), done=True)


def learned_spans(answer: Example) -> Iterator[tuple[int, int]]:
    """Yield the spans of tokens with a loss; the first token never has one.

    >>> list(learned_spans(Example((5, 6, 7, 8, 9), (True, True, False, True, True))))
    [(1, 2), (3, 5)]
    """
    places = range(1, len(answer.tokens_T))
    for learned, of in itertools.groupby(places, key=lambda t: answer.learned_T[t]):
        if learned:
            first, *rest = of
            yield first, (rest[-1] if rest else first) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class AnswersProblem(EnvGroupBuilder):
    """Answers to one problem that have a weight; its metrics are those of the problem.

    Attributes:
        answers: answers with weights, which include 1/K for K answers.
        of_problem: the problem's tags.
    """

    answers: Sequence[Example]
    of_problem: tuple[str, ...] = ()

    @property
    @override
    def is_graded(self) -> bool:
        return False

    async def make_envs(self, num_envs: int) -> EnvGroup:
        """Make Envs that score the answers; spans are computed once."""
        answers: list[_Weighted] = []
        for each in self.answers:
            tokens_T = each.tokens_T
            spans = [(tokens_T[:start], tokens_T[start:end]) for start, end in learned_spans(each)]
            answers.append((each.weight * each.count, spans))
        return EnvGroup([_AnswersEnv(answers) for _ in range(num_envs)])

    @property
    @override
    def tags(self) -> tuple[str, ...]:
        return self.of_problem

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens_T) for answer in self.answers)
