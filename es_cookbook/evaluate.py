"""How good the centre is on problems it never trained on: greedy, one attempt each.

The centre answers beside the resident genomes, so measuring loads nothing and changes nothing: a
run comes out the same however often it is measured.
"""

import math
from collections.abc import Sequence

import chz

from es_cookbook.population_sampler import PopulationSampler
from es_cookbook.rl.rollouts import env_metrics, lost_rollouts, mean_rewards
from es_cookbook.rl.types import EnvGroupBuilder


async def evaluate(
    sampler: PopulationSampler, env_group_builders_P: Sequence[EnvGroupBuilder]
) -> dict[str, float]:
    """Measure the centre on held-out problems.

    Returns:
        `test/reward/mean`, `test/env/all/<metric>` and, by tag, `test/env/<tag>/<metric>`, all over
        the rollouts that were not lost, and `test/rollouts/failed`. Nothing without problems.

    Raises:
        TooManyLostError: More than the sampler's `max_failed_fraction` of the rollouts were lost.
    """
    if not env_group_builders_P:
        return {}
    greedy = chz.replace(sampler.sampling, temperature=0.0)
    groups_P = await sampler.rollout_centre(env_group_builders_P, greedy)
    rewards = [
        reward for reward in mean_rewards(groups_P).ravel().tolist() if math.isfinite(reward)
    ]
    metrics = {
        "reward/mean": math.fsum(rewards) / len(rewards) if rewards else math.nan,
        **env_metrics(groups_P),
        "rollouts/failed": float(len(lost_rollouts(groups_P))),
    }
    return {f"test/{key}": value for key, value in metrics.items()}
