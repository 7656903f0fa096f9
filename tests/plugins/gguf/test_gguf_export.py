"""A run from a GGUF file, and runs that become one: what llama.cpp would load, read back."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from es_cookbook import FullRank, LowRank
from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.plugins.gguf.export import write_gguf
from es_cookbook.plugins.gguf.form import GGUF
from es_cookbook.plugins.vectors.spaces import Steering
from tests.gguf_models import make_gguf_model
from tests.runs.recorded_run import record_run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def write(run: Path, output: Path, **fields: Any) -> str:
    return export(ExportConfig(log_path=str(run), output=str(output), **fields))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_causal_lm(str(path), "auto", CPU).named_parameters())


def test_a_run_from_a_file_becomes_a_file_with_the_bits_of_its_centre(tmp_path: Path) -> None:
    directory = make_gguf_model("llama", tmp_path / "llama")
    base = tmp_path / "base.gguf"
    write_gguf(directory, base, "bfloat16", str(directory))
    run = record_run(tmp_path / "run", base, FullRank())
    said = write(run.path, tmp_path / "mine", form=GGUF())
    assert said.endswith(f"as a GGUF file, its matrices bfloat16: {tmp_path / 'mine'}")
    found = weights(tmp_path / "mine")
    assert {name: str(value.dtype) for name, value in found.items()} == dict.fromkeys(
        run.weights[-1], "torch.bfloat16"
    )
    assert all(
        torch.equal(found[name], value.bfloat16()) for name, value in run.weights[-1].items()
    )
    card = (tmp_path / "mine/README.md").read_text()
    assert f"llama-cli --model {tmp_path / 'mine/mine.gguf'} --prompt" in card
    assert "library_name: gguf" in card
    old, new = (
        {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if "tokenizer." in k}
        for path in (base, tmp_path / "mine/mine.gguf")
    )
    assert old == new, "the tokenizer is the base's own"
    write(run.path, tmp_path / "small", form=GGUF(matrices="q8_0"))
    of_file = gguf.GGUFReader(tmp_path / "small/small.gguf").tensors
    kinds = {tensor.name: tensor.tensor_type.name for tensor in of_file}
    assert kinds["blk.0.attn_q.weight"] == "Q8_0" and kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_steering_vectors_become_biases_of_a_file(tmp_path: Path, family: str) -> None:
    base = make_gguf_model(family, tmp_path / "base")
    run = record_run(tmp_path / "run", base, Steering())
    write(run.path, tmp_path / "mine", form=GGUF(matrices="bfloat16"))
    found, (last, *_) = weights(tmp_path / "mine"), run.weights[::-1]
    for layer in range(2):
        vector = last[f"model.layers.{layer}.steering"]
        bias = found[f"model.layers.{layer}.mlp.down_proj.bias"]
        assert torch.equal(bias, vector.bfloat16()) and vector.abs().max() > 0.1
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in weights(base).items())


@pytest.mark.parametrize("fitted", [True, False], ids=["fitted", "own"])
def test_an_adapter_becomes_a_file_that_llama_cpp_adds_to_the_base(
    tmp_path: Path, fitted: bool
) -> None:
    base = make_gguf_model("llama", tmp_path / "llama")
    space = LowRank() if fitted else Adapter(rank=2, alpha=6.0, init="orthogonal")
    run = record_run(tmp_path / "run", base, space)
    rank = {"rank": 8} if fitted else {}
    write(run.path, tmp_path / "lora", form=GGUF(), **rank)
    reader = gguf.GGUFReader(tmp_path / "lora/lora.gguf")
    says = {name: field.contents() for name, field in reader.fields.items()}
    assert (says["general.type"], says["adapter.type"]) == ("adapter", "lora")
    factors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    write(run.path, tmp_path / "whole", form=GGUF(matrices="float16"), merge=not fitted)
    of_base, of_whole = (
        {t.name: torch.from_numpy(t.data.copy()).float() for t in gguf.GGUFReader(path).tensors}
        for path in (tmp_path / "lora/lora-base.gguf", tmp_path / "whole/whole.gguf")
    )
    for name in ("blk.1.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_down.weight"):
        a, b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
        change = says["adapter.lora.alpha"] / len(a) * (b @ a)
        assert change.abs().max() > 0.01
        torch.testing.assert_close(of_base[name] + change, of_whole[name], rtol=2**-10, atol=2**-10)
    card = (tmp_path / "lora/README.md").read_text()
    models = (tmp_path / "lora" / name for name in ("lora-base.gguf", "lora.gguf"))
    assert "llama-cli --model {} --lora {} --prompt".format(*models) in card


def test_the_base_of_an_adapter_is_the_file_that_the_run_began_from(tmp_path: Path) -> None:
    model, base = make_gguf_model("llama", tmp_path / "llama"), tmp_path / "base.gguf"
    write_gguf(model, base, "float16", str(model))
    run = record_run(tmp_path / "run", base, Adapter(rank=2))
    write(run.path, tmp_path / "lora", form=GGUF())
    assert {path.name for path in (tmp_path / "lora").iterdir()} == {"lora.gguf", "README.md"}
    assert f"llama-cli --model {base} --lora" in (tmp_path / "lora/README.md").read_text()
