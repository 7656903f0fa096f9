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

The search keeps to a time by the clock: that of two generations as far as the centre's answers tell
it, at least `LEAST_SECONDS` and at most `MOST_SECONDS`. A σ under way when it is up is finished.
If the time is short, answers are cut when a third of it has gone (`centre_answers`, as soon as
something was said), and as few genomes, tokens and answers are read as fit in; the loss of an
answer is taken to grow with its length. The next σ is where the power law through the last losses
has `LOSS`, and the search ends when a loss is near that, or there is no time for another σ.

α follows: plain ES's step has an RMS of α/√N for fitness of unit variance, and most of it is noise;
other fitness is told in units of its RMS (`optimizers.spread`). The noise of steps whose rates a
schedule multiplies by f adds up to α/√N · √Σf², which is made `DRIFT` · σ: a little farther than a
genome stands from the centre.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import anyio
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
"""Of genomes that read the centre's answers, at each σ."""
_ANSWERING = 7  # With the centre an even number, which games want.
"""Genomes that answer themselves, at the σ that is taken."""
_FIRST, _FARTHEST = 2.0**-8, 16.0
"""The first σ, and the largest factor to the next one."""
_NEAR = 1.25
"""Largest factor between `LOSS` and the loss that ends the search."""
_RANGE = 2.0**-24, 2.0**8
_LARGEST = 1e3
"""Of losses: a model may be so far off that its log-probabilities are no numbers."""
_USUAL = 4
"""Sigmas that are tried, as a rule."""
LEAST_SECONDS, MOST_SECONDS = 30.0, 45.0
"""Of the search, whatever a generation takes; the σ under way then is finished."""
_BATCHED = 0.25
"""Of the time of a rollout among few, what one among many takes."""
_LEAST_TOKENS, _LEAST_ANSWERS = 32, 4
"""Fewer answers only where a single σ would take more than all of the time left."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundSigma:
    """A σ, and what it was taken by.

    Attributes:
        sigma: standard deviation of the perturbations.
        losses: by σ, for all that were tried.
        rewards_P_G: of some problems, by the centre and behind it by genomes at `sigma`; there may
            have been no time for genomes, or for any.
        seconds: that it took.
        shortened: what was left out to keep to the time; empty if nothing.
    """

    sigma: float
    losses: Mapping[float, float]
    rewards_P_G: NDArray[np.float64]
    seconds: float
    shortened: str = ""

    def table(self) -> str:
        """As a person reads it."""
        rows = [f"  {sigma:<9.2g} {loss:.3f}" for sigma, loss in sorted(self.losses.items())]
        rewards = "".join(f"; {each}" for each in self._rewards())
        lines = [
            "  sigma     nats that the centre's answers lose",
            *rows,
            f"sigma={self.sigma:g} is where they lose {LOSS:g}{rewards}; {self.seconds:.1f} s",
        ]
        if self.shortened:
            lines.append(self.shortened)
        given = self.rewards_P_G
        if given.shape[1] > 1 and np.nanmin(given) == np.nanmax(given):
            lines.append(
                f"every reward was {np.nanmin(given):g}: answers change at this sigma, and no "
                "reward says which are better"
            )
        return "\n".join(lines)

    def _rewards(self) -> Iterator[str]:
        if self.rewards_P_G.size:
            centre, *genomes_G = np.nanmean(self.rewards_P_G, axis=0).tolist()
            of_genomes = (
                f", of {len(genomes_G)} genomes {min(genomes_G):.3g} to {max(genomes_G):.3g},"
                if genomes_G
                else ""
            )
            yield (
                f"reward of the centre {centre:.3g}{of_genomes} on "
                f"{plural(len(self.rewards_P_G), 'problem')}"
            )


async def find_sigma(
    sampler: PopulationSampler,
    batch_P: Sequence[EnvGroupBuilder],
    num_rollouts: int = 0,
    answers: CentreAnswers | None = None,
) -> FoundSigma:
    """The σ at which the centre's answers lose `LOSS`, to two digits.

    Args:
        sampler: samples as the run does, one attempt each; genomes' seeds follow from its own.
        batch_P: problems, of which the first few are asked.
        num_rollouts: of a generation, whose time bounds the search's.
        answers: of the centre to these problems and maybe to more, if they are known.

    Raises:
        ConfigError: The centre gives no answers, or no σ of a wide range changes them so much.
        TooManyLostError: As `PopulationSampler.rollout`.
    """
    began, problems_P = time.perf_counter(), batch_P[:_PROBLEMS]
    if answers is None:
        say(f"looking for sigma: the centre answers {plural(len(problems_P), 'problem')} first")
        answers = await centre_answers(sampler, problems_P, MOST_SECONDS / 3)
    else:
        say(f"looking for sigma: what genomes lose of the first {len(problems_P)} answers")
    answers = answers.first(len(problems_P))
    if not answers.answers_P:
        raise ConfigError(
            f"optimizer.sigma=auto: the centre gave no answer to any of "
            f"{plural(len(problems_P), 'problem')}; give optimizer.sigma a number"
        )
    generation = _BATCHED * answers.seconds * num_rollouts / len(problems_P)
    seconds = min(max(LEAST_SECONDS, 2 * generation), MOST_SECONDS)
    search = _Search(sampler, answers, began + seconds)
    sigma = _two_digits(await search.crossing())
    rewards_P_G = await _rewards(search, problems_P, sigma)
    took = time.perf_counter() - began
    return FoundSigma(sigma, search.losses, rewards_P_G, took, search.shortened)


async def _rewards(
    search: "_Search", problems_P: Sequence[EnvGroupBuilder], sigma: float
) -> NDArray[np.float64]:
    """Of the centre and of genomes at this σ, if there is time."""
    answers = search.answers
    if answers.rewards_P is None:
        return np.zeros((0, 0))
    rewards_P_G = answers.rewards_P[:, None]
    genomes_G = [Genome(), *_genomes(search.seeds_G, sigma)]
    if _BATCHED * len(genomes_G) * answers.seconds > search.seconds_left:
        return rewards_P_G
    with anyio.move_on_after(search.seconds_left):
        answered_P = await search.sampler.rollout(0, problems_P, genomes_G)
        rewards_P_G = mean_rewards(answered_P)
    return rewards_P_G


class _Search:
    """Looks for the σ at which answers lose `LOSS`, until `end_at` by `time.perf_counter`.

    Attributes:
        losses: by σ.
        shortened: what was left out to keep to the time.
    """

    def __init__(self, sampler: PopulationSampler, answers: CentreAnswers, end_at: float) -> None:
        self.sampler, self.answers, self._end_at = sampler, answers, end_at
        self.seeds_G = [derive_seed(sampler.run_seed, "sigma", i) for i in range(_ANSWERING)]
        self.losses: dict[float, float] = {}
        self.shortened = ""
        self._read, self._num_pairs = answers, _PAIRS
        self._seconds_each = math.nan  # For each genome, over the cost of what it reads.

    @property
    def seconds_left(self) -> float:
        return self._end_at - time.perf_counter()

    async def crossing(self) -> float:
        """Where the loss is `LOSS`.

        Raises:
            ConfigError: At no σ of a wide range.
        """
        await self._plan()
        left_out = f"; {self.shortened}" if self.shortened else ""
        seconds = max(self._seconds_of_sigma, 0.1)
        say(f"  about {_USUAL} sigmas are tried, about {seconds:.1f} s each{left_out}")
        sigma, known = _FIRST, None
        while True:
            loss = await self.loss_at(sigma)
            estimate = self._estimate(sigma)
            if LOSS / 50 <= loss <= 50 * LOSS:  # The power law goes on from there.
                known = estimate
            if LOSS / _NEAR <= loss <= LOSS * _NEAR or estimate in self.losses:
                return estimate
            if self.seconds_left < self._seconds_of_sigma:
                if known is None:
                    self.shortened += f"; sigma is a guess, since no loss was near {LOSS:g}"
                return known or estimate
            sigma = estimate

    @property
    def _seconds_of_sigma(self) -> float:
        return self._seconds_each * (1 + 2 * self._num_pairs) * self._read.cost

    async def _plan(self) -> None:
        """Have so much read that about `_USUAL` sigmas fit into the time."""
        # Reading an answer takes no longer than giving it.
        self._seconds_each = self.answers.seconds / self.answers.cost
        if self.answers.rewards_P is None or self._seconds_of_sigma > self.seconds_left / _USUAL:
            await self._timed(self.answers.shortened(2, 2 * _LEAST_TOKENS), [Genome()])
        self._shorten(self.seconds_left / (_USUAL + 1))

    async def _timed(self, read: CentreAnswers, genomes_G: Sequence[Genome]) -> NDArray[np.float64]:
        began = time.perf_counter()
        scores_P_G = mean_rewards(await self.sampler.rollout(0, read.answers_P, genomes_G))
        self._seconds_each = (time.perf_counter() - began) / (len(genomes_G) * read.cost)
        return scores_P_G

    def _shorten(self, seconds: float) -> None:
        """Have fewer genomes read fewer and shorter answers, so that a σ takes so many seconds.

        Genomes tell the least: their losses differ little, those of answers much.
        """
        if self._seconds_of_sigma <= seconds:
            return
        self._num_pairs = 1
        num_answers, num_tokens = len(self._read.answers_P), self._read.longest
        while self._seconds_of_sigma > seconds:
            if num_tokens > _LEAST_TOKENS:
                num_tokens = max(_LEAST_TOKENS, num_tokens // 2)
            elif num_answers > _LEAST_ANSWERS:
                num_answers = max(_LEAST_ANSWERS, num_answers // 2)
            elif num_answers > 1 and self._seconds_of_sigma > self.seconds_left:
                num_answers -= 1
            else:
                break
            self._read = self.answers.shortened(num_answers, num_tokens)
        num_read = math.ceil(self.answers.num_tokens / self._read.scale)
        self.shortened = (
            f"for lack of time 2 genomes read {plural(len(self._read.answers_P), 'answer')}, "
            f"{num_read} tokens of about {self.answers.num_tokens:.0f} in each"
        )

    async def loss_at(self, sigma: float) -> float:
        """Nats that an answer loses.

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
            tried_G = _genomes(self.seeds_G[: self._num_pairs], sigma)
            genomes_G = [Genome(), *tried_G, *map(mirrored, tried_G)]
            scores_P_G = await self._timed(self._read, genomes_G)
            lost = float(np.nanmean(scores_P_G[:, :1] - scores_P_G[:, 1:])) * self._read.scale
            losses[sigma] = min(lost, _LARGEST) if math.isfinite(lost) else _LARGEST
            say(f"  sigma {sigma:<9.2g} {losses[sigma]:.3f} nats, {self.seconds_left:.0f} s left")
        return losses[sigma]

    def _estimate(self, sigma: float) -> float:
        """Where the loss is `LOSS`, by the losses on both sides of it, or by the last one alone."""
        low = max((each for each, loss in self.losses.items() if loss < LOSS), default=0.0)
        above = (each for each, loss in self.losses.items() if loss >= LOSS and each > low)
        high = min(above, default=math.inf)
        if low and high < math.inf:
            return _crossing(low, self.losses[low], high, self.losses[high])
        factor = math.sqrt(LOSS / max(self.losses[sigma], LOSS / _FARTHEST**2))
        return sigma * max(factor, 1 / _FARTHEST)


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
