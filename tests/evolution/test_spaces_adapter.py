"""LoRA factors as parameters: what they start from, and PEFT's own adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook.errors import ConfigError, ModelError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo

PARAMETERS = [
    ParameterInfo("embed.weight", (50, 300), "embedding"),
    ParameterInfo("layers.0.q_proj.weight", (200, 300), "linear"),
    ParameterInfo("layers.0.q_proj.bias", (200,), "other"),
    ParameterInfo("layers.0.o_proj.weight", (300, 200), "linear"),
]
A, B = "layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight"


def write_adapter(path: Path, **changes: object) -> Path:
    """An adapter of q_proj as PEFT writes it."""
    path.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": False} | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {"A": (4, 300), "B": (200, 4)}
    save_file(
        {
            f"base_model.model.layers.0.q_proj.lora_{side}.weight": torch.from_numpy(
                noise(3, side, shape)
            )
            for side, shape in tensors.items()
        },
        path / "adapter_model.safetensors",
    )
    return path


def test_a_new_adapter_starts_as_the_base_with_pefts_variance() -> None:
    space = Adapter(rank=8, include=("*q_proj*",))(PARAMETERS)
    assert dict(space.shapes) == {A: (8, 300), B: (200, 8)}
    assert dict(space.targets) == {"layers.0.q_proj.weight": (A, B)}
    start = space.base({})
    assert not start[B].any()
    assert float(start[A].var()) == pytest.approx(1 / (3 * 300), rel=0.1)
    expected = noise(0, f"{A}.init", (8, 300)) * np.float32(1 / np.sqrt(900))
    assert np.array_equal(start[A].numpy(), expected)
    other = Adapter(rank=8, include=("*q_proj*",), init_seed=1)(PARAMETERS).base({})
    assert not torch.equal(other[A], start[A])


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 0.75), (True, 1.5)])
def test_scaling(rslora: bool, scaling: float) -> None:
    assert Adapter(rank=4, alpha=3.0, rslora=rslora)(PARAMETERS).scaling == scaling


def test_the_centre_moves_by_dense_noise_over_the_factors() -> None:
    centre = Centre({}, Adapter(rank=2)(PARAMETERS))
    before = {name: weight.clone() for name, weight in centre.weights.items()}
    centre.apply(Step((Term(5, 0.25),)))
    for name, weight in centre.weights.items():
        dense = noise(5, name, tuple(weight.shape))
        assert np.array_equal(weight.numpy(), before[name].numpy() + np.float32(0.25) * dense)
    pinned = centre.restore([Step((Term(5, 0.25),)), Step((Term(6, -0.5),), decay=0.1)])
    assert pinned == 7063909163163320343  # a recorded history gives these bits everywhere


def test_merging_adds_the_scaled_product() -> None:
    space = Adapter(rank=4, alpha=8.0, include=("*o_proj*",))(PARAMETERS)
    a, b = space.targets["layers.0.o_proj.weight"]
    factors = {a: torch.randn(4, 200), b: torch.randn(300, 4)}
    weight = torch.nn.Parameter(torch.randn(300, 200), requires_grad=False)
    expected = weight + 2.0 * factors[b] @ factors[a]
    space.merge_({"layers.0.o_proj.weight": weight}, factors)
    torch.testing.assert_close(weight.data, expected)


def test_a_stored_adapter_is_where_it_was_left(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    space = Adapter(start=str(path))(PARAMETERS)
    assert (space.rank, space.scaling) == (4, 1.5)
    assert dict(space.shapes) == {A: (4, 300), B: (200, 4)}
    stored = load_file(path / "adapter_model.safetensors")
    centre = Centre({}, space)
    for name in (A, B):
        assert torch.equal(centre.weights[name], stored[f"base_model.model.{name}"])
    rslora = write_adapter(tmp_path / "rslora", use_rslora=True)
    assert Adapter(start=str(rslora))(PARAMETERS).scaling == 3.0


def test_what_cannot_be_an_adapter_is_one_sentence(tmp_path: Path) -> None:
    for fields, sentence in (
        ({"rank": 0}, "rank must be at least 1, found 0"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"init_seed": -1}, "init_seed must be from 0"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Adapter(**fields)
    with pytest.raises(ConfigError, match=r"'embed\*' names no linear weight, and Adapter"):
        Adapter(include=("embed*",))(PARAMETERS)
    with pytest.raises(ModelError, match=r"nowhere' is no PEFT adapter: it needs adapter_config"):
        Adapter(start=str(tmp_path / "nowhere"))(PARAMETERS)
    dora = write_adapter(tmp_path / "dora", use_dora=True)
    with pytest.raises(ModelError, match=r"has use_dora, and only plain LoRA"):
        Adapter(start=str(dora))(PARAMETERS)
    wrong = write_adapter(tmp_path / "wrong", r=5)
    with pytest.raises(ModelError, match=r"does not fit .*layers\.0\.q_proj\.lora_[AB]\.weight"):
        Adapter(start=str(wrong))(PARAMETERS)
    left_out = Adapter(start=str(write_adapter(tmp_path / "out")), exclude=("*q_proj*",))
    with pytest.raises(ModelError, match=r"include, exclude and targets select of them: .*q_proj"):
        left_out(PARAMETERS)
