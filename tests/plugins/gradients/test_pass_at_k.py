"""Advantages of pass@k are means over groups of answers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.plugins.gradients.policy_gradient import pass_at_k_advantages


@pytest.mark.parametrize(
    ("n", "c", "k", "of_solved", "of_failed"),
    [
        # ρ = 1 - C(3, 2)/C(4, 2) = s = 1/2; failed: 1/2 - C(2, 1)/C(3, 1) = -1/6.
        (4, 1, 2, 1.0, -1 / 3),
        # ρ = 1 - C(5, 4)/C(8, 4) = 13/14; failed: 1/14 - C(4, 3)/C(7, 3) = -3/70.
        (8, 3, 4, (1 / 14) / math.sqrt(13) * 14, -(3 / 70) / math.sqrt(13) * 14),
        (3, 1, 4, 0.0, 0.0),  # too few were left
    ],
)
def test_literal_advantages_of_pass_at_k(
    n: int, c: int, k: int, of_solved: float, of_failed: float
) -> None:
    found_K = pass_at_k_advantages([True] * c + [False] * (n - c), k)
    assert found_K == pytest.approx([of_solved] * c + [of_failed] * (n - c), abs=1e-12)


@settings(max_examples=30)
@given(st.integers(1, 8), st.data())
def test_advantages_of_pass_at_k_are_means_over_all_groups_of_k_answers(
    n: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n))
    solved_K = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    groups = list(itertools.combinations(range(n), k))
    rewards = np.array([float(any(solved_K[i] for i in group)) for group in groups])
    above = rewards - rewards.mean()
    plain_K = [
        np.mean([a for a, group in zip(above, groups, strict=True) if i in group]) for i in range(n)
    ]
    assert pass_at_k_advantages(solved_K, k, normalise=False) == pytest.approx(plain_K, abs=1e-12)
    normalised_K = np.array(plain_K) / (rewards.std() or 1.0)
    assert pass_at_k_advantages(solved_K, k) == pytest.approx(normalised_K, abs=1e-9)
