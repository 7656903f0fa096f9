"""The singular values of an adapter: nothing changes at 0, and the decomposition is a true one."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Offsets, OffsetsRule, Step, Term
from es_cookbook.plugins.cma.singular_values import SingularValues
from tests.evolution.spaces.test_adapter import PARAMETERS, write_adapter

A, B = ("layers.0.q_proj.lora_A.singular_values", "layers.0.q_proj.lora_B.singular_values")
WEIGHT = "layers.0.q_proj.weight"


def stored(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = load_file(path / "adapter_model.safetensors")
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    return tensors[name.format("A")], tensors[name.format("B")]


def build(path: Path, fraction: float = 1.0) -> Any:
    return SingularValues(start=str(path), fraction=fraction)(PARAMETERS, read_adapter)


def factors_at(
    space: Any, genome: Genome, centre: Centre | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    centre = centre or Centre({}, space)
    (found,) = space.adapter.factors(WEIGHT, [lambda name: centre.perturbed(genome, name)])
    return found


def of(*values: float) -> Genome:
    return Genome(offsets=Offsets.of(np.array(values)))


def singular_values(matrix: torch.Tensor) -> list[float]:
    return torch.linalg.svdvals(matrix.double()).tolist()


def test_it_starts_as_the_adapter_to_the_bit(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    space = build(path)
    assert dict(space.shapes) == {A: (4,), B: (4,)}
    assert dict(space.adapter.targets) == {WEIGHT: (A, B)}
    lora = space.adapter.lora
    assert (lora.rank, lora.scale) == (4, 1.5)
    for genome in (Genome(), of(*[0.0] * 8)):
        for found, expected in zip(factors_at(space, genome), stored(path), strict=True):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_an_offset_is_what_its_singular_value_changes_by(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    a, b = stored(path)
    before_a, before_b = singular_values(a), singular_values(b)
    found_a, found_b = factors_at(build(path), of(3.0, 0, 0, -1.0, 0, 0.5, 0, 0))
    assert singular_values(found_a) == pytest.approx(
        [before_a[0] + 3, *before_a[1:3], before_a[3] - 1], rel=1e-5
    )
    moved_b = sorted([before_b[0], before_b[1] + 0.5, *before_b[2:]], reverse=True)
    assert singular_values(found_b) == pytest.approx(moved_b, rel=1e-5)
    assert np.allclose(found_a @ a.T, (found_a @ a.T).T, atol=1e-3)  # the same directions


def test_a_fraction_takes_the_largest(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    space = build(path, fraction=0.3)
    assert dict(space.shapes) == {A: (2,), B: (2,)}
    before = singular_values(stored(path)[0])
    found, _ = factors_at(space, of(1.0, 2.0, 0, 0))
    expected = sorted([before[0] + 1, before[1] + 2, *before[2:]], reverse=True)
    assert singular_values(found) == pytest.approx(expected, rel=1e-5)


def test_the_centre_is_exact_and_takes_terms_as_well_as_coordinates(tmp_path: Path) -> None:
    space = build(write_adapter(tmp_path / "adapter"))
    centre = Centre({}, space)
    coordinates = np.arange(8) / 3
    centre.apply(Step(rule=OffsetsRule(Offsets.of(coordinates), 1.0)))
    np.testing.assert_array_equal(centre.weights[B].numpy(), np.float32(coordinates[4:]))
    before = centre.weights[A].clone()
    centre.apply(Step((Term(3, 0.5),)))
    assert (centre.weights[A] != before).all()
    moved = factors_at(space, Genome(), centre)
    again = Centre({}, pickle.loads(pickle.dumps(space)))
    again.restore([Step(rule=OffsetsRule(Offsets.of(coordinates), 1.0)), Step((Term(3, 0.5),))])
    assert again.fingerprint() == centre.fingerprint()
    for one, other in zip(moved, factors_at(space, Genome(), again), strict=True):
        assert torch.equal(one, other)


def test_bad_input(tmp_path: Path) -> None:
    for fraction in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigError, match=r"fraction must be in \(0, 1\]"):
            SingularValues(start="x", fraction=fraction)
    with pytest.raises(ConfigError, match=r"needs search_space\.start"):
        SingularValues()(PARAMETERS)
    with pytest.raises(ModelError, match="is no PEFT adapter"):
        SingularValues(start=str(tmp_path / "nowhere"))(PARAMETERS, read_adapter)
    path = write_adapter(tmp_path / "new")
    tensors = load_file(path / "adapter_model.safetensors")
    for tensor in tensors.values():
        tensor[0, 0] = 0
    save_file(tensors, path / "adapter_model.safetensors")
    Centre({}, build(path))
    untrained = {name: t * ("lora_A" in name) for name, t in tensors.items()}
    save_file(untrained, path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.lora_B\.weight of the adapter.* is 0"):
        Centre({}, build(path))
