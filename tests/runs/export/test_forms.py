"""Exports of runs over transposed weights and experts, loaded by plain transformers and by PEFT."""

import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from es_cookbook import FullRank, LowRank
from es_cookbook.checkpoints.linear_weights import linear_weights, named_weights
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.export.export import write_export
from es_cookbook.runs.export.forms import fit
from tests.linear_models import LINEAR_FAMILIES, make_linear_model
from tests.runs.recorded_run import record_run

STEPS = (Step((Term(1, 0.02), Term(2, -0.03))), Step((Term(3, 0.05),), decay=0.1))
TOKENS = torch.tensor([[5, 7, 9, 12, 30, 3, 4, 20, 21, 22, 8, 6]])


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def export(run: Path, output: Path, merge: bool = False, rank: int | None = None) -> Path:
    write_export(open_replay(run), output, merge=merge, rank=rank)
    return output


@pytest.mark.daily
@pytest.mark.parametrize("space", [LowRank(rank=2), FullRank()], ids=["low rank", "dense"])
@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_a_model_directory_has_the_very_bits_of_the_centre(
    tmp_path: Path, family: str, space: SearchSpaceBuilder
) -> None:
    model = make_linear_model(family, tmp_path / "model")
    run = record_run(tmp_path / "run", model, space, STEPS)
    found = dict(named_weights(load(export(run.path, tmp_path / "out"))))
    base = dict(named_weights(load(model)))
    assert found.keys() == base.keys()
    assert (
        run.weights[-1].keys()
        == (base if isinstance(space, FullRank) else linear_weights(load(model))).keys()
    )
    for name, weight in found.items():
        assert torch.equal(weight, run.weights[-1].get(name, base[name])), name
        assert torch.equal(weight, base[name]) == (name not in run.weights[-1]), name


@pytest.mark.daily
@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_a_fitted_adapter_of_full_rank_answers_in_peft_as_the_centre(
    tmp_path: Path, family: str
) -> None:
    model = make_linear_model(family, tmp_path / "model")
    run = record_run(tmp_path / "run", model, LowRank(), STEPS)
    expected = logits(load(export(run.path, tmp_path / "whole")))
    out = export(run.path, tmp_path / "adapter", rank=3)
    assert (logits(load(model)) - expected).abs().max() > 0.1
    found = logits(PeftModel.from_pretrained(load(model), out))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(load(out)), expected, rtol=0, atol=1e-4)


@pytest.mark.daily
@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_an_adapter_answers_in_peft_as_it_does_merged(tmp_path: Path, family: str) -> None:
    model = make_linear_model(family, tmp_path / "model")
    space = Adapter(rank=2, alpha=5.0, init="orthogonal")
    run = record_run(tmp_path / "run", model, space, STEPS)
    expected = logits(load(export(run.path, tmp_path / "whole", merge=True)))
    out = export(run.path, tmp_path / "adapter")
    assert (logits(load(model)) - expected).abs().max() > 0.01
    assert "vllm" not in (out / "README.md").read_text(), "which takes no such adapters"
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == family.startswith("gpt2")
    assert bool(config.get("target_parameters")) == (not family.startswith("gpt2"))
    found = logits(PeftModel.from_pretrained(load(model), out))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    again = record_run(tmp_path / "again", model, Adapter(start=str(out)), ())
    assert again.fingerprints[0] == run.fingerprints[-1]


def noise_sum(rows: int, columns: int, terms: int) -> torch.Tensor:
    """What steps add to a weight: a sum of rank-1 noise."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(rows, terms, generator=generator) * 1e-3
    return a @ torch.randn(terms, columns, generator=generator)


def left(matrix: torch.Tensor, rank: int) -> float:
    """The share of a matrix that its nearest one of a rank leaves out."""
    a, b = fit(matrix, rank)
    assert (a.shape, b.shape) == ((rank, matrix.shape[1]), (matrix.shape[0], rank))
    return float((matrix - b @ a).double().norm() / matrix.double().norm())


@pytest.mark.parametrize(
    ("rows", "columns", "terms", "rank"),
    [
        *((40, 70, 30, 12), (70, 40, 30, 5), (600, 900, 30, 12)),
        (1100, 800, 1500, 64),  # Singular values that decay slowly.
    ],
)
def test_a_fit_is_as_near_as_can_be(rows: int, columns: int, terms: int, rank: int) -> None:
    matrix = noise_sum(rows, columns, terms)
    squares = torch.linalg.svdvals(matrix.double()).square()
    best = math.sqrt(squares[rank:].sum() / squares.sum())
    assert best * 0.9999 <= left(matrix, rank) <= best * 1.002


@pytest.mark.parametrize("size", [50, 700])
def test_a_fit_of_the_matrix_s_own_rank_leaves_nothing_but_rounding(size: int) -> None:
    matrix = noise_sum(size, size, 6)
    assert left(matrix, 5) > 0.1
    assert left(matrix, 6) < 1e-5
    a, b = fit(torch.zeros(size, size), 4)
    assert not (b @ a).any()
    few = noise_sum(3, 20, 9)
    assert left(few, 8) < 1e-5 and not fit(few, 8)[0][3:].any(), "filled with zeros"


def test_the_same_matrix_gives_the_same_factors() -> None:
    matrix = noise_sum(700, 600, 30)
    before = torch.get_rng_state()
    first, second = fit(matrix, 8), fit(matrix, 8)
    assert all(map(torch.equal, first, second))
    assert torch.equal(torch.get_rng_state(), before)
