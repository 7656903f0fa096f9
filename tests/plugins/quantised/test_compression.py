"""A rounded copy of a model: every weight the nearest code, read by the quantised search spaces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("compressed_tensors", reason="it comes with vLLM, and with es-cookbook[dev]")

from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer
from es_cookbook.checkpoints.quantised import quantised_layers
from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.quantised.compression import write_rounded
from es_cookbook.plugins.quantised.spaces import QuantCodes, QuantScales
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "how",
    [
        {"group_size": 16},
        {"group_size": 16, "symmetric": False},
        {"bits": 8, "group_size": 8, "symmetric": False, "dtype": "float32"},
        {"bits": 8, "group_size": None, "dtype": "float16"},
    ],
    ids=str,
)
def test_a_weight_is_the_nearest_multiple_of_its_groups_scale(
    tiny_model: Callable[[str], Path], tmp_path: Path, how: dict[str, Any]
) -> None:
    bits, symmetric = how.get("bits", 4), how.get("symmetric", True)
    copy = write_rounded(str(tiny_model("llama")), tmp_path / "copy", **how)
    original = load_causal_lm(str(tiny_model("llama")), "auto", CPU)
    found = load_causal_lm(str(tmp_path / "copy"), "auto", CPU)
    layers = dict(quantised_layers(found))
    assert set(layers) == set(copy.rounded) and len(layers) == 2 * 7
    assert copy.left == {"lm_head": "the output head"}
    for name, parameter in original.named_parameters():
        other = found.get_parameter(name)
        weight = layers.get(name.removesuffix(".weight"))
        if weight is None:
            assert torch.equal(parameter.to(other.dtype), other), name
            continue
        assert weight.bits == bits and (weight.zeros is None) == symmetric
        assert weight.scales.shape[1] == (
            weight.codes.shape[1] // how["group_size"] if how["group_size"] else 1
        )
        scales = weight.scales[:, weight.group_of_input]
        eps = torch.finfo(other.dtype).eps
        # Half a code; another half at a range's end, where zero points are rounded; the scale's own
        # rounding, times the largest code, and the product's.
        steps = 0.501 + 0.5 * (not symmetric) + eps * 2**bits
        assert ((parameter - other.float()).abs() <= scales.float() * steps).all(), name
        assert weight.codes.float().std() > 0.15 * 2**bits, "all of the codes' range is used"
    assert copy.num_bytes[1] < copy.num_bytes[0]
    assert load_tokenizer(str(tmp_path / "copy")).get_vocab()


@pytest.mark.anyio
@pytest.mark.parametrize("space", [QuantScales(), QuantCodes()])
async def test_the_quantised_spaces_evolve_the_bundled_model(
    tmp_path: Path, space: SearchSpaceBuilder
) -> None:
    copy = write_rounded(str(BUNDLED_MODEL), tmp_path / "copy")
    assert len(copy.rounded) == 4 * 7 and copy.left == {}, "its head is tied to the embedding"
    engine = await TorchEngineBuilder()(model_name=str(tmp_path / "copy"), search_space=space)
    try:
        step = await engine.apply(Step((Term(5, 0.3),)))
        assert step != await engine.apply(Step((Term(6, 0.3),)))
    finally:
        await engine.close()


def test_floats_of_eight_bits_have_a_scale_for_each_output(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"bits": 8, "number": "float", "group_size": None, "dtype": "float32"}
    write_rounded(str(tiny_model("llama")), tmp_path / "copy", **how)
    original = load_causal_lm(str(tiny_model("llama")), "auto", CPU)
    found = load_causal_lm(str(tmp_path / "copy"), "auto", CPU)
    layers = dict(quantised_layers(found))
    assert len(layers) == 2 * 7
    for name, weight in layers.items():
        assert weight.codes.dtype == torch.float8_e4m3fn and weight.scales.shape[1] == 1
        before = original.get_parameter(f"{name}.weight")
        # Three bits after the first: half of the last is a sixteenth, of small ones half the least.
        most = (before.abs() / 16).maximum(weight.scales * 2**-10) * 1.001
        assert ((found.get_parameter(f"{name}.weight") - before).abs() <= most).all()


def test_more_bits_and_smaller_groups_lose_less(tmp_path: Path) -> None:
    copies = [
        write_rounded(str(BUNDLED_MODEL), tmp_path / str(i), bits=bits, group_size=size)
        for i, (bits, size) in enumerate([(4, None), (4, 32), (8, 32)])
    ]
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = load_causal_lm(str(BUNDLED_MODEL), "float32", CPU).get_parameter(name)
    models = (load_causal_lm(str(tmp_path / str(i)), "float32", CPU) for i in range(3))
    losses = [float((model.get_parameter(name) - whole).norm()) for model in models]
    assert losses == sorted(losses, reverse=True) and losses[2] < losses[0] / 10
    sizes = [copy.num_bytes[1] for copy in copies]
    assert sizes == sorted(sizes)


def test_what_is_left_is_named_with_its_reason(tmp_path: Path) -> None:
    how: dict[str, Any] = {"bits": 8, "group_size": 128, "ignore": ("*.q_proj",)}
    copy = write_rounded(str(BUNDLED_MODEL), tmp_path / "copy", **how)
    assert copy.left == {
        **{f"model.layers.{i}.self_attn.q_proj": "ignored" for i in range(4)},
        **{
            f"model.layers.{i}.mlp.down_proj": "group_size=128 does not divide 448 inputs"
            for i in range(4)
        },
    }
    found = dict(quantised_layers(load_causal_lm(str(tmp_path / "copy"), "auto", CPU)))
    assert set(found) == set(copy.rounded) and len(found) == 28 - 8


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"group_size": 100},
            "no layer of the model can be quantised: group_size=100 does not divide",
        ),
        ({"ignore": ("*",)}, "no layer of the model can be quantised: ignored"),
        ({"ignore": ("*q_porj",)}, r"ignore=\*q_porj matches no linear layer; .*q_proj"),
    ],
)
def test_what_cannot_be_rounded_so_is_refused(
    tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        write_rounded(str(BUNDLED_MODEL), tmp_path / "copy", **how)
    assert list(tmp_path.iterdir()) == []
