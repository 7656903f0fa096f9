"""Which runs are stopped early, by what others had come to by then.

A run's standing at a generation is the best that it has measured until then. The median rule stops
a run that is below the median of the others' standings at that generation (Golovin et al. 2017,
Vizier). Successive halving (Jamieson & Talwalkar 2016; asynchronous as in Li et al. 2020) looks at
two rungs, a ninth and a third of the way, and stops a run that is not among the best third of all
that have come as far. Neither waits for anybody: a run is judged by those that were there before.

The first measurement does not count: all runs begin at the same base.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import TypeAlias

Curve: TypeAlias = Sequence[tuple[int, float]]
"""(generation, metric) of a run, in order; no NaN."""
_BEST_SHARE = 3


def falls_behind(
    curve: Curve, others: Sequence[Curve], rule: str, at_least: int, num_generations: int
) -> bool:
    """Whether a run should be stopped where its curve ends.

    Args:
        curve: of the run.
        others: of all others, those too that are over.
        rule: "median" or "halving".
        at_least: others that must have come as far.
        num_generations: of the whole run.
    """
    generation = curve[-1][0] if curve else 0
    if rule == "halving":
        rungs = [num_generations // _BEST_SHARE**power for power in (2, 1)]
        generation = max((rung for rung in rungs if 0 < rung <= generation), default=0)
    if not 0 < generation < num_generations:
        return False
    own = _standing(curve, generation)
    reached = [other for other in others if other and other[-1][0] >= generation]
    standings = [_standing(other, generation) for other in reached]
    if len(standings) < at_least:
        return False
    if rule == "median":
        return own < median(standings)
    better = sum(standing > own for standing in standings)
    return better >= max((len(standings) + 1) // _BEST_SHARE, 1)


def _standing(curve: Curve, generation: int) -> float:
    """The best of what was measured until then, but at first; lowest where nothing was."""
    measured = (value for at, value in curve if 0 < at <= generation)
    return max(measured, default=-math.inf)
