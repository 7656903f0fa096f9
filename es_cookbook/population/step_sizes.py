"""σ and α that a run finds for itself, before its first generation.

Genomes have to differ in their answers, and yet lose little of what the centre can do. How much
they lose shows in the log-probability of the centre's own answers: a genome that makes an answer
less likely by 0.3 nats gives it up in about a quarter of all cases. So

    loss(σ) = mean over answers and genomes of  log π_centre(answer) - log π_genome(answer)

where an answer is all that the model says in a rollout. For answers drawn at temperature 1 it is
the Kullback-Leibler divergence of genome and centre. Terms linear in σ cancel in mirrored pairs,
and it grows like σ²: two pairs with the same seeds at every σ are enough, while rewards of so few
genomes are mostly luck. It needs no rewards: a task with all problems solved, or none,
has a σ too.

The σ that is taken loses `LOSS`. That was chosen where grids of runs had told which σ learns most,
on five models and tasks (docs/lab_notes.md): the best σ, from 0.002 to 0.01, was within a factor of
2.4 of it, and 88 % or more of the best gain was reached.

The search takes `SECONDS` by the clock, and a σ under way when they are over is finished. If the
time is short, the centre's answers are cut (`centre_answers`), and genomes score fewer and
shorter ones; the loss of an answer is taken to grow with its length. The next σ is where the power
law through the last losses has `LOSS`, and the search ends when a loss is near that, or there is no
time for another σ. It goes no farther than the space allows (`SearchSpace.largest_sigma`).

α follows: plain ES's step has an RMS of α/√N for fitness of unit variance, and most of it is noise;
other fitness is told in units of its RMS (`optimizers.es`). The noise of steps whose rates a
schedule multiplies by f adds up to α/√N · √Σf², which is made `DRIFT` · σ: a little farther than a
genome stands from the centre.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, say
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.optimizers.base import OptimizerBuilder, mirrored
from es_cookbook.population.centre_answers import CentreAnswers, centre_answers
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.rollouts import mean_rewards
from es_cookbook.rl.types import EnvGroupBuilder

LOSS = 1.0
"""Nats that the centre's answers lose at the σ that is taken."""
DRIFT = 1.5
"""RMS of the noise of all steps, over σ."""
LONGEST_STEP = 0.5
"""RMS of one step, over σ, where there are few."""
_PROBLEMS = 16
_PAIRS = 2
"""Mirrored pairs that score the centre's answers, at each σ."""
_FIRST, _FARTHEST = 2.0**-8, 16.0
"""The first σ, and the largest factor to the next one."""
_NEAR = 1.25
"""Largest factor between `LOSS` and the loss that ends the search."""
_RANGE = 2.0**-24, 2.0**8
_LARGEST = 1e3
"""Upper bound on losses: a model may be so far off that its log-probabilities are not finite."""
_USUAL = 4
"""Sigmas that are usually tried."""
SECONDS = 40.0
"""Time of the search; the σ under way then is finished."""
_LEAST_TOKENS, _LEAST_ANSWERS = 32, 4
"""Fewer answers only if a single σ would take more than all of the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSigma:
    """A σ and how it was found.

    Attributes:
        sigma: standard deviation of the perturbations.
        losses: σ -> nats, for all that were tried.
        seconds: time of the search.
        shortened: omissions to keep to the time; empty if none.
        is_largest: whether only a larger one loses `LOSS`, which the space does not allow.
    """

    sigma: float
    losses: Mapping[float, float]
    seconds: float
    shortened: str = ""
    is_largest: bool = False

    def table(self) -> str:
        """Return the losses as readable text."""
        reason = f"where they lose {LOSS:g}"
        if self.is_largest:
            reason = "the largest of this search space"
        lines = [
            "  sigma     nats that the centre's answers lose",
            *(f"  {sigma:<9.2g} {loss:.3f}" for sigma, loss in sorted(self.losses.items())),
            f"sigma={self.sigma:g} is {reason}; {self.seconds:.1f} s",
        ]
        return "\n".join([*lines, *filter(None, [self.shortened])])


async def find_sigma(
    sampler: PopulationSampler,
    batch_P: Sequence[EnvGroupBuilder],
    answers: CentreAnswers | None = None,
) -> FoundSigma:
    """Find the σ at which the centre's answers lose `LOSS`, to two digits.

    Args:
        sampler: samples as the run does, one attempt each; genomes' seeds follow from its own.
        batch_P: problems; the first few are used.
        answers: the centre's answers to the first few problems, if they are known.

    Raises:
        ConfigError: The centre gives no answers, or no σ of a wide range changes them so much.
        TooManyLostError: As `PopulationSampler.rollout`.
    """
    began, problems_P = time.perf_counter(), batch_P[:_PROBLEMS]
    say(f"looking for sigma by the centre's answers to {plural(len(problems_P), 'problem')}")
    if answers is None:
        answers = await centre_answers(sampler, problems_P, SECONDS / 3)
    if not answers.answers_P:
        raise ConfigError(
            f"optimizer.sigma=auto: the centre gave no answer to any of "
            f"{plural(len(problems_P), 'problem')}; give optimizer.sigma a number"
        )
    search = _Search(sampler, answers, began + SECONDS)
    sigma = await search.crossing()
    seconds, is_largest = time.perf_counter() - began, sigma == search.largest
    return FoundSigma(_two_digits(sigma), search.losses, seconds, search.shortened, is_largest)


class _Search:
    """Looks for the σ at which answers lose `LOSS`, until `end_at` by `time.perf_counter`.

    Attributes:
        largest: upper bound on σ.
        losses: σ -> nats.
        shortened: omissions to keep to the time.
    """

    def __init__(self, sampler: PopulationSampler, answers: CentreAnswers, end_at: float) -> None:
        self._sampler, self._end_at = sampler, end_at
        self.largest = sampler.engine.space.largest_sigma
        self._seeds = [derive_seed(sampler.run_seed, "sigma", i) for i in range(_PAIRS)]
        self._read = answers
        self._seconds_each = math.nan  # Per genome and unit of the cost of what it scores.
        self.losses: dict[float, float] = {}
        self.shortened = ""

    async def crossing(self) -> float:
        """Find the σ at which the loss is `LOSS`.

        Raises:
            ConfigError: No σ of a wide range has that loss.
        """
        await self._fit_to_time()
        left_out = f"; {self.shortened}" if self.shortened else ""
        seconds = max(self._seconds_of_sigma, 0.1)
        say(f"  about {_USUAL} sigmas are tried, about {seconds:.1f} s each{left_out}")
        sigma, known = _FIRST, None
        while True:
            loss = await self._loss_at(sigma)
            estimate = min(self._estimate(sigma), self.largest)
            if LOSS / 50 <= loss <= 50 * LOSS:  # The power law goes on from there.
                known = estimate
            if LOSS / _NEAR <= loss <= LOSS * _NEAR or estimate in self.losses:
                return estimate
            if self._seconds_left < self._seconds_of_sigma:
                if known is None:
                    self.shortened += f"; sigma is a guess, since no loss was near {LOSS:g}"
                return known or estimate
            sigma = estimate

    @property
    def _seconds_left(self) -> float:
        return self._end_at - time.perf_counter()

    @property
    def _seconds_of_sigma(self) -> float:
        return self._seconds_each * (1 + 2 * len(self._seeds)) * self._read.cost

    async def _fit_to_time(self) -> None:
        """Have fewer genomes score fewer and shorter answers until `_USUAL` sigmas fit.

        Genomes tell the least: their losses differ little, those of answers much.
        """
        whole = self._read
        await self._timed(whole.shortened(2, 2 * _LEAST_TOKENS), [Genome()])
        seconds = self._seconds_left / (_USUAL + 1)
        if self._seconds_of_sigma <= seconds:
            return
        self._seeds = self._seeds[:1]
        num_answers, num_tokens = len(whole.answers_P), whole.longest
        while self._seconds_of_sigma > seconds:
            least = _LEAST_ANSWERS if self._seconds_of_sigma <= self._seconds_left else 1
            if num_tokens > _LEAST_TOKENS:
                num_tokens = max(_LEAST_TOKENS, num_tokens // 2)
            elif num_answers > least:
                num_answers = max(least, num_answers // 2)
            else:
                break
            self._read = whole.shortened(num_answers, num_tokens)
        num_read = math.ceil(whole.num_tokens / self._read.scale)
        self.shortened = (
            f"for lack of time 2 genomes read {plural(len(self._read.answers_P), 'answer')}, "
            f"{num_read} tokens of about {whole.num_tokens:.0f} in each"
        )

    async def _timed(self, read: CentreAnswers, genomes_G: Sequence[Genome]) -> NDArray[np.float64]:
        began = time.perf_counter()
        scores_P_G = mean_rewards(await self._sampler.rollout(0, read.answers_P, genomes_G))
        self._seconds_each = (time.perf_counter() - began) / (len(genomes_G) * read.cost)
        return scores_P_G

    async def _loss_at(self, sigma: float) -> float:
        """Measure the loss per answer, in nats.

        Raises:
            ConfigError: The σ is out of range.
        """
        losses = self.losses
        if not _RANGE[0] <= sigma <= _RANGE[1]:
            raise ConfigError(
                f"optimizer.sigma=auto: genomes at no sigma from {min(losses):.2g} to "
                f"{max(losses):.2g} cost the centre's answers {LOSS:g} nats; they cost "
                f"{min(losses.values()):.3g} to {max(losses.values()):.3g}; give optimizer.sigma a "
                "number"
            )
        if sigma not in losses:
            tried_G = [Genome((Term(seed, sigma),)) for seed in self._seeds]
            genomes_G = [Genome(), *tried_G, *map(mirrored, tried_G)]
            scores_P_G = await self._timed(self._read, genomes_G)
            lost = float(np.nanmean(scores_P_G[:, :1] - scores_P_G[:, 1:])) * self._read.scale
            losses[sigma] = min(lost, _LARGEST) if math.isfinite(lost) else _LARGEST
            say(f"  sigma {sigma:<9.2g} {losses[sigma]:.3f} nats, {self._seconds_left:.0f} s left")
        return losses[sigma]

    def _estimate(self, sigma: float) -> float:
        """Estimate the σ at which the loss is `LOSS`, from losses on both sides or the last one."""
        low = max((each for each, loss in self.losses.items() if loss < LOSS), default=0.0)
        above = (each for each, loss in self.losses.items() if loss >= LOSS and each > low)
        high = min(above, default=math.inf)
        if low and high < math.inf:
            return _crossing(low, self.losses[low], high, self.losses[high])
        factor = math.sqrt(LOSS / max(self.losses[sigma], LOSS / _FARTHEST**2))
        return sigma * max(factor, 1 / _FARTHEST)


def _crossing(low: float, loss_low: float, high: float, loss_high: float) -> float:
    """Return the σ at which a power law through both losses reaches `LOSS`.

    Its exponent is near 2, and at most 4.
    """
    exponent = math.log(loss_high / max(loss_low, loss_high * (low / high) ** 4), high / low)
    return high * (LOSS / loss_high) ** (1 / exponent)


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def learning_rate(sigma: float, population_size: int, factors_T: Sequence[float]) -> float:
    """Return α of plain ES, whose steps' noise adds up to `DRIFT` · σ, to two digits.

    α is multiplied by `factors_T`, one per generation.
    """
    longest, drift = max(factors_T), math.hypot(*factors_T)
    step = min(LONGEST_STEP / longest, DRIFT / drift) if longest > 0 else LONGEST_STEP
    return _two_digits(sigma * step * math.sqrt(population_size))


def options_of(optimizer: OptimizerBuilder, sigma: float, num_generations: int) -> dict[str, float]:
    """Return the values of the optimizer's options that are `auto`, at this σ."""
    factors_T = [optimizer.rate_factor(each, num_generations) for each in range(num_generations)]
    es: dict[str, object] = {
        "sigma": sigma,
        "learning_rate": learning_rate(sigma, optimizer.population_size, factors_T),
        "population_size": optimizer.population_size,
    }
    carried = optimizer.carried(es)
    return {name: cast(float, carried[name]) for name in optimizer.unsettled}
