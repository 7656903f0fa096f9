"""Evaluation of the centre on held-out problems: greedily once, or by several attempts.

The centre answers beside the resident genomes, so measuring loads nothing and changes nothing: a
run comes out the same however often it is measured. Sampling seeds depend on problem and attempt
alone, so two measurements of a run differ by its centre and not by their luck.

Several attempts at a temperature also give pass@k, the chance that one of k attempts solves a
problem, by the unbiased estimator (`rl.objectives`) for every power of two up to the attempts, and
for all of them.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import chz

from es_cookbook.common.errors import ConfigError
from es_cookbook.population.results import Estimate, Results, results_of
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.objectives import REWARD
from es_cookbook.rl.rollouts import (
    REPORTED,
    answer_lengths,
    env_metrics,
    lost_rollouts,
    mean_of,
    mean_rewards,
)
from es_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup

_RESAMPLES = 1000
"""Resamples for intervals during a run; `evaluate` takes ten times as many."""


def check_evaluation(attempts: int, temperature: float, prefix: str = "eval_") -> None:
    """Refuse what cannot be measured; `prefix` comes before the names of the options.

    Raises:
        ConfigError: No attempt, no temperature, or several attempts that are all alike.
    """
    if attempts < 1:
        raise ConfigError(f"{prefix}attempts must be at least 1, found {attempts}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(
            f"{prefix}temperature must be 0 (greedy) or positive, found {temperature}"
        )
    if attempts > 1 and temperature == 0:
        raise ConfigError(
            f"{prefix}attempts={attempts} would all be alike, since {prefix}temperature=0 is "
            "greedy; set it above 0"
        )


async def evaluate(
    sampler: PopulationSampler,
    env_group_builders_P: Sequence[EnvGroupBuilder],
    attempts: int = 1,
    temperature: float = 0.0,
    extra_P: Sequence[EnvGroupBuilder] = (),
) -> dict[str, float]:
    """Measure the centre on held-out problems.

    Args:
        sampler: provides the engine and all other sampling parameters.
        env_group_builders_P: the problems.
        attempts: attempts at each problem.
        temperature: temperature of the attempts; 0 is greedy.
        extra_P: further problems of which only the metrics are reported, such as a regulariser's.

    Returns:
        `test/reward/mean`, `test/env/all/<metric>` and, by tag, `test/env/<tag>/<metric>`, all over
        the rollouts that were not lost, `test/rollouts/failed`, and how long answers are
        (`answer_lengths`). For several attempts, where Envs report the metric `correct` or
        `solved`, or rewards are 0 or 1,
        `test/pass@<k>`: the mean over the problems that have k attempts left; and `test/maj@<k>`,
        of the answer that most of k give, where Envs say what they read. `test/problems` counts the
        problems, and `test/low/<key>` and `test/high/<key>` are the 95 % interval over them of each
        mean that is not of a tag. Where not all rollouts report it, `test/reported/<key>` says how
        many did. Nothing without problems.

    Raises:
        TooManyLostError: More than the sampler's `max_failed_fraction` of the rollouts were lost.
    """
    if not env_group_builders_P:
        return {}
    # The extra ones come last: the held-out problems keep their sampling seeds.
    all_P = [*env_group_builders_P, *extra_P]
    groups_P = await attempt(sampler, all_P, attempts, temperature)
    num_problems = len(env_group_builders_P)
    held_out_P = groups_P[:num_problems]
    results = results_of(env_group_builders_P, held_out_P)
    at_ks = results.at_ks()
    metrics = summary(held_out_P, at_ks, groups_P[num_problems:])
    metrics |= _intervals(results, at_ks)
    metrics |= answer_lengths(held_out_P, env_group_builders_P)
    return {f"test/{key}": value for key, value in metrics.items()}


def _intervals(results: Results, at_ks: Mapping[str, Estimate]) -> dict[str, float]:
    estimate = functools.partial(results.estimate, resamples=_RESAMPLES)
    num_problems = len(results.names_P)
    found: dict[str, Estimate] = {"reward/mean": estimate(REWARD)}
    found |= {f"env/all/{name}": estimate(name) for name in results.outcomes.metrics}
    found |= at_ks
    known = {key: estimate for key, estimate in found.items() if estimate.problems}
    count = num_problems * results.attempts
    few = {key: each.answers for key, each in known.items() if each.answers < count}
    return {
        "problems": float(num_problems),
        **{f"{REPORTED}{key}": float(answers) for key, answers in few.items()},
        **{f"low/{key}": estimate.low for key, estimate in known.items()},
        **{f"high/{key}": estimate.high for key, estimate in known.items()},
    }


async def attempt(
    sampler: PopulationSampler,
    env_group_builders_P: Sequence[EnvGroupBuilder],
    attempts: int = 1,
    temperature: float = 0.0,
) -> list[TrajectoryGroup]:
    """Run the centre's attempts at problems, with the sampling seeds of all evaluations of the run.

    `population.results.results_of` makes arrays of them, which have intervals and can be compared.

    Raises:
        TooManyLostError: More than the sampler's `max_failed_fraction` of the rollouts were lost.
    """
    sampling = chz.replace(sampler.sampling, temperature=temperature)
    return await sampler.rollout_centre(env_group_builders_P, sampling, attempts)


def summary(
    groups_P: Sequence[TrajectoryGroup],
    at_ks: Mapping[str, Estimate],
    extra_P: Sequence[TrajectoryGroup] = (),
) -> dict[str, float]:
    """Return the means of an evaluation, by the names that `evaluate` gives them without `test/`.

    `at_ks` are those of its results. Of the extra problems only their Envs' metrics count, and lost
    rollouts.
    """
    all_P = [*groups_P, *extra_P]
    return {
        "reward/mean": mean_of(mean_rewards(groups_P).ravel().tolist()),
        **env_metrics(all_P),
        "rollouts/failed": float(len(lost_rollouts(all_P))),
        **answer_lengths(groups_P),
        **{key: estimate.value for key, estimate in at_ks.items()},
    }
