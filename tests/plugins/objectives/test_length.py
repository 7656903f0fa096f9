"""Length moves rewards as the formulas say, and never past what a reward may be."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.plugins.objectives.length import penalised

share = st.floats(0, 1)


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
