"""What a loaded model tells the search space and the lanes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from es_cookbook.engines.model_loading import (
    end_of_sequence_ids,
    load_causal_lm,
    load_tokenizer,
    parameter_infos,
)
from tests.tiny_models import EOS, FAMILIES, VOCABULARY

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_told_by_kind_and_tied_ones_once(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    model = load_causal_lm(str(tiny_model(family)), "float32", CPU)
    infos = parameter_infos(model)
    assert {p.name: p.shape for p in infos} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    kinds = {p.name: p.kind for p in infos}
    tables = [p.name for p in infos if p.shape == (VOCABULARY, 32)]
    tied = family in ("qwen2", "gemma2", "gemma3")
    assert [kinds[name] for name in tables] == ["embedding"] + ["linear"] * (not tied)
    others = [p for p in infos if p.name not in tables]
    assert all(p.kind == ("linear" if len(p.shape) == 2 else "other") for p in others)


def test_dtype_is_the_checkpoints_own_unless_named(tiny_model: Callable[[str], Path]) -> None:
    path = str(tiny_model("qwen2"))
    assert load_causal_lm(path, "auto", CPU).dtype == torch.float32
    assert load_causal_lm(path, "bfloat16", CPU).dtype == torch.bfloat16


def test_sequences_end_where_the_model_or_its_generation_config_says(
    tiny_model: Callable[[str], Path],
) -> None:
    path = str(tiny_model("qwen2"))
    model, tokenizer = load_causal_lm(path, "float32", CPU), load_tokenizer(path)
    assert end_of_sequence_ids(model, tokenizer) == (EOS,)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [EOS, 7]
    assert end_of_sequence_ids(model, tokenizer) == (EOS, 7)
