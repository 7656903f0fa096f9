"""Low-rank terms: the factors, their scale and the exact arithmetic."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.factors import term_scales
from es_cookbook.evolution.spaces.low_rank import LowRank, LowRankSpace


def space_of(out_features: int, in_features: int, rank: int, **fields: str) -> LowRankSpace:
    builder = LowRank(rank=rank, **fields)  # pyright: ignore[reportArgumentType]
    return builder([ParameterInfo("w", (out_features, in_features), "linear")])


def factors_of(
    space: LowRankSpace, name: str, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A (out, rank) and B (in, rank) of one weight."""
    a_S, b_S = space.term_factors(name, [seed])
    return a_S[0], b_S[0]


# 300 x 250 is more than one piece; 70 terms are more than are held at once.
@pytest.mark.parametrize(("shape", "rank", "num_terms"), [((300, 250), 3, 2), ((5, 4), 2, 70)])
def test_exact_arithmetic_is_as_defined(shape: tuple[int, int], rank: int, num_terms: int) -> None:
    space = space_of(*shape, rank=rank)
    terms = [Term(seed, 0.01 * (seed + 1)) for seed in range(num_terms)]
    weight = torch.from_numpy(noise(1, "start", shape))
    in_torch, in_numpy = weight.clone(), weight.numpy().copy()
    for term in terms:
        a, b = factors_of(space, "w", term.seed)
        scale = term_scales([term.coefficient], rank)[0]
        for k in range(rank):
            in_numpy = in_numpy + (scale * a[:, k])[:, None] * b[:, k][None, :]
            scaled = torch.from_numpy(a[:, k]) * torch.tensor(scale)
            in_torch = in_torch + scaled[:, None] * torch.from_numpy(b[:, k])[None, :]
    space.add_terms_("w", weight, terms)
    assert torch.equal(weight, in_torch)
    assert torch.equal(weight, torch.from_numpy(in_numpy))
