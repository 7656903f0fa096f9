"""Dense terms: the exact arithmetic, in pieces and whole."""

import numpy as np
import pytest
import torch

from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.noise import NoiseKind, noise
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.full_rank import FullRank


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4, 5), (300, 250)])
def test_exact_arithmetic_is_as_defined(shape: tuple[int, ...], kind: NoiseKind) -> None:
    space = FullRank(noise=kind)([ParameterInfo("w", shape, "other")])
    terms = [Term(4, 0.1), Term(2, -0.03), Term(9, 1e-9)]
    weight = torch.from_numpy(noise(1, "start", shape))
    in_torch, in_numpy = weight.clone(), weight.numpy().copy()
    for term in terms:
        scale, dense = np.float32(term.coefficient), noise(term.seed, "w", shape, kind)
        in_numpy = in_numpy + scale * dense
        in_torch = in_torch + torch.from_numpy(dense) * torch.tensor(scale)
    space.add_terms_("w", weight, terms)
    assert torch.equal(weight, in_torch)
    assert torch.equal(weight, torch.from_numpy(np.asarray(in_numpy)))
