"""Rewards count by their weights, whatever their spread."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.objectives.weighted import Gdpo, normalised
from es_cookbook.rl.objectives import Outcomes

NAN = math.nan


def of(rewards_P_G_K: Any, **metrics: Any) -> Outcomes:
    rewards = np.array(rewards_P_G_K, dtype=np.float64)
    found = {name: np.array(m, float) for name, m in metrics.items()}
    return Outcomes(rewards, np.ones(rewards.shape), found)


# One problem, three genomes, one attempt each.
CORRECT = [[[0.0], [1.0], [1.0]]]
SHORT = [[[0.52], [0.51], [0.50]]]
SUM = [[[0.52], [1.51], [1.50]]]


def test_the_formula_on_literals() -> None:
    found = Gdpo(rewards=("correct", "short"), weights=(2.0, 0.5))(
        of(SUM, correct=CORRECT, short=SHORT)
    )
    # Means 2/3 and 0.51; deviations sqrt(2)/3 and 0.01 sqrt(2/3).
    z = math.sqrt(1.5)
    expected = [[-2 * math.sqrt(2) + 0.5 * z, math.sqrt(2), math.sqrt(2) - 0.5 * z]]
    assert found == pytest.approx(np.array(expected))


def test_a_reward_that_a_problem_does_not_have_adds_nothing_there() -> None:
    rewards = [[[0.0], [1.0]], [[0.0], [1.0]]]
    only_first = [[[0.0], [1.0]], [[NAN], [NAN]]]
    outcomes = of(rewards, exact=only_first, format=rewards)
    found = Gdpo(rewards=("exact", "format", "number"))(outcomes)
    assert found.tolist() == [[-2.0, 2.0], [-1.0, 1.0]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rewards": ()}, "rewards must be names that differ, at least one, found ''"),
        ({"rewards": ("a",), "weights": (1.0, 2.0)}, "one for each of the 1 rewards, found 2"),
    ],
)
def test_rewards_that_cannot_be_added_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Gdpo(**options)


finite = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(
    arrays.arrays(np.float64, (3, 4), elements=st.one_of(finite, st.just(NAN))),
    st.floats(0.001, 1000),
    st.integers(-1000, 1000),
)
def test_scale_and_offset_do_not_matter(values_P_G: Any, scale: float, offset: int) -> None:
    values_P_G = np.round(values_P_G, 3)
    found_P_G = normalised(values_P_G)
    assert np.isfinite(found_P_G).all()
    assert found_P_G.mean(axis=1) == pytest.approx(np.zeros(3), abs=1e-6)
    assert normalised(values_P_G * scale + offset) == pytest.approx(found_P_G, abs=1e-3)
