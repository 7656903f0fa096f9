"""What a loaded model tells the search space and the lanes, and what makes a base that base."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from es_cookbook.checkpoints import models
from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.model_files import base_identity
from es_cookbook.common.errors import ModelError
from tests.linear_models import make_linear_model
from tests.tiny_models import EOS, FAMILIES, VOCABULARY

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_have_kinds_and_tied_ones_appear_once(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    model = models.load_causal_lm(str(tiny_model(family)), "float32", CPU)
    infos = models.parameter_infos(model)
    assert {p.name: p.shape for p in infos} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    kinds = {p.name: p.kind for p in infos}
    tables = [p.name for p in infos if p.shape == (VOCABULARY, 32)]
    tied = family in ("qwen2", "gemma2", "gemma3")
    assert [kinds[name] for name in tables] == ["embedding"] + ["linear"] * (not tied)
    others = [p for p in infos if p.name not in tables]
    assert all(p.kind == ("linear" if len(p.shape) == 2 else "other") for p in others)


def test_sequences_end_where_the_model_or_its_generation_config_says(
    tiny_model: Callable[[str], Path],
) -> None:
    path = str(tiny_model("qwen2"))
    model, tokenizer = models.load_causal_lm(path, "float32", CPU), models.load_tokenizer(path)
    assert models.end_of_sequence_ids(model, tokenizer) == (EOS,)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [EOS, 7]
    assert models.end_of_sequence_ids(model, tokenizer) == (EOS, 7)
    model.generation_config, model.config.eos_token_id = None, [5, 4]
    assert models.end_of_sequence_ids(model, tokenizer) == (EOS, 4, 5)


def _copy(path: Path, to: Path) -> Path:
    return shutil.copytree(path, to)


def _weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_the_identity_of_a_base_does_not_depend_on_how_its_files_are_split(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = tiny_model("llama")
    split = _copy(whole, tmp_path / "split")
    model = models.load_causal_lm(str(whole), "auto", CPU)
    (split / "model.safetensors").unlink()
    model.save_pretrained(split, max_shard_size="20KB")
    assert len(list(split.glob("model-*.safetensors"))) > 2
    assert base_identity(str(split)) == base_identity(str(whole))


def test_a_checkpoint_of_torch_save_is_the_same_base(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = tiny_model("qwen2")
    for name, zipped in (("new", True), ("old", False)):
        path = _copy(whole, tmp_path / name)
        (path / "model.safetensors").unlink()
        torch.save(
            _weights(whole), path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped
        )
        assert base_identity(str(path)) == base_identity(str(whole))


NORM, UP = "model.norm.weight", "model.layers.{}.mlp.up_proj.weight"
CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "a bit": lambda own: {NORM: (own[NORM].view(torch.int32) ^ 1).view(torch.float32)},
    "a name": lambda own: {"model.norm.scale": own.pop(NORM)},
    "places": lambda own: {UP.format(i): own[UP.format(1 - i)] for i in (0, 1)},
    "a shape": lambda own: {NORM: own[NORM].reshape(2, -1)},
    "a dtype": lambda own: {NORM: own[NORM].view(torch.int32)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_are_another_base(
    tiny_model: Callable[[str], Path], tmp_path: Path, change: str
) -> None:
    whole = tiny_model("qwen2")
    path = _copy(whole, tmp_path / "other")
    weights = {name: tensor.clone() for name, tensor in _weights(whole).items()}
    weights |= CHANGES[change](weights)
    save_file(weights, path / "model.safetensors")
    found, expected = base_identity(str(path)), base_identity(str(whole))
    assert found[0] != expected[0] and found[1] == expected[1]


@pytest.mark.parametrize("file_name", ["tokenizer.json", "tokenizer_config.json"])
def test_another_tokenizer_is_another_base(
    tiny_model: Callable[[str], Path], tmp_path: Path, file_name: str
) -> None:
    whole = tiny_model("qwen2")
    path = _copy(whole, tmp_path / "other")
    text = (path / file_name).read_text()
    assert "<eos>" in text
    (path / file_name).write_text(text.replace("<eos>", "<end>"))
    found, expected = base_identity(str(path)), base_identity(str(whole))
    assert found[0] == expected[0] and found[1] != expected[1]


def test_a_base_without_weights_or_tokenizer_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = _copy(tiny_model("qwen2"), tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=f"{path}' has no tokenizer"):
        base_identity(str(path))
    (path / "model.safetensors").write_bytes(b"{]")
    with pytest.raises(ModelError, match=r"cannot read weights from .*model\.safetensors'"):
        base_identity(str(path))
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{path}' has no weights"):
        base_identity(str(path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_that_stay_in_float32_are_read_so(tmp_path: Path, dtype: str) -> None:
    path = str(tmp_path)
    shape = Ernie4_5_MoeConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        moe_num_experts=4,
        moe_k=2,
    )
    model = Ernie4_5_MoeForCausalLM(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    held = dict(named_weights(models.load_causal_lm(path, dtype, CPU)))
    assert any(weight.dtype == torch.float32 for weight in held.values())
    found, _ = models.base_parameters(path, models.load_architecture(path), held, dtype)
    assert all(torch.equal(found[name], weight) for name, weight in held.items())


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "qwen3_moe"])
def test_the_stored_form_is_that_of_checkpoints(tmp_path: Path, family: str) -> None:
    path = make_linear_model(family, tmp_path / "model")
    parameters = models.load_causal_lm(str(path), "auto", CPU).named_parameters()
    as_stored = models.stored_form(models.load_architecture(str(path)))
    found = {n: t for name, p in parameters for n, t in as_stored(name, p.detach()).items()}
    stored = _weights(path)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)
