"""Quantised checkpoints are read as their formats mean them, and written as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook.checkpoints.models import load_causal_lm, parameter_infos
from es_cookbook.checkpoints.quantised import quantised_checkpoint, quantised_layers
from es_cookbook.common.errors import ModelError
from tests.families import sampled
from tests.integration.vllm_models import make_vllm_model
from tests.quantised_models import ByLibrary, How, quantise

INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
STATIC, DYNAMIC = FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "token", "dynamic": True}
LIBRARY = {
    "int4 as llm-compressor's AWQ": ByLibrary("pack-quantized", INT4, dtype=torch.float16),
    "int4 by output": ByLibrary("pack-quantized", INT8 | {"num_bits": 4}),
    "int2": ByLibrary("pack-quantized", INT4 | {"num_bits": 2}),
    "w8a8 int": ByLibrary("int-quantized", INT8, INT8 | {"strategy": "token", "dynamic": True}),
    "w8a8 int with zeros": ByLibrary(
        "int-quantized", INT8 | {"symmetric": False}, INT8 | {"strategy": "tensor"}
    ),
    "w4a8": ByLibrary("int-quantized", INT4, INT8 | {"strategy": "token", "dynamic": True}),
}
FLOATS = {
    "fp8": How("fp8", bits=8, group=16),
    "fp8 with one scale": How("fp8", bits=8, group=0),
    "fp8 by tensor, static": ByLibrary("float-quantized", STATIC, STATIC),
    "fp8 by output, dynamic": ByLibrary("float-quantized", FP8 | {"strategy": "channel"}, DYNAMIC),
    "fp8 by block": ByLibrary(
        "float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 32]}, DYNAMIC
    ),
    "fp8 naive": ByLibrary("naive-quantized", FP8 | {"strategy": "channel"}, dtype=torch.float32),
}
ALL = [
    How("gptq"),
    How("gptq", symmetric=False, dtype=torch.float16),
    How("gptq", bits=8, symmetric=False, shuffled=True),
    How("compressed-tensors"),
    How("compressed-tensors", symmetric=False),
    How("compressed-tensors", bits=8, group=8, symmetric=False, dtype=torch.float32),
    How("gptq_v2", symmetric=False),
    How("gptq", bits=2, symmetric=False),
    How("awq", symmetric=False, dtype=torch.float16),
    *LIBRARY.values(),
]


def name_of(how: How | ByLibrary) -> str:
    if isinstance(how, ByLibrary):
        return next(name for name, each in (LIBRARY | FLOATS).items() if each == how)
    return f"{how.format}-{how.bits}-{'sym' if how.symmetric else 'zeros'}-{how.group}"


CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose weights have 64 or 96 inputs, which groups of 16 and of 32 divide."""
    return make_vllm_model("llama", tmp_path_factory.mktemp("plain") / "llama")


@pytest.mark.parametrize("how", [*sampled(ALL, 9), *FLOATS.values()], ids=name_of)
def test_a_quantised_model_is_the_model_that_its_bits_stand_for(
    model: Path, tmp_path: Path, how: How | ByLibrary
) -> None:
    quantise(model, tmp_path / "bits", tmp_path / "numbers", how)
    found = load_causal_lm(str(tmp_path / "bits"), "auto", CPU)
    expected = load_causal_lm(str(tmp_path / "numbers"), "auto", CPU)
    assert found.dtype == expected.dtype == how.dtype
    pairs = dict(expected.named_parameters())
    assert dict(found.named_parameters()).keys() == pairs.keys()
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, pairs[name]), name
    layers = dict(quantised_layers(found))
    assert len(layers) == 2 * 7 and all(weight.bits == how.bits for weight in layers.values())
    checkpoint = quantised_checkpoint(str(tmp_path / "bits"))
    assert checkpoint is not None
    outline, weight = (get(checkpoint.layers[0]) for get in (checkpoint.outline, checkpoint.weight))
    shapes = [
        [(kind, t.shape, t.dtype) for kind, t in each.parameters().items()]
        for each in (outline, weight)
    ]
    assert shapes[0] == shapes[1] and all(t.is_meta for t in outline.parameters().values())


@pytest.mark.parametrize("how", sampled(ALL, 7), ids=name_of)
def test_what_did_not_move_is_written_as_it_was(
    model: Path, tmp_path: Path, how: How | ByLibrary
) -> None:
    quantise(model, tmp_path / "bits", tmp_path / "numbers", how)
    checkpoint = quantised_checkpoint(str(tmp_path / "bits"))
    assert checkpoint is not None
    still = {"scales": torch.ones, "zeros": torch.zeros}
    moved = {}
    for name, value in checkpoint.parameters().items():
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


def by_library(form: str, weights: dict[str, object], **more: object) -> dict[str, object]:
    groups = {"g": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "it is bitsandbytes; accepted are awq, comp"),
        ({"bits": 3}, "it has 3 bits; accepted"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "its version is gemv_fast"),
        ({"quant_method": "awq", "bits": 8}, "it is awq of 8 bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "its settings cannot be read"),
        ({"checkpoint_format": "marlin"}, "its checkpoint_format is marlin"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, r"its layers differ \(dynamic\)"),
        (by_library("pack-quantized", {}, transform_config={"u": {}}), "it has a transform_config"),
        (
            by_library("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
            "its format is nvfp4-pack-quantized, with 4 bits of type float",
        ),
        (
            by_library("pack-quantized", {"num_bits": 8, "strategy": "token"}),
            "its strategy is token",
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


GPTQ, AWQ, BLOCKS = How("gptq"), How("awq", symmetric=False), FLOATS["fp8"]
W8A8 = LIBRARY["w8a8 int"]


@pytest.mark.parametrize(
    ("how", "suffix", "change", "said"),
    [
        (GPTQ, "scales", lambda t: t[:1], r"scales have shape \(96, 1\).*it must be \(96, 4\)"),
        (
            GPTQ,
            "qweight",
            torch.Tensor.long,
            "gptq, .*qweight is torch.int64 .* must be torch.int32",
        ),
        (GPTQ, "scales", lambda t: t * torch.nan, "scales or codes are NaN or infinite"),
        (BLOCKS, "weight", lambda t: (t.float() * torch.nan).to(t.dtype), "NaN or infinite"),
        (W8A8, "weight_zero_point", lambda _: torch.ones(96, 1), "must be 0 where it is symmetric"),
        (GPTQ, "g_idx", lambda t: t + 1, "must name one of 4 groups for each of 64 inputs"),
        (GPTQ, "qweight", None, "lacks model.layers.0.mlp.up_proj.qweight"),
        (AWQ, "qzeros", torch.Tensor.float, r"zeros have shape"),
        (BLOCKS, "weight_scale_inv", None, r"float8_e4m3fn and has no scales.*weight_scale_inv"),
        (
            BLOCKS,
            "weight",
            lambda t: t.to(torch.float8_e5m2),
            "weight is torch.float8_e5m2 of shape",
        ),
        (W8A8, "weight_scale", None, "up_proj.weight is torch.int8 and has no scales"),
    ],
)
def test_a_damaged_layer_is_named(
    model: Path,
    tmp_path: Path,
    how: How | ByLibrary,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    said: str,
) -> None:
    quantise(model, tmp_path / "bits", tmp_path / "numbers", how)
    path = tmp_path / "bits" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.0.mlp.up_proj.{suffix}"
    before = tensors.pop(name, torch.zeros(()))
    if change is not None:
        tensors[name] = change(before).contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=said) as raised:
        load_causal_lm(str(tmp_path / "bits"), "auto", CPU)
    assert "up_proj" in str(raised.value)
