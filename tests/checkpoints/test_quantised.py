"""Quantised checkpoints are read as their formats mean them, and written as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from es_cookbook.checkpoints.models import load_causal_lm, parameter_infos
from es_cookbook.checkpoints.quantised import (
    QuantLinear,
    pack,
    quantised_checkpoint,
    quantised_layers,
    quantised_parameters,
    unpack,
)
from es_cookbook.common.errors import ModelError
from tests.quantised_models import How, quantise, quantise_weight

ALL = [
    How("gptq"),
    How("gptq", symmetric=False, dtype=torch.float16),
    How("gptq", bits=8, symmetric=False, shuffled=True),
    How("compressed-tensors"),
    How("compressed-tensors", symmetric=False),
    How("compressed-tensors", bits=8, group=8, symmetric=False, dtype=torch.float32),
]
IDS = [f"{h.format}-{h.bits}-{'sym' if h.symmetric else 'zeros'}" for h in ALL]
CPU = torch.device("cpu")


@pytest.mark.parametrize("how", ALL, ids=IDS)
def test_a_quantised_model_is_the_model_that_its_bits_stand_for(
    tiny_model: Callable[[str], Path], tmp_path: Path, how: How
) -> None:
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers", how)
    found = load_causal_lm(str(tmp_path / "bits"), "auto", CPU)
    expected = load_causal_lm(str(tmp_path / "numbers"), "auto", CPU)
    assert found.dtype == expected.dtype == how.dtype
    pairs = dict(expected.named_parameters())
    assert dict(found.named_parameters()).keys() == pairs.keys()
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, pairs[name]), name
    layers = dict(quantised_layers(found))
    assert len(layers) == 2 * 7 and all(weight.bits == how.bits for weight in layers.values())
    assert isinstance(found.model.layers[0].mlp.up_proj, QuantLinear)
    assert not isinstance(found.lm_head, QuantLinear)


@pytest.mark.parametrize("how", ALL, ids=IDS)
def test_what_did_not_move_is_written_as_it_was(
    tiny_model: Callable[[str], Path], tmp_path: Path, how: How
) -> None:
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers", how)
    checkpoint = quantised_checkpoint(str(tmp_path / "bits"))
    still = {"scales": torch.ones, "zeros": torch.zeros}
    moved = {}
    for name, value in quantised_parameters(str(tmp_path / "bits")).items():
        kind = name.rpartition(".")[2]
        parameter = still[kind](value.shape) if kind in still else value.float()
        moved[name] = parameter
    (tmp_path / "written").mkdir()
    checkpoint.write(tmp_path / "written", moved.items())
    before = load_file(tmp_path / "bits" / "model.safetensors")
    after = load_file(tmp_path / "written" / "model.safetensors")
    assert before.keys() == after.keys() and len(moved) >= 2 * 14
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert json.loads((tmp_path / "written/config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("how", ALL, ids=IDS)
def test_an_outline_is_the_layer_without_its_numbers(
    tiny_model: Callable[[str], Path], tmp_path: Path, how: How
) -> None:
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers", how)
    checkpoint = quantised_checkpoint(str(tmp_path / "bits"))
    for layer in checkpoint.layers:
        outline, weight = checkpoint.outline(layer), checkpoint.weight(layer)
        found, expected = outline.parameters(), weight.parameters()
        assert list(found) == list(expected) and outline.bits == weight.bits
        for kind, tensor in found.items():
            assert tensor.is_meta
            assert (tensor.shape, tensor.dtype) == (expected[kind].shape, expected[kind].dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_own_library_reads_the_same_weight(bits: int, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors", reason="it comes with vLLM")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    how = How("compressed-tensors", bits, 16, symmetric, torch.float32)
    weight = torch.randn(10, 32, generator=torch.manual_seed(0))
    stored, numbers = quantise_weight(weight, how)
    arguments = QuantizationArgs(num_bits=bits, symmetric=symmetric, group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    found = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    torch.testing.assert_close(found, numbers, rtol=0, atol=0)


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 5),
    st.integers(1, 19),
    st.integers(0, 1),
    st.integers(0, 2**32),
)
def test_unpacking_undoes_packing(bits: int, rows: int, columns: int, axis: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    found = unpack(pack(numbers, bits, axis), bits, axis)
    assert torch.equal(found[:rows, :columns].long(), numbers)
    assert not found[rows:].any() and not found[:, columns:].any()


def test_its_parameters_are_listed_after_each_quantised_weight(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    how = How("compressed-tensors", symmetric=False)
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers", how)
    infos = parameter_infos(load_causal_lm(str(tmp_path / "bits"), "auto", CPU))
    of_layer = [i for i in infos if i.name.startswith("model.layers.0.mlp.down_proj")]
    prefix = "model.layers.0.mlp.down_proj"
    assert [(i.name, i.shape, i.kind, i.bits) for i in of_layer] == [
        (f"{prefix}.weight", (32, 48), "linear", 4),
        (f"{prefix}.scales", (32, 3), "scales", 4),
        (f"{prefix}.zeros", (32, 3), "zeros", 4),
        (f"{prefix}.codes", (32, 48), "codes", 4),
    ]
    assert all(i.bits is None for i in infos if i.kind in ("embedding", "other"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_method": "awq"}, "it is awq; accepted are gptq"),
        ({"bits": 3}, "it has 3 bits; accepted"),
        ({"checkpoint_format": "marlin"}, "its checkpoint_format is marlin"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, r"its layers differ \(dynamic\)"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "transform_config": {"config_groups": {"u": {}}},
            },
            "it has a transform_config",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "its format is float-quantized",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8}, "input_activations": {"a": 1}}},
            },
            "its activations are quantised",
        ),
    ],
)
def test_other_formats_are_refused_with_those_that_are_accepted(
    tiny_model: Callable[[str], Path], tmp_path: Path, change: dict[str, object], said: str
) -> None:
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers")
    path = tmp_path / "bits" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        load_causal_lm(str(tmp_path / "bits"), "auto", CPU)


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        ("scales", lambda t: t.to(torch.float64), "must be float16, bfloat16 or float32"),
        ("scales", lambda t: t[:, :5].contiguous(), "are not of one layer"),
        ("qweight", lambda t: t[:1].contiguous(), "are not of one layer"),
        ("scales", None, "lacks model.layers.0.mlp.up_proj.scales"),
    ],
)
def test_a_damaged_layer_is_named(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    said: str,
) -> None:
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers")
    path = tmp_path / "bits" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        load_causal_lm(str(tmp_path / "bits"), "auto", CPU)


def test_layers_of_another_architecture_are_named(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    quantise(tiny_model("llama"), tmp_path / "bits", tmp_path / "numbers")
    path = tmp_path / "bits" / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.0.mlp.up_proj"
    stray = {name.replace(layer, "model.other"): t for name, t in tensors.items() if layer in name}
    save_file(tensors | {name: t.clone() for name, t in stray.items()}, path, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"layer model.other of shape \(48, 32\) is no linear layer"
    ):
        load_causal_lm(str(tmp_path / "bits"), "auto", CPU)
