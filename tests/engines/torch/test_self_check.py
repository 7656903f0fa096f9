"""The check finds the path that is right for a model, and refuses one for which none is."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.causal_lms import CONTEXT, build
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ModelError
from es_cookbook.engines.torch import self_check
from es_cookbook.engines.torch.kernels.modules import FLAT, widen
from es_cookbook.engines.torch.kernels.modules import Path as RowPath
from es_cookbook.engines.torch.self_check import right_path
from es_cookbook.evolution.spaces.low_rank import LowRank

_SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


Model = TypeVar("Model", bound=PreTrainedModel)


def _path(model: PreTrainedModel, context_length: int = CONTEXT) -> RowPath:
    return right_path(model, LowRank()(parameter_infos(model)), context_length)[0]


def _llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> LlamaForCausalLM:
    return _filled(kind(LlamaConfig(**_SIZES)))


def _filled(model: Model) -> Model:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
    return model.eval()


class _CountsItsBatch(LlamaForCausalLM):
    """Says something else in a larger batch."""

    def forward(self, input_ids: torch.Tensor, **inputs: object) -> object:
        output = super().forward(input_ids, **inputs)
        shift = torch.arange(output.logits.shape[-1]) * 0.001 * (input_ids.numel() - 12)
        output.logits = output.logits + shift
        return output


def test_a_model_that_is_right_on_no_path_is_refused_by_name_with_the_difference() -> None:
    with pytest.raises(ModelError) as error:
        _path(_llama(_CountsItsBatch))
    sentence = str(error.value)
    assert "run _CountsItsBatch as transformers does: log-probabilities are off" in sentence
    difference = float(sentence.partition("off by ")[2].partition(";")[0])
    assert 1e-3 < difference < 10


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("LlamaForCausalLM", FLAT),
        ("Qwen3MoeForCausalLM", FLAT),
        ("GPT2LMHeadModel", FLAT),
        ("GptOssForCausalLM", RowPath()),
        ("Lfm2ForCausalLM", RowPath()),
        ("Llama4ForCausalLM", RowPath(padded=False)),
        ("Gemma3nForCausalLM", FLAT),
        ("MambaForCausalLM", RowPath(padded=False, mixed=False)),
        ("RecurrentGemmaForCausalLM", RowPath(padded=False, cached=False)),
        ("OpenAIGPTLMHeadModel", RowPath(padded=False, cached=False)),
    ],
)
def test_a_model_takes_the_first_path_that_is_right(name: str, path: RowPath) -> None:
    assert _path(build(name)) == path


def test_a_model_that_float32_around_products_breaks_stays_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def widen_and_break(model: nn.Module) -> None:
        widen(model)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(-2)

    model = _llama().bfloat16()
    assert _path(model).wide
    monkeypatch.setattr("es_cookbook.engines.torch.population_layers.widen", widen_and_break)
    path = _path(model)
    assert path.flat and not path.wide


class _Windowed(Qwen2ForCausalLM):
    """Its mask has a window of which its attention is not told."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.sliding_window = None


@pytest.mark.parametrize("window", [4, 64])
def test_a_window_in_the_mask_alone_is_found_at_any_length(window: int) -> None:
    config = Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=window, max_window_layers=1
    )
    assert _path(_filled(Qwen2ForCausalLM(config))) == FLAT
    assert _path(_filled(_Windowed(config))) == RowPath()
    shorter_context = 32
    assert _path(_filled(_Windowed(config)), shorter_context).flat == (window > shorter_context)


def test_of_a_large_model_only_the_first_layers_are_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check, "LARGE", 0)
    for name, path in (("LlamaForCausalLM", FLAT), ("Lfm2ForCausalLM", RowPath())):
        model = build(name)
        expected = _path(model)
        for parameter in model.model.layers[2:].parameters():
            parameter.data.fill_(torch.nan)
        assert _path(model) == expected == path


def test_a_layer_that_only_the_last_layers_have_is_run() -> None:
    model = _llama()
    model.model.layers[2].mlp = _Doubled(model.model.layers[2].mlp)
    assert _path(model) == FLAT
    model.model.layers[2].mlp = _Doubled(model.model.layers[2].mlp, of_batch=True)
    with pytest.raises(ModelError, match="off by"):
        _path(model)


class _Doubled(nn.Module):
    def __init__(self, mlp: nn.Module, of_batch: bool = False) -> None:
        super().__init__()
        self.mlp = mlp
        self.of_batch = of_batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * (x.numel() if self.of_batch else 2)


@pytest.mark.parametrize("make", [_llama, lambda: build("Lfm2ForCausalLM")])
def test_the_check_changes_nothing(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _path(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
