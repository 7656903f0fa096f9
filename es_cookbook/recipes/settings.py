"""Settings that several recipes begin with."""

from collections.abc import Mapping

from es_cookbook.common.schedules import Cosine

HALF_KNOWN: Mapping[str, object] = {
    "population_size": 256,
    "antithetic": False,
    "sigma": 0.01,
    "learning_rate": 0.04,
    "learning_rate_schedule": Cosine(),
}
"""Of `es`, for small models that half know their task: no pairs, and steps of four times sigma.

Picked in trials with sums of digits: more rollouts a generation and a learning rate of four sigma,
in place of one or two, helped; a sigma of 0.03 did not.
"""
