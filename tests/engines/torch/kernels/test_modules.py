"""Modules are replaced by kernels where these compute the same, and nowhere else."""

import pathlib

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from es_cookbook.engines.torch.kernels.modules import (
    FLAT,
    GatedLayers,
    Norm,
    Path,
    RotaryAttention,
    norm_like,
)
from es_cookbook.engines.torch.population_layers import Batch, PopulationModel
from tests.tiny_models import make_tiny_model


def with_weight(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        next(norm.parameters()).copy_(torch.randn(24))
    return norm


def test_a_norm_is_the_same_function_of_the_same_parameter() -> None:
    own = with_weight(LlamaRMSNorm(24, eps=1e-5))
    norm = norm_like(own)
    assert isinstance(norm, Norm)
    x = torch.randn(2, 3, 24)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x), own(x))
        torch.testing.assert_close(norm(x.transpose(0, 1)), own(x.transpose(0, 1)))
        next(own.parameters()).mul_(2)
        torch.testing.assert_close(norm(x), own(x))


@pytest.mark.parametrize(
    "module",
    [
        GemmaRMSNorm(24),  # adds one to its weight
        nn.LayerNorm(24),  # has a bias
        nn.LayerNorm(24, bias=False),  # takes the mean away
        LlamaRMSNorm(24).to(torch.bfloat16),
        nn.Linear(24, 24, bias=False),
    ],
)
def test_another_function_is_left_alone(module: nn.Module) -> None:
    assert norm_like(with_weight(module) if not isinstance(module, nn.Linear) else module) is None


def test_gated_layers_norms_and_attention_of_a_model_are_replaced(tmp_path: pathlib.Path) -> None:
    path = make_tiny_model("qwen2", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        expected = model(tokens).logits
    names = [name for name, _ in model.named_parameters()]
    own = PopulationModel(model, Path())
    assert not [m for m in own.module.modules() if isinstance(m, Norm | GatedLayers)]
    replaced = PopulationModel(AutoModelForCausalLM.from_pretrained(path), FLAT).module
    kinds = [type(module) for module in replaced.modules()]
    layers = model.config.num_hidden_layers
    assert kinds.count(GatedLayers) == kinds.count(RotaryAttention) == layers
    assert kinds.count(Norm) == 2 * layers + 1
    assert [name for name, _ in replaced.named_parameters()] == names
    with torch.inference_mode():
        torch.testing.assert_close(own.forward(Batch(), input_ids=tokens).logits, expected)
