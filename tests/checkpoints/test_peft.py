"""Adapters of transposed weights and of experts that PEFT itself has written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.common.errors import ModelError
from es_cookbook.evolution.spaces.adapter import Adapter
from tests.linear_models import make_linear_model

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    "gpt2, untied": {"target_modules": ["c_attn", "lm_head"], "use_rslora": True},
    "qwen3_moe": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
    },
    "gpt_oss": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
}


def peft_adapter(family: str, model: Path, path: Path) -> dict[str, torch.Tensor]:
    """Have PEFT write one with random factors. Returns the weights that it makes of the model's."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **CONFIGS[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        adapted = get_peft_model(base, config)
        adapted.save_pretrained(path, save_embedding_layers=False)
    return dict(named_weights(adapted.merge_and_unload()))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_adapter_of_peft_is_merged_as_peft_merges_it(tmp_path: Path, family: str) -> None:
    path = make_linear_model(family, tmp_path / "model")
    expected = peft_adapter(family, path, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    space = Adapter(start=str(tmp_path / "adapter"))(parameter_infos(model), read_adapter)
    found = dict(named_weights(model))
    before = {name: weight.detach().clone() for name, weight in found.items()}
    with torch.no_grad():
        space.merge_(found, space.base({}))
    assert found.keys() == expected.keys()
    assert space.adapter is not None
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)
        changed = (weight - before[name]).abs().max() > 0.01
        assert changed == (name in space.adapter.targets), name


READ: dict[str, object] = {"r": 1, "lora_alpha": 3, "use_rslora": True, "target_parameters": ["x"]}
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "exclude_modules", "lora_dropout", "fan_in_fan_out"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "qalora_group_size"),
}
REFUSED = {
    *("init_lora_weights", "bias", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("megatron_config", "trainable_token_indices", "use_dora", "velora_config", "use_qalora"),
    *("alora_invocation_tokens", "monteclora_config", "layer_replication", "lora_bias"),
    *("use_bdlora", "arrow_config", "kasa_config", "ensure_weight_tying", "peft_type"),
}
NOT_WRITTEN = {"runtime_config"}
"""Of PEFT's fields: how it runs, which no file holds."""


def test_every_field_of_pefts_config_is_read_or_without_effect_or_refused(tmp_path: Path) -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)} - NOT_WRITTEN
    assert fields <= READ.keys() | WITHOUT_EFFECT | REFUSED, "PEFT has a new field"
    a, b = (f"base_model.model.0.lora_{side}.weight" for side in "AB")
    save_file({a: torch.ones(1, 2), b: torch.ones(3, 1)}, tmp_path / "adapter_model.safetensors")

    def read(**changes: object) -> float:
        config = LoraConfig(r=1, lora_alpha=5, target_modules="0").to_dict() | changes
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        lora = read_adapter(tmp_path, {"0.weight": (3, 2)}).lora
        return lora.scale

    assert read() == 5.0
    assert {read(**{name: "corda"}) for name in WITHOUT_EFFECT} == {5.0}
    for name in (*REFUSED, "of_a_later_release"):
        with pytest.raises(ModelError, match=f"the adapter in .* has {name}="):
            read(**{name: "corda"})
    assert read(of_a_later_release=None, merge_weights=False) == 5.0
    with pytest.raises(ModelError, match="use_rslora must be true or false, found 'no'"):
        read(use_rslora="no")
