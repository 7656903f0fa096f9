"""A run from a GGUF file, and runs that become one: what llama.cpp would load, read back."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.gguf.export import write_gguf
from es_cookbook.plugins.gguf.form import GGUF
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


def test_an_adapter_is_merged_into_the_file(tmp_path: Path) -> None:
    base = make_gguf_model("llama", tmp_path / "llama")
    run = record_run(tmp_path / "run", base, Adapter(rank=2, alpha=6.0, init="orthogonal"))
    write(run.path, tmp_path / "mine", form=GGUF(matrices="bfloat16"))
    write(run.path, tmp_path / "merged", merge=True)
    found, expected = weights(tmp_path / "mine"), weights(tmp_path / "merged")
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in expected.items())
    whole = record_run(tmp_path / "whole", base, LowRank())
    with pytest.raises(ConfigError, match="a GGUF file holds the whole model: leave rank out"):
        write(whole.path, tmp_path / "ranked", form=GGUF(), rank=8)
