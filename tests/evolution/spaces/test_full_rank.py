"""Dense terms: the exact arithmetic, in pieces and whole."""

import numpy as np
import pytest
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.noise import NoiseKind, noise
from es_cookbook.evolution.noise.tensors import Mask
from es_cookbook.evolution.optimizers.momentum import Muon
from es_cookbook.evolution.rules import AdamRule
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


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_only_elements_of_the_mask_are_perturbed_and_the_others_keep_every_bit(
    kind: NoiseKind,
) -> None:
    info = [ParameterInfo("w", (300, 250), "other")]  # More than one piece.
    start = torch.from_numpy(noise(1, "start", (300, 250)))
    start[0, :100], start[1, :100] = -0.0, 1e-40
    dense, sparse = start.clone(), start.clone()
    terms = [Term(5, 0.3), Term(6, -0.1)]
    FullRank(noise=kind)(info).add_terms_("w", dense, terms)
    FullRank(noise=kind, density=0.2, mask_seed=9)(info).add_terms_("w", sparse, terms)
    inside = torch.from_numpy(Mask(9, round(0.2 * 65536)).range("w", 0, 75_000)).view(300, 250)
    assert inside.float().mean() == pytest.approx(0.2, abs=0.01)
    expected = torch.where(inside, dense, start)
    assert torch.equal(sparse.view(torch.int32), expected.view(torch.int32))


def test_all_elements_need_no_mask_and_impossible_ones_are_refused() -> None:
    info = [ParameterInfo("w", (3,), "other")]
    assert FullRank(density=1.0)(info).mask is FullRank(density=0.999999)(info).mask is None
    assert FullRank(density=1 / 65536, mask_seed=3)(info).mask == Mask(3, 1)
    for density in (0.0, -0.5, 1.5, 1e-9, float("nan")):
        with pytest.raises(ConfigError, match=rf"density must be in .*, 1\], found {density}"):
            FullRank(density=density)
    for seed in (-1, 2**63):
        with pytest.raises(ConfigError, match=rf"mask_seed must be in .*, found {seed}"):
            FullRank(mask_seed=seed)


def test_adam_leaves_what_is_outside_the_mask_and_muon_which_would_not_is_refused() -> None:
    space = FullRank(density=0.3)([ParameterInfo("w", (30, 20), "linear")])
    assert space.mask is not None
    inside = torch.from_numpy(space.mask.range("w", 0, 600)).view(30, 20)
    centre = Centre({"w": torch.ones(30, 20)}, space)
    rule = AdamRule(counts=(2,), first=(1.0,), second=(1.0,), rate=0.1, epsilon=1e-8)
    centre.apply(Step((Term(1, 0.5), Term(2, 0.5)), rule=rule))
    torch.testing.assert_close((centre.weights["w"] - 1).abs(), 0.1 * inside)
    Muon(sigma=0.1, learning_rate=0.1)(
        run_seed=0, num_generations=1, space=FullRank()([ParameterInfo("w", (3, 2), "linear")])
    )
    with pytest.raises(ConfigError, match="muon moves every element"):
        Muon()(run_seed=0, num_generations=1, space=space)
