"""Length moves rewards as the formulas say, and never past what a reward may be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.plugins.objectives.length import normalised_fractions, penalised

share = st.floats(0, 1)


def test_lost_rollouts_do_not_count_among_lengths() -> None:
    found = normalised_fractions(np.array([[20.0, 40.0], [np.nan, np.nan]]))
    expected = [0.15865525393145707, 0.8413447460685429, np.nan, np.nan]
    assert found.ravel().tolist() == pytest.approx(expected, nan_ok=True)


@given(reward=share, strength=share, f=share, g=share)
def test_longer_costs_the_right_and_pays_the_wrong(
    reward: float, strength: float, f: float, g: float
) -> None:
    short, long = sorted((f, g))
    right = penalised(np.full(2, reward), np.array([True] * 2), np.array([short, long]), strength)
    wrong = penalised(np.full(2, reward), np.array([False] * 2), np.array([short, long]), strength)
    assert right[0] >= right[1] - 1e-15
    assert wrong[0] <= wrong[1] + 1e-15
    assert right.min() >= 0 and wrong.max() <= 1 + 1e-15
