"""Adapters of transposed weights and of experts that PEFT itself has written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
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


def test_what_peft_does_with_more_than_lora_is_refused(tmp_path: Path) -> None:
    path = make_linear_model("gpt2", tmp_path / "model")
    peft_adapter("gpt2", path, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with pytest.raises(ModelError, match="has use_dora, and only plain LoRA and rsLoRA can be"):
        Adapter(start=str(tmp_path / "adapter"))(parameter_infos(model), read_adapter)
