"""Policy gradients: group baseline, PPO's clipping, expert iteration.

    es-cookbook policy_gradient recipe=arithmetic

The counterpart of `es_cookbook.evolution.optimizers.es`: the same problems, Envs and rewards, with
a gradient in place of a population. In each generation the model answers every problem K times at
temperature 1, and its answers become more or less likely:

    maximise  1/N · Σ over N answers  weight · Σ_t log π(token_t | all tokens before it)

Three methods turn rewards into weights:

- `group`: the reward minus the mean of the K answers to one problem, as in GRPO (Shao et al. 2024,
  arXiv:2402.03300). Divided by their standard deviation as there, or not, as in Dr. GRPO (Liu et
  al. 2025, arXiv:2503.20783). Answers are not divided by their length, which would make wrong ones
  longer.
- `ppo`: the same weights for several steps on one batch. Each token's log-probability is replaced
  by its ratio to the one at sampling, and a token whose ratio has left 1 ± clip in the wanted
  direction has no gradient (Schulman et al. 2017, arXiv:1707.06347).
- `expert`: supervised training on answers that were correct, or had the highest reward of their
  group (expert iteration, Anthony et al. 2017, arXiv:1705.08439; STaR, arXiv:2203.14465).

`objective=pass_at_k` maximises the probability that one of k answers is correct, in place of the
mean reward: `group` and `ppo` then use the advantages of Chen et al. 2025 (arXiv:2508.10751), by
which a wrong answer costs little if others are correct (`pass_at_k_advantages`). Without the
division by a standard deviation, they are the gradient of pass@k over k.

A fourth method, `gold`, learns the problems' gold answers, including the end of sequence, in place
of the model's: supervised training on the batches, and the gradient of what genomes score with
`surrogate=gold`.

A reward may be how likely a text is that the model reads (`StepResult.reading`, as in the recipe
markovian). It then has its own gradient: `reading` times the text's mean log-probability is also
maximised. With `normalise=False` both are the gradient of the expected reward.

In a chat of several turns the model's own tokens have a loss. A lost rollout (reward NaN) is left
out, also from its group's mean. Answers come from an engine, which gets the new weights after each
generation. Left out: a value model, a KL penalty, entropy bonuses, older answers, many machines.
"""

import dataclasses
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import chz
import numpy as np
from typing_extensions import override

from es_cookbook import EnvGroupBuilder, RLDataset
from es_cookbook.common.checks import check_range, check_types, in_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names
from es_cookbook.common.registry import Registered
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.base import Engine
from es_cookbook.plugins.gradients.gradient_config import GradientConfig
from es_cookbook.rl.data.problem_dataset import with_gold
from es_cookbook.rl.messages.message_env import told_gold
from es_cookbook.rl.objectives import OBJECTIVE_NAMES, SOLVED, Mean, PassAtK, outcomes, pass_at_k
from es_cookbook.rl.rollouts import Example, readings_of, rollout_metrics, sequences_of
from es_cookbook.rl.surrogate import group_weights
from es_cookbook.rl.types import Metrics, Tokenizer, TrajectoryGroup

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from es_cookbook.plugins.gradients.learner import Learner


class Batch(NamedTuple):
    """The problems of a generation, and the model's answers to them.

    Attributes:
        at_k: the objective, unless it is the mean reward.
    """

    problems_P: Sequence[EnvGroupBuilder]
    groups_P: Sequence[TrajectoryGroup]
    tokenizer: Tokenizer
    at_k: PassAtK | None = None


@chz.chz
class Method(ABC):
    """The examples of a generation, and the objective."""

    _types = chz.validate(check_types)

    epochs: int = chz.field(default=1, doc="passes over a generation's answers")
    steps: int = chz.field(default=1, doc="optimizer steps per epoch, each on an equal share")

    _counts = in_range("epochs", "steps", at_least=1)

    def check(self, problems: Sequence[EnvGroupBuilder]) -> None:  # noqa: B027 - most take any
        """Check, before the model is loaded, that the method can learn from these problems.

        Raises:
            DataError: It cannot; names the problem.
        """

    @abstractmethod
    async def examples(self, batch: Batch) -> tuple[list[Example], float]:
        """Return the examples of a generation, and the share of one answer in the objective.

        Raises:
            DataError: A problem has nothing to learn from; names it.
        """

    def objective(
        self, logprobs: "torch.Tensor", sampled: "torch.Tensor", weights: "torch.Tensor"
    ) -> "torch.Tensor":
        """Return the objective per token; `sampled` are the log-probabilities at sampling."""
        return weights * logprobs


@chz.chz
class Weighted(Method):
    """The model's own answers, with weights computed from their rewards."""

    reading: float = chz.field(default=1.0, doc="weight of a text that is read for the reward")

    _reading = in_range("reading", at_least=0)

    @override
    async def examples(self, batch: Batch) -> tuple[list[Example], float]:
        return to_examples(self, batch.groups_P, batch.at_k)

    @abstractmethod
    def weights(self, rewards_K: Sequence[float], solved_K: Sequence[float]) -> list[float]:
        """Return a weight per answer of a group; `solved` is NaN if unknown."""

    def reading_weight(self, weight: float) -> float:
        """Return the weight of a text that was read, given the weight of the answer."""
        return self.reading


_LEARNT = "method=gold learns from"
"""What gold answers are for."""
_METHODS = Names(Registered("methods"), default="group")
_OBJECTIVES = Names({name: OBJECTIVE_NAMES[name] for name in ("mean", "pass_at_k")}, default="mean")


@chz.chz
class Group(Weighted):
    """REINFORCE with the mean of the group as baseline.

    >>> Group(normalise=False).weights([0.0, 1.0, 0.0, 1.0], [])
    [-0.5, 0.5, -0.5, 0.5]
    """

    normalise: bool = chz.field(default=True, doc="divide by the group's standard deviation")

    @override
    def weights(self, rewards_K: Sequence[float], solved_K: Sequence[float]) -> list[float]:
        return group_weights(rewards_K, normalise=self.normalise)


@chz.chz
class PPO(Group):
    """The group's weights, for several steps, with clipped ratios."""

    epochs: int = chz.field(default=4, doc="passes over a generation's answers")
    clip: float = chz.field(default=0.2, doc="a token's ratio counts within 1 - clip and 1 + clip")

    _clip = in_range("clip", above=0, below=1)

    @override
    def objective(
        self, logprobs: "torch.Tensor", sampled: "torch.Tensor", weights: "torch.Tensor"
    ) -> "torch.Tensor":
        ratio = (logprobs - sampled).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return (weights * ratio).minimum(weights * clipped)


@chz.chz
class Expert(Weighted):
    """Expert iteration: weight 1 for answers to imitate, 0 for all others.

    >>> Expert(keep="best").weights([0.1, 0.6, 0.6], [0.0, 0.0, 0.0])
    [0.0, 1.0, 1.0]
    >>> Expert().weights([0.1, 0.6, 0.9], [0.0, 0.0, 1.0])
    [0.0, 0.0, 1.0]
    """

    keep: Literal["right", "best"] = chz.field(
        default="right", doc=f"right: those whose {SOLVED!r} is 1; best: a group's highest rewards"
    )

    @override
    def weights(self, rewards_K: Sequence[float], solved_K: Sequence[float]) -> list[float]:
        if self.keep == "right":
            if any(map(math.isnan, solved_K)):
                raise ConfigError(
                    f"method.keep=right needs Envs that report the metric {SOLVED!r}, and one did "
                    "not; take method.keep=best"
                )
            return [float(solved >= 1) for solved in solved_K]
        best, worst = max(rewards_K, default=0.0), min(rewards_K, default=0.0)
        return [float(worst < best == reward) for reward in rewards_K]

    @override
    def reading_weight(self, weight: float) -> float:
        return self.reading * weight


@chz.chz
class Gold(Method):
    """The gold answers, each once: supervised training."""

    @override
    def check(self, problems: Sequence[EnvGroupBuilder]) -> None:
        for each in problems:
            with_gold(each, _LEARNT)

    @override
    async def examples(self, batch: Batch) -> tuple[list[Example], float]:
        examples: list[Example] = []
        for each in batch.problems_P:
            problem, gold = with_gold(each, _LEARNT)
            told = await told_gold(problem.make_env(), gold, batch.tokenizer)
            examples += sequences_of(told, 1.0)
        return examples, 1 / max(len(batch.problems_P), 1)


@chz.chz
class Config(GradientConfig):
    """Train by a policy gradient on the problems and rewards of any data set."""

    method: Method = _METHODS.field("how rewards become a gradient")
    objective: Mean | PassAtK = _OBJECTIVES.field("objective of method=group and method=ppo")

    @chz.validate
    def _objective(self) -> None:
        if isinstance(self.objective, PassAtK) and not isinstance(self.method, Group):
            raise ConfigError(
                "objective=pass_at_k weighs answers against each other: it needs method=group or "
                f"method=ppo, found {type(self.method).__name__}"
            )
        self.objective.check(self.attempts, self.sampling.temperature)

    @chz.validate
    def _sampling(self) -> None:
        if isinstance(self.method, Weighted):
            check_range(self, "attempts", at_least=2)
        if (self.sampling.temperature, self.sampling.top_p) != (1.0, 1.0):
            raise ConfigError(
                "sampling.temperature and sampling.top_p must be 1, found "
                f"{self.sampling.temperature} and {self.sampling.top_p}: the gradient is that of "
                "the model's own distribution"
            )

    @override
    def check_problems(self, dataset: RLDataset) -> None:
        self.method.check([*dataset.training_problems, *dataset.get_batch(0)])
        dataset.check_rollouts(self.attempts)


async def main(config: Config) -> None:
    """Train, or continue training; a complete run is not changed.

    Raises:
        ESCookbookError: A mistake of the user, in one sentence.
    """
    from es_cookbook.plugins.gradients.gradient_run import Gradients  # with torch
    from es_cookbook.runs.setup import opened

    at_k = config.objective if isinstance(config.objective, PassAtK) else None
    async with opened(Gradients(config, partial(learner_of, config))) as run:
        if run is None:
            return
        for generation in run.generations:
            problems_P = run.dataset.get_batch(generation)
            groups_P = await run.rollout(generation, problems_P)
            batch = Batch(problems_P, groups_P, run.engine.tokenizer, at_k)
            examples, share = await config.method.examples(batch)
            learns = partial(learn, config, generation, examples, share)
            await run.record(generation, groups_P, await run.learn(generation, learns))


def learner_of(config: Config, model: "PreTrainedModel", engine: Engine) -> "Learner":
    """Return the learner of the weights of the engine's space."""
    from es_cookbook.plugins.gradients.learner import Learner, adamw, dtype_of_products

    return Learner(
        model,
        engine.space.shapes,
        tokens_per_pass=config.tokens_per_pass,
        optimizers=partial(adamw, weight_decay=config.weight_decay),
        max_gradient_norm=config.max_gradient_norm,
        products=dtype_of_products(config.products, engine.traits.base_dtype, model.device),
    )


def to_examples(
    method: Weighted, groups_P: Sequence[TrajectoryGroup], at_k: PassAtK | None = None
) -> tuple[list[Example], float]:
    """Return examples of all rollouts; weights of 0 are left out, equal ones merged.

    Returns:
        The examples, and 1/N, the share of one rollout in the objective.

    Raises:
        ConfigError: No Env reports the metric of `at_k`.
    """
    solved_P_G_K = None if at_k is None else at_k.solved(outcomes(groups_P))
    found: Counter[Example] = Counter()
    num_rollouts = 0
    for p, group in enumerate(groups_P):
        finished, rewards_G_K = [*group.finished], group.rewards_G_K
        num_rollouts += len(finished)
        if at_k is None or solved_P_G_K is None:
            metrics_K = [rollout_metrics(group, g, k) for (g, k), _ in finished]
            solved_K = [m.get(SOLVED, m.get("solved", math.nan)) for m in metrics_K]
            weights_K = method.weights([rewards_G_K[g][k] for (g, k), _ in finished], solved_K)
        else:
            assert isinstance(method, Group), "Config refuses others"
            right_K = [bool(solved_P_G_K[p][place]) for place, _ in finished]
            weights_K = pass_at_k_advantages(right_K, at_k.k, normalise=method.normalise)
        for (_, trajectory), weight in zip(finished, weights_K, strict=True):
            found.update(sequences_of(trajectory, weight) if weight else ())
            # A text that is read counts towards the mean reward, but not towards pass@k.
            if at_k is None and (of_read := method.reading_weight(weight)):
                found.update(readings_of(trajectory, of_read))
    examples = [dataclasses.replace(example, count=count) for example, count in found.items()]
    return examples, 1 / max(num_rollouts, 1)


def learn(
    config: Config, generation: int, examples: Sequence[Example], share: float, learner: "Learner"
) -> Metrics:
    """Take all steps on a generation's answers; return their metrics."""
    method = config.method
    factor = config.learning_rate_schedule(generation, config.num_generations)
    learning_rate = config.learning_rate * factor
    norms: list[float] = []
    for epoch in range(method.epochs):
        order = random.Random(derive_seed(config.seed, "policy_gradient", generation, epoch))
        dealt = order.sample(examples, len(examples))
        for part in filter(None, (dealt[step :: method.steps] for step in range(method.steps))):
            of_one = method.steps * share
            norms.append(learner.step(part, method.objective, learning_rate, of_one)[1])
    return {
        "policy/weighted": share * sum(each.count for each in examples if not each.is_read),
        "policy/gradient_norm": math.fsum(norms) / len(norms) if norms else 0.0,
        "optimizer/learning_rate": learning_rate,
    }


def pass_at_k_advantages(
    solved_K: Sequence[bool], k: int, *, normalise: bool = True
) -> list[float]:
    """Return the weights of answers to one problem in the policy gradient of pass@k.

    Chen et al. 2025 (arXiv:2508.10751), for n answers of which c solve the problem, with the mean
    ρ and the standard deviation s of "one of them solves it" over all groups of k answers:

        ρ = 1 − C(n − c, k)/C(n, k),   s = √(ρ(1 − ρ))
        solved: (1 − ρ)/s,   failed: (1 − ρ − C(n − c − 1, k − 1)/C(n − 1, k − 1))/s

    This is a group's baseline: the value of an answer is the share of its groups that are solved,
    which is 1 if it is solved, and pass@(k − 1) of the others if not. Without `normalise` nothing
    is divided by s. All are 0 if s is 0 or n < k.

    >>> pass_at_k_advantages([True, False, False, False], k=2)
    [1.0, -0.333..., -0.333..., -0.333...]
    """
    n, c = len(solved_K), sum(solved_K)
    if n < k:
        return [0.0] * n
    of_all, of_failed = (
        float(pass_at_k(np.array(attempts), np.array(c), size))
        for attempts, size in ((n, k), (n - 1, k - 1))
    )
    deviation = math.sqrt(of_all * (1 - of_all))
    scale = deviation if normalise else 1.0
    values_K = (1.0 if solved else of_failed for solved in solved_K)
    return [(value - of_all) / scale if deviation else 0.0 for value in values_K]
