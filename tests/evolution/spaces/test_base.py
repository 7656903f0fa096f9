"""Selecting parameters by name, and what is refused."""

import pytest
import torch

from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Term
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder

PARAMETERS = [
    ParameterInfo("embed_tokens.weight", (10, 4), "embedding"),
    ParameterInfo("layers.0.q_proj.weight", (6, 4), "linear"),
    ParameterInfo("layers.0.q_proj.bias", (6,), "other"),
    ParameterInfo("layers.1.q_proj.weight", (6, 4), "linear"),
    ParameterInfo("norm.weight", (4,), "other"),
]


def test_low_rank_takes_the_linear_weights_only() -> None:
    shapes = LowRank()(PARAMETERS).shapes
    assert shapes == {"layers.0.q_proj.weight": (6, 4), "layers.1.q_proj.weight": (6, 4)}


def test_include_and_exclude_patterns_select_by_name() -> None:
    builder = FullRank(include=("layers.*", "norm.weight"), exclude=("*.bias", "layers.0.*"))
    assert list(builder(PARAMETERS).shapes) == ["layers.1.q_proj.weight", "norm.weight"]


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_names_the_nearest(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"search_space\.{field}.*'\*q_prj\.bias'.*q_proj\.bias"):
        FullRank(**{field: ("*q_prj.bias",)})(PARAMETERS)


def test_nothing_left_to_perturb_is_refused() -> None:
    with pytest.raises(ConfigError, match="selects no parameter"):
        FullRank(exclude=("*",))(PARAMETERS)
    with pytest.raises(ConfigError, match="selects no linear weight"):
        LowRank(exclude=("layers.*",))(PARAMETERS)


def test_low_rank_refuses_a_pattern_for_other_parameters() -> None:
    with pytest.raises(ConfigError, match=r"'norm\.\*'.*linear weights only"):
        LowRank(include=("layers.*", "norm.*"))(PARAMETERS)


def test_a_centre_is_rounded_into_the_models_own_weights() -> None:
    builder = FullRank(include=("norm.weight",))
    weights = {"norm.weight": torch.zeros(4, dtype=torch.bfloat16), "other": torch.zeros(2)}
    there = weights["norm.weight"]
    builder(PARAMETERS).merge_(weights, {"norm.weight": torch.tensor([1.0, 1.001, -2.0, 3e38])})
    assert there.tolist() == [1.0, 1.0, -2.0, torch.tensor(3e38).bfloat16().item()]


@pytest.mark.parametrize("builder", [LowRank(rank=2), FullRank()])
def test_a_term_of_zero_leaves_every_bit(builder: SearchSpaceBuilder) -> None:
    weight = torch.tensor([0.0, -0.0, torch.nan, torch.inf, 1e-40, 1.0] * 4).view(6, 4)
    before = weight.view(torch.int32).clone()
    # 1e-60 is 0 in float32.
    terms = (Term(1, 0.0), Term(2, -0.0), Term(3, 1e-60))
    builder(PARAMETERS).add_terms_("layers.0.q_proj.weight", weight, terms)
    assert torch.equal(weight.view(torch.int32), before)


@pytest.mark.parametrize("wrong", [torch.zeros(6, 4).bfloat16().double(), torch.zeros(4, 6).T])
def test_weights_that_are_not_contiguous_float32_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous float32"):
        FullRank()(PARAMETERS).add_terms_("layers.0.q_proj.weight", wrong, (Term(1, 1.0),))
