"""Which weights of real Hugging Face classes are linear, under which name, and stored which way."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from es_cookbook.checkpoints.linear_weights import (
    expert_parameters,
    is_transposed,
    linear_weights,
    named_weights,
    split_member,
)
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.low_rank import LowRank
from tests.linear_models import LINEAR_FAMILIES, make_linear_model

_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_EXPERTS, tie_word_embeddings=False))


def test_experts_are_weights_of_two_axes_between_their_neighbours() -> None:
    model = _qwen3_moe()
    layer = "model.layers.0"
    assert list(linear_weights(model).items()) == [
        *((f"{layer}.self_attn.{name}_proj.weight", False) for name in "qkvo"),
        *((f"{layer}.mlp.experts.gate_up_proj[{e}]", False) for e in range(3)),
        *((f"{layer}.mlp.experts.down_proj[{e}]", False) for e in range(3)),
        ("lm_head.weight", False),
    ]
    shapes = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    assert shapes[f"{layer}.mlp.experts.gate_up_proj[2]"] == (48, 32)
    assert shapes[f"{layer}.mlp.experts.down_proj[0]"] == (32, 24)
    parameters = dict(model.named_parameters())
    members = [name for name in shapes if split_member(name)[1] is not None]
    assert len(members) == 6
    assert parameters.keys() - shapes.keys() == {split_member(name)[0] for name in members}
    assert all(weight is parameters[n] for n, weight in named_weights(model) if n not in members)


def test_a_parameter_of_three_axes_in_another_class_stays_whole() -> None:
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = torch.nn.Parameter(torch.zeros(3, 4, 5))

    assert expert_parameters(Other()) == ()
    assert not is_transposed(Other())
    assert [name for name, _ in named_weights(Other())] == ["down_proj"]
    assert linear_weights(Other()) == {}


@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_a_genomes_weights_are_the_formula_over_rows_and_columns_as_stored(
    tmp_path: Path, family: str
) -> None:
    path = make_linear_model(family, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = {name: weight.detach().numpy().copy() for name, weight in named_weights(model)}
    space = LowRank(rank=2)(parameter_infos(model))
    assert space.shapes.keys() == linear_weights(model).keys()
    centre = Centre(dict(named_weights(model)), space)
    centre.apply(Step((Term(3, 0.5),)))
    genome = Genome((Term(7, 0.25),))
    with torch.no_grad():
        space.merge_(
            dict(named_weights(model)),
            {name: centre.perturbed(genome, name) for name in space.shapes},
        )
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    for name, (rows, columns) in space.shapes.items():
        expected = base[name].astype(np.float64)
        for term in (Term(3, 0.5), *genome.terms):
            a = noise(term.seed, f"{name}.A", (rows, 2)).astype(np.float64)
            b = noise(term.seed, f"{name}.B", (columns, 2)).astype(np.float64)
            expected += term.coefficient / math.sqrt(2) * a @ b.T
        parameter, expert = split_member(name)
        found = parameters[parameter] if expert is None else parameters[parameter][expert]
        assert found.shape == (rows, columns)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    others = parameters.keys() - {split_member(name)[0] for name in space.shapes}
    assert all(np.array_equal(parameters[name], base[name]) for name in others)
