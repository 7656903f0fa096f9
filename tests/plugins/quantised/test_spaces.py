"""Search spaces of quantised checkpoints: what a term does to factors, offsets and codes."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook import FullRank, LowRank
from es_cookbook.checkpoints.quantised import QuantisedWeight
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.noise import Part, noise
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.plugins.quantised.spaces import QuantCodes, QuantCodesSpace, QuantScales

INFOS = [
    ParameterInfo("a.weight", (4, 8), "linear", 4),
    ParameterInfo("a.scales", (4, 2), "scales", 4),
    ParameterInfo("a.zeros", (4, 2), "zeros", 4),
    ParameterInfo("a.codes", (4, 8), "codes", 4),
    ParameterInfo("norm.weight", (8,), "other"),
    ParameterInfo("b.weight", (6, 8), "linear", 4),
    ParameterInfo("b.scales", (6, 2), "scales", 4),
    ParameterInfo("b.codes", (6, 8), "codes", 4),
]
WEIGHT = QuantisedWeight(
    codes=torch.arange(32, dtype=torch.uint8).view(4, 8) % 16,
    scales=torch.tensor([[0.5, 2.0]] * 4, dtype=torch.bfloat16),
    zeros=torch.tensor([[0, 8], [3, 15], [1, 1], [7, 8]], dtype=torch.int16),
    group_of_input=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
    bits=4,
)


@pytest.mark.parametrize(
    ("builder", "names"),
    [
        (QuantScales(), ["a.scales", "b.scales"]),
        (QuantScales(which="zeros"), ["a.zeros"]),
        (QuantScales(which="both"), ["a.scales", "a.zeros", "b.scales"]),
        (QuantCodes(), ["a.codes", "b.codes"]),
        (QuantCodes(include=("b*",)), ["b.codes"]),
    ],
)
def test_a_space_has_the_parameters_of_its_kind(
    builder: QuantScales | QuantCodes, names: list[str]
) -> None:
    assert list(builder(INFOS).shapes) == names


@pytest.mark.parametrize("builder", [FullRank(), LowRank()])
def test_weights_that_are_quantised_are_not_moved_as_such(builder: FullRank | LowRank) -> None:
    with pytest.raises(ConfigError, match=r"weight is quantised to 4 bits; accepted are adapter"):
        builder(INFOS)


def test_a_symmetric_checkpoint_has_no_zero_points_to_perturb() -> None:
    symmetric = [info for info in INFOS if info.kind != "zeros"]
    for which in ("zeros", "both"):
        with pytest.raises(ConfigError, match="the checkpoint is symmetric and has no zero points"):
            QuantScales(which=which)(symmetric)  # pyright: ignore[reportArgumentType]


def test_phases_are_those_that_recorded_runs_have() -> None:
    found = QuantScales(which="zeros")(INFOS).base({})["a.zeros"]
    assert (found * 8).view(-1)[:2].tolist() == [-0.48195648193359375, -0.29012298583984375]


def test_a_weight_is_code_less_zero_times_scale() -> None:
    assert WEIGHT.dequantised()[1].tolist() == [2.5, 3.0, 3.5, 4.0, -6.0, -4.0, -2.0, 0.0]
    symmetric = dataclasses.replace(WEIGHT, zeros=None)
    assert symmetric.dequantised()[0].tolist() == [-4, -3.5, -3, -2.5, -8, -6, -4, -2]


def test_scales_are_multiplied_and_rounded_to_what_is_stored() -> None:
    factors = torch.tensor([[1.1, 1.001]] * 4)
    moved = WEIGHT.moved({"scales": factors})
    assert moved.scales.dtype == torch.bfloat16
    assert moved.scales[0].tolist() == [0.55078125, 2.0], "0.1 % is less than bfloat16 can say"
    assert torch.equal(moved.codes, WEIGHT.codes) and torch.equal(moved.zeros, WEIGHT.zeros)


def test_zero_points_move_by_whole_numbers_within_their_range() -> None:
    offsets = torch.tensor([[-0.2, 0.05], [0.07, 0.2], [2.0, -2.0], [0.0, -0.0625]])
    assert WEIGHT.moved({"zeros": offsets}).zeros.tolist() == [[0, 8], [4, 15], [15, 0], [7, 8]]
    least_1 = dataclasses.replace(WEIGHT, least_zero=1)
    assert least_1.moved({"zeros": offsets}).zeros[2].tolist() == [16, 1]


def test_the_start_is_the_base_and_a_term_adds_noise_in_units_of_it() -> None:
    space = QuantScales(which="both")(INFOS)
    centre = Centre({}, space, 1)
    values = {"scales": centre.weights["a.scales"], "zeros": centre.weights["a.zeros"]}
    started = WEIGHT.moved(values)
    assert torch.equal(started.scales, WEIGHT.scales) and torch.equal(started.zeros, WEIGHT.zeros)
    found = centre.perturbed(Genome((Term(9, 0.01),)), "a.scales").numpy()
    product = noise(9, "a.scales", (4, 2)) * np.float32(0.01)
    assert np.array_equal(found, np.float32(1) + product)


def test_small_perturbations_move_their_share_of_zero_points() -> None:
    infos = [ParameterInfo("a.scales", (1, 1), "scales", 4)]
    infos.append(ParameterInfo("a.zeros", (100, 100), "zeros", 4))
    centre = Centre({}, QuantScales(which="zeros")(infos), 1)
    steps = (centre.perturbed(Genome((Term(1, 0.01),)), "a.zeros") * 8).round()
    assert not (centre.weights["a.zeros"] * 8).round().any()
    expected = 8 * 0.01 * float(np.sqrt(2 / np.pi))  # mean |8 σ ε|
    assert float((steps != 0).float().mean()) == pytest.approx(expected, rel=0.1)


def codes_space(rows: int = 100, columns: int = 300) -> QuantCodesSpace:
    return QuantCodesSpace({"a.codes": (rows, columns)}, highest_code=15)


@pytest.mark.parametrize("coefficient", [0.005, 1.7, -0.3])
def test_codes_change_by_whole_numbers_that_are_the_noise_on_average(coefficient: float) -> None:
    size = 2**20
    change = codes_space(1024, 1024).change("a.codes", Term(5, coefficient), 0, size)
    wanted = noise(5, "a.codes", (size,)) * coefficient
    assert np.array_equal(change, np.rint(change)) and np.abs(change - wanted).max() < 1
    positive = wanted > 0
    for part in (positive, ~positive):
        assert change[part].mean() == pytest.approx(wanted[part].mean(), rel=0.1)


def test_twins_change_every_code_by_opposite_amounts() -> None:
    plus, minus = (codes_space().change("a.codes", Term(5, c), 0, 30000) for c in (0.3, -0.3))
    assert plus.any() and np.array_equal(plus, -minus)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 299), st.integers(0, 299))
def test_a_part_of_the_codes_changes_as_it_does_in_the_whole(
    a: int, b: int, c: int, d: int
) -> None:
    space, terms = codes_space(), (Term(5, 0.3), Term(6, -0.1))
    whole = torch.zeros(100, 300)
    space.add_terms_("a.codes", whole, terms)
    (top, bottom), (left, right) = sorted((a, b)), sorted((c, d))
    part = torch.zeros(bottom - top, right - left)
    space.add_terms_("a.codes", part, terms, Part((top, bottom), (left, right), 300))
    assert torch.equal(part, whole[top:bottom, left:right])
