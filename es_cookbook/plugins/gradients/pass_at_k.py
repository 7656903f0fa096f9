"""Advantages of the policy gradient of pass@k."""

import math
from collections.abc import Sequence

import numpy as np

from es_cookbook.rl.objectives import pass_at_k


def pass_at_k_advantages(
    solved_K: Sequence[bool], k: int, *, normalise: bool = True
) -> list[float]:
    """Weights of the answers to one problem in the policy gradient of pass@k.

    Chen et al. 2025 (arXiv:2508.10751), from n answers of which c solve the problem, with the mean
    ρ and the standard deviation s of "one of them solves it" over all groups of k answers:

        ρ = 1 − C(n − c, k)/C(n, k),   s = √(ρ(1 − ρ))
        solved: (1 − ρ)/s,   failed: (1 − ρ − C(n − c − 1, k − 1)/C(n − 1, k − 1))/s

    That is a group's baseline: an answer is worth the share solved of the groups that it is in,
    which is 1 for a solved one, and pass@(k − 1) of all others for a failed one. Without
    `normalise` nothing is divided by s. All are 0 where s is, and where n < k.

    >>> pass_at_k_advantages([True, False, False, False], k=2)
    [1.0, -0.333..., -0.333..., -0.333...]
    """
    n, c = len(solved_K), sum(solved_K)
    if n < k:
        return [0.0] * n
    of_all, of_failed = (
        float(pass_at_k(np.array(attempts), np.array(c), size))
        for attempts, size in ((n, k), (n - 1, k - 1))
    )
    deviation = math.sqrt(of_all * (1 - of_all))
    scale = deviation if normalise else 1.0
    values_K = (1.0 if solved else of_failed for solved in solved_K)
    return [(value - of_all) / scale if deviation else 0.0 for value in values_K]
