"""Advantages of pass@k are means over groups of answers."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.plugins.gradients.policy_gradient import pass_at_k_advantages


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
