"""From rewards to fitness: one number per genome, centred, so that no signal means no step.

A fitness is a frozen function of `rewards_P_G` (problem p, genome g; NaN where a rollout was lost)
that returns `fitness_G`: zero for every genome when all genomes did equally well, and NaN for a
genome that lost all its rollouts, which the optimizer then leaves out.

The one idea is how lost rollouts are treated. A mean over a genome's remaining rollouts would be
biased against genomes that lost an easy problem. So a genome's score is the mean, over the problems
that it has, of its reward minus that problem's mean over the genomes that have it. With nothing
lost this is the genome's mean reward minus the population's.

Further objectives, such as staying close to the base, are rewards on problems of their own
(`Added`): a genome's total score is its score plus weight times its score there, each with the
baselines of its problems. A weight of 0 changes no bit.

Left out: fitness as a function of anything but rewards (novelty); an Env puts that in its reward.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.checks import check_types, in_range
from es_cookbook.common.registry import Registered

FITNESS_NAMES = Registered("fitness")
"""Names on the command line."""

Floats: TypeAlias = NDArray[np.float64]
"""Rewards, scores and fitness."""
TIE = 1e-12
"""Scores closer together than this share of the largest reward difference count as equal."""


Added: TypeAlias = Sequence[tuple[float, Floats]]
"""Rewards of the same genomes on other problems (NaN where a rollout was lost), each with a weight,
of their mean reward relative to the main problems'."""


@chz.chz
class Fitness(ABC):
    """A mapping from rewards to fitness."""

    _types = chz.validate(check_types)

    has_unit_variance: ClassVar[bool] = False
    """Holds in every generation with a signal; an `auto` learning rate is for such fitness."""

    @abstractmethod
    def __call__(self, rewards_P_G: Floats, added: Added = ()) -> Floats:
        """Return the fitness of each genome, NaN for a genome that lost all its rollouts.

        Args:
            rewards_P_G: rewards on the main problems.
            added: rewards on others.
        """


@chz.chz
class ZScore(Fitness):
    """Scores in units of their own standard deviation over the genomes (ES at Scale).

    >>> ZScore()(np.array([[0.0, 1.0], [0.0, 1.0]]))
    array([-1.,  1.])
    """

    has_unit_variance: ClassVar[bool] = True

    def __call__(self, rewards_P_G: Floats, added: Added = ()) -> Floats:
        """Return scores minus their mean, over their (population) standard deviation."""
        scores_G = total_scores(rewards_P_G, added)
        present_G = np.isfinite(scores_G)
        if not scores_G[present_G].any():
            return scores_G
        # In units of the largest first, so that no square under- or overflows.
        scores_G /= np.abs(scores_G[present_G]).max()
        scores_G -= scores_G[present_G].mean()
        return scores_G / scores_G[present_G].std()


@chz.chz
class CentredRank(Fitness):
    """Ranks, spread evenly over -1/2 … 1/2; ties share their average rank (OpenAI's ES).

    Not affected by outliers or by any monotone change of the scores.

    >>> CentredRank()(np.array([[5.0, 1.0, 100.0]]))
    array([ 0. , -0.5,  0.5])
    """

    def __call__(self, rewards_P_G: Floats, added: Added = ()) -> Floats:
        """Return rank / (n - 1) - 1/2 over the n genomes that have a score."""
        fitness_G = total_scores(rewards_P_G, added)
        present_G = np.isfinite(fitness_G)
        n = int(present_G.sum())
        if n:
            scores = fitness_G[present_G]
            ranks = average_ranks(scores, scores)
            fitness_G[present_G] = ranks / (n - 1) - 0.5 if n > 1 else 0.0
        return fitness_G


@chz.chz
class Raw(Fitness):
    """Scores as they are: mean reward minus the population's, in units of reward.

    Still centred: without mirrored pairs a constant that all genomes share would move the centre
    by noise.

    >>> Raw()(np.array([[0.0, 1.0], [0.0, 3.0]]))
    array([-1.,  1.])
    """

    clip: float | None = chz.field(default=None, doc="scores are cut to ± this; None: not")

    _clip = in_range("clip", above=0, prefix="fitness.")

    def __call__(self, rewards_P_G: Floats, added: Added = ()) -> Floats:
        scores_G = total_scores(rewards_P_G, added)
        return scores_G if self.clip is None else np.clip(scores_G, -self.clip, self.clip)


@chz.chz
class PerProblemBaseline(Fitness):
    """Scores in units of the standard deviation of all single rewards of the generation (EGGROLL).

    Smaller than the z-score where problems differ much in difficulty or rewards are noisy: then the
    step is smaller.

    >>> PerProblemBaseline()(np.array([[0.0, 1.0], [0.0, 1.0]]))
    array([-1.,  1.])
    """

    def __call__(self, rewards_P_G: Floats, added: Added = ()) -> Floats:
        """Return scores over the global standard deviation of the rewards that were not lost.

        That of the main problems' rewards; where they are all the same, scores as they are.
        """
        scores_G = total_scores(rewards_P_G, added)
        if not scores_G[np.isfinite(scores_G)].any():
            return scores_G
        rewards = rewards_P_G[np.isfinite(rewards_P_G)]
        above = rewards - rewards.min()
        if not above.any():
            return scores_G
        return scores_G / above.max() / (above / above.max()).std()


def average_ranks(values: Floats, among: Floats) -> Floats:
    """Return ranks from 0 of numbers that are among others; ties share their average rank."""
    ordered = np.sort(among)
    below = np.searchsorted(ordered, values, side="left")
    through = np.searchsorted(ordered, values, side="right")
    return (below + through - 1) / 2


def reliability(rewards_P_G: Floats) -> float:
    """Measure how far problems agree on which genomes are better: signal against luck.

    The share of the variance of genomes' mean rewards that other problems would reproduce: 1 -
    (variance of a mean's error) / (variance of the means). That is Hoyt's coefficient (1941), or
    Cronbach's alpha over problems; the error is the residual of the rewards after problems and
    genomes are subtracted. Near 0 a step is noise, however large the differences look. In
    [0, 1]; 0 where there is nothing to compare.

    >>> reliability(np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]))
    1.0
    >>> reliability(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
    0.0
    """
    scores_G = centred_scores(rewards_P_G)
    genomes_G = np.isfinite(scores_G)
    present_P_G = np.isfinite(rewards_P_G)
    used_P = present_P_G.any(axis=1)
    num_genomes, num_problems = int(genomes_G.sum()), int(used_P.sum())
    free = int(present_P_G.sum()) - num_problems - num_genomes + 1
    if num_genomes < 2 or free < 1 or not scores_G[genomes_G].any():
        return 0.0
    means_P = np.nanmean(rewards_P_G[used_P], axis=1)
    rest = rewards_P_G[used_P] - means_P[:, None] - scores_G[None]
    error = float(np.nansum(rest**2)) / free
    per_score = float(np.mean(1 / present_P_G.sum(axis=0)[genomes_G]))
    variance = float(scores_G[genomes_G].var(ddof=1))
    return max(0.0, 1.0 - error * per_score / variance)


def total_scores(rewards_P_G: Floats, added: Added = ()) -> Floats:
    """Add weight times the scores on each of the other problems to those on the main ones.

    NaN for a genome without a main problem; one that lost all the others counts as average there.

    >>> main_P_G, other_P_G = np.array([[0.0, 1.0]]), np.array([[4.0, 2.0]])
    >>> total_scores(main_P_G, [(0.25, other_P_G)])
    array([-0.25,  0.25])
    """
    scores_G = centred_scores(rewards_P_G)
    parts = [scores_G]
    for weight, others_P_G in added:
        if weight:
            others_G = centred_scores(others_P_G)
            parts.append(weight * np.where(np.isnan(others_G), 0.0, others_G))
            scores_G = scores_G + parts[-1]
    if len(parts) == 1:
        return scores_G
    return _without_rounding(scores_G, float(np.nanmax(np.abs(parts))))


def centred_scores(rewards_P_G: Floats) -> Floats:
    """Return each genome's mean reward relative to the problems' means; NaN if it has no rewards.

    Genomes with the same rewards in another order get exactly the same score (the sums are
    correctly rounded), and all scores are exactly zero when they differ by no more than rounding.
    """
    present_P_G = ~np.isnan(rewards_P_G)
    baselines_P = np.zeros(len(rewards_P_G))
    largest_spread = 0.0
    for p, present_G in enumerate(present_P_G):
        if present_G.any():
            rewards = rewards_P_G[p, present_G]
            lowest = float(rewards.min())
            # Above the lowest, so that equal rewards have exactly themselves as their mean.
            above = rewards - lowest
            baselines_P[p] = lowest + math.fsum(above.tolist()) / len(above)
            largest_spread = max(largest_spread, float(above.max()))

    scores_G = np.full(rewards_P_G.shape[1], np.nan)
    for g, present_P in enumerate(present_P_G.T):
        if present_P.any():
            terms = [*rewards_P_G[present_P, g].tolist(), *(-baselines_P[present_P]).tolist()]
            scores_G[g] = math.fsum(terms) / int(present_P.sum())
    return _without_rounding(scores_G, largest_spread)


def _without_rounding(scores_G: Floats, scale: float) -> Floats:
    """Return the scores, all zero if they differ by no more than rounding at this scale."""
    scored_G = ~np.isnan(scores_G)
    if scored_G.any() and float(np.ptp(scores_G[scored_G])) <= TIE * scale:
        scores_G[scored_G] = 0.0
    return scores_G
