"""The centre: exact movement, exact restoring, and a fingerprint that notices everything."""

import numpy as np
import pytest
import torch

from es_cookbook import FullRank, LowRank
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.centre import Centre, noise_device, on_gpu
from es_cookbook.evolution.exact import fingerprint_of
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.noise import Part, noise
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace, SearchSpaceBuilder

BUILDERS = (
    LowRank(),
    LowRank(rank=3, noise="rademacher"),
    FullRank(),
    LowRank(rank=2, sigma_patterns=("*[1b]*",), sigma_factors=(0.3,)),
    FullRank(noise="rademacher", sigma_patterns=("*[1b]*",), sigma_factors=(0.3,)),
)
SHAPES = {"layers.0.weight": (40, 30), "layers.1.weight": (130, 270), "layers.2.weight": (3, 5)}
STEPS = (
    Step((Term(1, 0.01), Term(2, -0.02))),
    Step(),
    Step((Term(3, 0.5),), decay=0.1),
    Step((Term(1, -0.01), Term(4, 1.5))),
    Step(decay=0.01),
)


PINNED = (
    5964722349222438124,
    13789732328555045450,
    13224383378403051337,
    6293808520366268005,
    11942798035584305238,
)
"""Fingerprints of STEPS from the base model, for each of BUILDERS."""


def base_model(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    named = {name: torch.from_numpy(noise(7, name, shape)) for name, shape in SHAPES.items()}
    return {name: tensor.to(dtype) for name, tensor in named.items()}


def space_of(builder: SearchSpaceBuilder) -> SearchSpace:
    return builder([ParameterInfo(name, shape, "linear") for name, shape in SHAPES.items()])


def bits(weights: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    views = {name: weight.view(torch.int32) for name, weight in weights.items()}
    return {name: view.flatten().tolist() for name, view in views.items()}


def test_noise_is_made_on_nvidias_gpus_and_where_triton_is_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, cuda, mps = map(torch.device, ("cpu", "cuda", "mps"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(torch.version, "hip", None)
    assert [noise_device(each) for each in (cpu, cuda, mps)] == [cpu, cuda, cpu]
    assert not on_gpu(cpu) and not on_gpu(mps)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert on_gpu(cpu) and not on_gpu(mps)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert noise_device(cuda) == cpu
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not on_gpu(cpu)


def test_known_steps() -> None:
    # Pinned: a recorded history must give these bits on every machine and in every version.
    found = tuple(Centre(base_model(), space_of(b)).restore(STEPS) for b in BUILDERS)
    assert found == PINNED


@pytest.mark.parametrize("builder", BUILDERS)
def test_restoring_by_other_threads_equals_having_taken_the_steps(
    builder: SearchSpaceBuilder,
) -> None:
    moved = Centre(base_model(), space_of(builder), num_threads=1)
    last = [moved.apply(step) for step in STEPS][-1]
    restored = Centre(base_model(), space_of(builder), num_threads=2)
    restored.apply(Step((Term(99, 3.0),)))  # It must not matter where it was.
    assert restored.restore(iter(STEPS)) == last
    assert bits(restored.weights) == bits(moved.weights)
    begun = Centre(base_model(), space_of(builder))
    begun.restore(STEPS[:3])
    start = {name: weight.clone() for name, weight in begun.weights.items()}
    assert restored.restore(STEPS[3:], start) == last
    assert bits(restored.weights) == bits(moved.weights)


def test_a_centre_gives_its_memory_back_as_often_as_it_is_released() -> None:
    centre = Centre(base_model(), space_of(FullRank()))
    expected = centre.restore(STEPS)
    weights = dict(centre.weights)
    for _ in range(2):  # NumPy has seen the weights by now
        centre.release()
        assert not any(weight.untyped_storage().nbytes() for weight in weights.values())
        assert centre.restore(STEPS) == expected
    assert all(centre.weights[name] is weight for name, weight in weights.items())


def test_an_empty_step_leaves_every_bit() -> None:
    odd = torch.tensor([0x80000000, 0x7FC00123, 0x7F800001, 0xFF800000, 1], dtype=torch.int64)
    base = {"w": odd.to(torch.int32).view(torch.float32).view(1, 5)}
    centre = Centre(base, LowRank()([ParameterInfo("w", (1, 5), "linear")]))
    fingerprint = centre.fingerprint()
    assert centre.apply(Step()) == fingerprint
    assert centre.restore([Step(), Step()]) == fingerprint
    assert bits(centre.weights) == bits(base)


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_thousand_generations_of_perturb_and_restore_leave_bfloat16_weights_identical(
    builder: SearchSpaceBuilder,
) -> None:
    shapes = {"a": (6, 5), "b": (4, 8)}
    base = {name: torch.from_numpy(noise(7, name, s)).bfloat16() for name, s in shapes.items()}
    space = builder([ParameterInfo(name, shape, "linear") for name, shape in shapes.items()])
    centre = Centre(base, space)
    model = {name: tensor.clone() for name, tensor in base.items()}
    changed = 0
    for generation in range(1000):
        genome = Genome((Term(derive_seed(0, "genome", generation), 0.05),))
        for name in shapes:
            model[name].copy_(centre.perturbed(genome, name))
        changed += any(not torch.equal(model[name], base[name]) for name in shapes)
        for name in shapes:
            model[name].copy_(centre.weights[name])
    assert changed == 1000
    for name in shapes:
        assert torch.equal(model[name].view(torch.int16), base[name].view(torch.int16))


def test_a_perturbed_weight_is_the_centre_plus_its_terms() -> None:
    centre = Centre(base_model(), space_of(FullRank()))
    before = centre.fingerprint()
    name = "layers.2.weight"
    genome = Genome((Term(5, 0.1), Term(6, -0.2)))
    expected = centre.weights[name].numpy() + np.float32(0.1) * noise(5, name, SHAPES[name])
    expected = expected + np.float32(-0.2) * noise(6, name, SHAPES[name])
    np.testing.assert_array_equal(centre.perturbed(genome, name).numpy(), expected)
    assert torch.equal(centre.perturbed(Genome(), name), centre.weights[name])
    assert centre.fingerprint() == before


def test_the_fingerprint_is_as_defined() -> None:
    values = torch.tensor([1.0, -2.5, 0.0, -0.0])
    bit = torch.tensor([1e-45])  # Bit pattern 1.
    ones = [fingerprint_of("w", bit, Part((i, i + 1), (0, 1), 1)) for i in range(5)]
    assert all(multiplier % 2 == 1 for multiplier in ones)
    assert {(ones[i + 1] - ones[i]) % 2**64 for i in range(4)} == {(ones[1] - ones[0]) % 2**64}
    assert (ones[1] - ones[0]) % 4 == 2
    patterns = [0x3F800000, 0xC0200000, 0, 0x80000000]
    expected = sum(p * m for p, m in zip(patterns, ones, strict=False)) % 2**64
    assert fingerprint_of("w", values) == expected


def test_the_fingerprint_notices_any_flipped_bit() -> None:
    values = torch.from_numpy(noise(1, "w", (50,)))
    before = fingerprint_of("w", values)
    for i in (0, 13, 49):
        for bit in range(32):
            flipped = values.clone()
            flipped.view(torch.int32)[i] ^= -(2**31) if bit == 31 else 1 << bit
            assert fingerprint_of("w", flipped) != before
