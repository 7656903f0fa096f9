"""LoRA factors as parameters: what they start from, and PEFT's own adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.adapter import Adapter, Init
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.factors import LoRA

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
    assert dict(space.adapter.targets) == {"layers.0.q_proj.weight": (A, B)}
    start = space.base({})
    assert not start[B].any()
    assert float(start[A].var()) == pytest.approx(1 / (3 * 300), rel=0.1)
    expected = noise(0, f"{A}.init", (8, 300)) * np.float32(1 / np.sqrt(900))
    assert np.array_equal(start[A].numpy(), expected)
    other = Adapter(rank=8, include=("*q_proj*",), init_seed=1)(PARAMETERS).base({})
    assert not torch.equal(other[A], start[A])


@pytest.mark.parametrize("rank", [2, 5, 8])
def test_an_orthogonal_start_gives_each_factor_ranks_of_its_own(rank: int) -> None:
    space = Adapter(rank=rank, init="orthogonal", include=("*q_proj*",), init_seed=3)(PARAMETERS)
    start, half = space.base({}), rank // 2
    std = np.float32(1 / np.sqrt(900))
    of_a = noise(3, f"{A}.init", (rank, 300)) * std
    of_b = noise(3, f"{B}.init", (200, rank)) * std
    assert np.array_equal(start[A][:half].numpy(), of_a[:half]) and not start[A][half:].any()
    assert (
        np.array_equal(start[B][:, half:].numpy(), of_b[:, half:]) and not start[B][:, :half].any()
    )


@pytest.mark.parametrize("init", ["lora", "gaussian", "orthogonal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_start_answers_as_the_base_to_the_bit(init: Init, dtype: torch.dtype) -> None:
    space = Adapter(rank=6, init=init)(PARAMETERS)
    names = list(space.adapter.targets)
    base = {
        n: torch.from_numpy(noise(2, n, (300, 200) if "o_" in n else (200, 300))) for n in names
    }
    base = {name: weight.to(dtype) for name, weight in base.items()}
    weights = {name: torch.nn.Parameter(w.clone(), requires_grad=False) for name, w in base.items()}
    space.merge_(weights, space.base({}))
    assert all(torch.equal(weights[name].data, base[name]) for name in names)


def test_the_centre_moves_by_dense_noise_over_the_factors() -> None:
    centre = Centre({}, Adapter(rank=2)(PARAMETERS))
    before = {name: weight.clone() for name, weight in centre.weights.items()}
    centre.apply(Step((Term(5, 0.25),)))
    for name, weight in centre.weights.items():
        dense = noise(5, name, tuple(weight.shape))
        assert np.array_equal(weight.numpy(), before[name].numpy() + np.float32(0.25) * dense)
    pinned = centre.restore([Step((Term(5, 0.25),)), Step((Term(6, -0.5),), decay=0.1)])
    assert pinned == 7063909163163320343  # a recorded history gives these bits everywhere


def test_a_stored_adapter_is_where_it_was_left(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    space = Adapter(start=str(path))(PARAMETERS, read_adapter)
    assert space.adapter.lora == LoRA(rank=4, alpha=6.0) and space.adapter.lora.scale == 1.5
    assert dict(space.shapes) == {A: (4, 300), B: (200, 4)}
    stored = load_file(path / "adapter_model.safetensors")
    centre = Centre({}, space)
    for name in (A, B):
        assert torch.equal(centre.weights[name], stored[f"base_model.model.{name}"])
    rslora = write_adapter(tmp_path / "rslora", use_rslora=True)
    assert Adapter(start=str(rslora))(PARAMETERS, read_adapter).adapter.lora.scale == 3.0


@pytest.mark.parametrize(
    ("targets", "selected"),
    [
        ((), "qo"),
        (("q_proj",), "q"),
        (("q_proj", "o_proj"), "qo"),
        (("layers.0.o_proj",), "o"),
        (("0.o_proj",), "o"),
        (("?_proj",), "qo"),
        (("layers.*.q*",), "q"),
    ],
)
def test_targets_are_named_as_pefts_are(targets: tuple[str, ...], selected: str) -> None:
    space = Adapter(targets=targets)(PARAMETERS)
    assert list(space.adapter.targets) == [f"layers.0.{which}_proj.weight" for which in selected]


def test_targets_that_name_nothing_are_refused_with_the_nearest() -> None:
    for target in ("q_prj", "q_proj.weight", "proj", "embed"):
        with pytest.raises(
            ConfigError, match=rf"targets '{target}' names no linear layer of the model"
        ):
            Adapter(targets=("o_proj", target))(PARAMETERS)
    with pytest.raises(
        ConfigError, match=r"did you mean 'q_proj'\? Accepted: o_proj, q_proj, their"
    ):
        Adapter(targets=("q_prj",))(PARAMETERS)
    with pytest.raises(ConfigError, match=r"targets 'q_proj' names only layers that include"):
        Adapter(targets=("q_proj", "o_proj"), exclude=("*q_proj*",))(PARAMETERS)


def test_an_orthogonal_start_needs_two_ranks() -> None:
    with pytest.raises(ConfigError, match=r"init=orthogonal .*rank must be at least 2, found 1"):
        Adapter(rank=1, init="orthogonal")


def test_a_weight_that_is_stored_the_other_way_gains_the_transposed_product() -> None:
    parameters = [
        ParameterInfo("0.c_attn.weight", (3, 5), "linear", transposed=True),
        ParameterInfo("0.out.weight", (4, 3), "linear"),
    ]
    space = Adapter(rank=2, alpha=6.0, targets=("c_attn",))(parameters)
    assert space.adapter.transposed == {"0.c_attn.weight"}
    a, b = torch.ones(2, 3), torch.arange(10.0).view(5, 2)
    found = space.adapter.merged("0.c_attn.weight", torch.zeros(3, 5), a, b)
    assert found.tolist() == [[3.0, 15.0, 27.0, 39.0, 51.0]] * 3
    assert Adapter(targets=("out",))(parameters).adapter.transposed == set()


def test_what_cannot_be_an_adapter_is_one_sentence(tmp_path: Path) -> None:
    for fields, sentence in (
        ({"init_seed": -1}, r"init_seed must be in \[0, 9223372036854775807\], found -1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Adapter(**fields)
    with pytest.raises(ConfigError, match=r"'embed\*' names no linear weight, and Adapter"):
        Adapter(include=("embed*",))(PARAMETERS)
    with pytest.raises(ModelError, match=r"nowhere' is no PEFT adapter: it needs adapter_config"):
        Adapter(start=str(tmp_path / "nowhere"))(PARAMETERS, read_adapter)
    dora = write_adapter(tmp_path / "dora", use_dora=True)
    with pytest.raises(ModelError, match=r"has use_dora=True, and only plain LoRA"):
        Adapter(start=str(dora))(PARAMETERS, read_adapter)
    wrong = write_adapter(tmp_path / "wrong", r=5)
    with pytest.raises(ModelError, match=r"does not fit .*layers\.0\.q_proj\.lora_[AB]\.weight"):
        Adapter(start=str(wrong))(PARAMETERS, read_adapter)
    left_out = Adapter(start=str(write_adapter(tmp_path / "out")), exclude=("*q_proj*",))
    with pytest.raises(ModelError, match=r"include, exclude and targets select of them: .*q_proj"):
        left_out(PARAMETERS, read_adapter)
