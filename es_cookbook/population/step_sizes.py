"""σ and α that a run finds for itself, before its first generation.

Genomes have to differ in their answers, and yet lose little of what the centre can do. How much
they lose shows in the log-probability of the centre's own answers: a genome that makes an answer
less likely by 0.3 nats gives it up in about a quarter of all cases. So

    loss(σ) = mean over answers and genomes of  log π_centre(answer) - log π_genome(answer)

where an answer is all that the model says in a rollout. Of answers drawn at temperature 1 it is the
Kullback-Leibler divergence of genome and centre. In mirrored pairs what is linear in σ cancels, and
it grows like σ²: two pairs with the same seeds at every σ are enough, while rewards of so few
genomes are mostly luck. It needs no rewards: a task of which nothing is solved yet, or everything,
has a σ too.

The σ that is taken loses `LOSS`. That was chosen where grids of runs had told which σ learns most,
on five models and tasks (docs/lab_notes.md): the best σ, from 0.002 to 0.01, was within a factor of
2.4 of it, and 88 % or more of the best gain was reached.

α follows: plain ES's step has an RMS of α/√N whatever the fitness, which has unit variance, and
most of it is noise. The noise of steps whose rates a schedule multiplies by f adds up to
α/√N · √Σf², which is made `DRIFT` · σ: a little farther than a genome stands from the centre.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import cast

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, mirrored
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import mean_rewards, sequences_of
from es_cookbook.rl.surrogate import AnswersProblem
from es_cookbook.rl.types import EnvGroupBuilder, Trajectory

LOSS = 1.0
"""Nats that the centre's answers lose at the σ that is taken."""
DRIFT = 1.5
"""RMS of the noise of all steps, over σ."""
LONGEST_STEP = 0.5
"""RMS of one step, over σ, where there are few."""
_PROBLEMS = 16
_PAIRS = 2
"""Of genomes that read the centre's answers, at each σ."""
_ANSWERING = 7  # With the centre an even number, which games want.
"""Genomes that answer themselves, at the σ that is taken."""
_FIRST, _FACTOR = 2.0**-12, 4.0
_RANGE = 2.0**-24, 2.0**8
_LARGEST = 1e3
"""Of losses: a model may be so far off that its log-probabilities are no numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSigma:
    """A σ, and what it was taken by.

    Attributes:
        sigma: standard deviation of the perturbations.
        losses: by σ, for all that were tried.
        rewards_P_G: of some problems, by the centre and behind it by genomes at `sigma`.
        seconds: that it took.
    """

    sigma: float
    losses: Mapping[float, float]
    rewards_P_G: NDArray[np.float64]
    seconds: float

    def table(self) -> str:
        """As a person reads it."""
        rows = [f"  {sigma:<9.2g} {loss:.3f}" for sigma, loss in sorted(self.losses.items())]
        centre, *genomes_G = np.nanmean(self.rewards_P_G, axis=0).tolist()
        lines = [
            "  sigma     nats that the centre's answers lose",
            *rows,
            f"sigma={self.sigma:g} is where they lose {LOSS:g}; reward of the centre {centre:.3g}, "
            f"of {len(genomes_G)} genomes {min(genomes_G):.3g} to {max(genomes_G):.3g}, on "
            f"{plural(len(self.rewards_P_G), 'problem')}; {self.seconds:.1f} s",
        ]
        if np.nanmin(self.rewards_P_G) == np.nanmax(self.rewards_P_G):
            lines.append(
                f"every reward was {centre:g}: answers change at this sigma, and no reward says "
                "which are better"
            )
        return "\n".join(lines)


async def find_sigma(sampler: PopulationSampler, batch_P: Sequence[EnvGroupBuilder]) -> FoundSigma:
    """The σ at which the centre's answers lose `LOSS`, to two digits.

    Args:
        sampler: samples as the run does, one attempt each; genomes' seeds follow from its own.
        batch_P: problems, of which the first few are asked.

    Raises:
        ConfigError: The centre gives no answers, or no σ of a wide range changes them so much.
        TooManyLostError: As `PopulationSampler.rollout`.
    """
    began, problems_P = time.perf_counter(), batch_P[:_PROBLEMS]
    # Which tokens are the model's own, and not an Env's, shows in their log-probabilities.
    centre_P = await sampler.rollout_centre(
        problems_P, chz.replace(sampler.sampling, logprobs=True), generation=0
    )
    answers_P: list[AnswersProblem] = []
    for group in centre_P:
        for trajectory in group.trajectories_G_K[0]:
            if isinstance(trajectory, Trajectory) and (said := sequences_of(trajectory, 1.0)):
                answers_P.append(
                    AnswersProblem([dataclasses.replace(s, sampled_T=()) for s in said])
                )
    if not answers_P:
        raise ConfigError(
            f"optimizer.sigma=auto: the centre gave no answer to any of "
            f"{plural(len(problems_P), 'problem')}; give optimizer.sigma a number"
        )
    seeds_G = [derive_seed(sampler.run_seed, "sigma", i) for i in range(_ANSWERING)]
    losses: dict[float, float] = {}

    async def loss_at(sigma: float) -> float:
        if not _RANGE[0] <= sigma <= _RANGE[1]:
            raise ConfigError(
                f"optimizer.sigma=auto: genomes at no sigma from {min(losses):.2g} to "
                f"{max(losses):.2g} cost the centre's answers {LOSS:g} nats; they cost "
                f"{min(losses.values()):.3g} to {max(losses.values()):.3g}; give optimizer.sigma a "
                "number"
            )
        if sigma not in losses:
            tried_G = _genomes(seeds_G[:_PAIRS], sigma)
            genomes_G = [Genome(), *tried_G, *map(mirrored, tried_G)]
            scores_P_G = mean_rewards(await sampler.rollout(0, answers_P, genomes_G))
            lost = float(np.nanmean(scores_P_G[:, :1] - scores_P_G[:, 1:]))
            losses[sigma] = min(lost, _LARGEST) if math.isfinite(lost) else _LARGEST
        return losses[sigma]

    low = _FIRST
    while await loss_at(low) >= LOSS:
        low /= _FACTOR
    while await loss_at(low * _FACTOR) < LOSS:
        low *= _FACTOR
    middle = low * math.sqrt(_FACTOR)
    if await loss_at(middle) < LOSS:
        low, high = middle, low * _FACTOR
    else:
        high = middle
    sigma = _two_digits(_crossing(low, losses[low], high, losses[high]))
    genomes_G = [Genome(), *_genomes(seeds_G, sigma)]
    answered_P = await sampler.rollout(0, problems_P, genomes_G)
    return FoundSigma(sigma, losses, mean_rewards(answered_P), time.perf_counter() - began)


def _genomes(seeds_G: Sequence[int], sigma: float) -> list[Genome]:
    return [Genome((Term(seed, sigma),)) for seed in seeds_G]


def _crossing(low: float, loss_low: float, high: float, loss_high: float) -> float:
    """Where a power law through both reaches `LOSS`; near 2 is expected, 4 the most."""
    exponent = math.log(loss_high / max(loss_low, loss_high * (low / high) ** 4), high / low)
    return high * (LOSS / loss_high) ** (1 / exponent)


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def learning_rate(sigma: float, population_size: int, factors_T: Sequence[float]) -> float:
    """α of plain ES, whose steps' noise adds up to `DRIFT` · σ, to two digits.

    α is multiplied by `factors_T`, one a generation.
    """
    longest, drift = max(factors_T), math.hypot(*factors_T)
    step = min(LONGEST_STEP / longest, DRIFT / drift) if longest > 0 else LONGEST_STEP
    return _two_digits(sigma * step * math.sqrt(population_size))


def options_of(optimizer: OptimizerBuilder, sigma: float, num_generations: int) -> dict[str, float]:
    """The optimizer's options that are `auto`, at this σ."""
    factors_T = [optimizer.rate_factor(each, num_generations) for each in range(num_generations)]
    es: dict[str, object] = {
        "sigma": sigma,
        "learning_rate": learning_rate(sigma, optimizer.population_size, factors_T),
        "population_size": optimizer.population_size,
    }
    carried = optimizer.carried(es)
    return {name: cast(float, carried[name]) for name in optimizer.unsettled}
