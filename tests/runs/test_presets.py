"""Presets: the steps that they lead to are the papers' formulas; what replaces them is told."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.rl.objectives import SURROGATE_NAMES
from es_cookbook.runs.presets import PRESETS
from tests.preset_steps import NAME, SHAPE, START, Stepped, close, preset, summed, z
from tests.said import typed

ROOT = Path(__file__).parents[2]


def test_es_at_scale() -> None:
    """θ + α/N Σ z ε."""
    run = Stepped(preset("es_at_scale"))
    found = run.step(0)
    assert len(set(run.seeds[0])) == 30 and set(run.signs[0]) == {1.0}
    close(found, START + 5e-4 / 30 * summed(z(run.rewards[0]), run.noises[0]))


def test_copes() -> None:
    """θ + α Σ_k P_k g_k, g_k = 1/N_k Σ r ε: equations 12 and 13; σ_k = √K σ: equation 11."""
    config = preset("copes")
    run = Stepped(config)
    assert isinstance(config.optimizer, ES) and config.optimizer.sigma == 1e-3
    centre = Centre({NAME: torch.zeros(SHAPE)}, run.space, num_threads=1)
    genomes_G = run.optimizer.ask(0)
    inside_G = [centre.perturbed(genome, NAME).numpy() != 0 for genome in genomes_G]
    for genome, inside in zip(genomes_G, inside_G, strict=True):
        of_genome = centre.perturbed(genome, NAME).numpy()
        epsilon = noise(genome.terms[0].seed, NAME, SHAPE)
        np.testing.assert_allclose(of_genome[inside], 2e-3 * epsilon[inside], rtol=1e-5)
    found = run.step(0)
    weights_G, expected = z(run.rewards[0]), START.astype(np.float64)
    for part in range(4):
        members = [g for g in range(40) if run.seeds[0][g] % 4 == part]
        assert len(members) == 10
        for g in members:
            expected += 5e-4 / 10 * weights_G[g] * run.noises[0][g] * inside_G[g]
    np.testing.assert_allclose(sum(inside.sum() for inside in inside_G), 10 * START.size)
    close(found, expected)


def test_essam() -> None:
    """θ' = θ - ρ/N Σ z ε, and θ + α/N Σ z' ε' with the rewards z' around θ'."""
    run = Stepped(preset("essam"))
    away = run.step(0)
    close(away, START - 1e-4 / 40 * summed(z(run.rewards[0]), run.noises[0]))
    found = run.step(1)
    close(found, START + 2.5e-4 / 40 * summed(z(run.rewards[1]), run.noises[1]))


def test_anchored() -> None:
    """Base + (1 - αλ) (θ + α/N Σ z ε - base), with λ = 10; the base is 0 here."""
    run = Stepped(preset("anchored"))
    found = run.step(0)
    moved = START + 5e-4 / 30 * summed(z(run.rewards[0]), run.noises[0])
    close(found, (1 - 5e-4 * 10) * moved)


def test_randopt() -> None:
    """Base + σ ε, and no step."""
    config = preset("randopt", **{"optimizer.population_size": "6"})
    assert config.num_generations == 1
    run = Stepped(config)
    assert np.array_equal(run.step(0), START)
    genome, centre = run.optimizer.ask(0)[2], Centre({NAME: torch.zeros(SHAPE)}, run.space)
    epsilon = noise(genome.terms[0].seed, NAME, SHAPE)
    assert np.array_equal(centre.perturbed(genome, NAME).numpy(), np.float32(1e-3) * epsilon)


def test_eggroll() -> None:
    """α/N Σ s A Bᵀ, s the reward less its problem's mean over genomes, over one deviation."""
    sigma, rate = "0.01", "0.02"
    given = {"optimizer.sigma": sigma, "optimizer.learning_rate": rate}
    config = preset("eggroll", **given, **{"optimizer.population_size": "8"})
    run = Stepped(config)
    found = run.step(0)
    rewards_P_G = run.rewards[0]
    scores_G = (rewards_P_G - rewards_P_G.mean(axis=1, keepdims=True)).mean(axis=0)
    scores_G /= rewards_P_G.std()
    expected = START.astype(np.float64)
    for seed, sign, score in zip(run.seeds[0], run.signs[0], scores_G, strict=True):
        a, b = noise(seed, f"{NAME}.A", (SHAPE[0], 1)), noise(seed, f"{NAME}.B", (SHAPE[1], 1))
        expected += 0.02 / 8 * score * sign * (a.astype(np.float64) @ b.T)
    close(found, expected)


def test_what_replaces_a_presets_option_is_told() -> None:
    config = preset("es_at_scale", **{"optimizer.sigma": "0.01", "optimizer.antithetic": "False"})
    assert isinstance(config.optimizer, ES) and config.optimizer.sigma == 0.01
    options = ("optimizer.sigma=0.01", "optimizer.antithetic=False", "--help")
    assert typed("countdown", "preset=es_at_scale", *options).stderr == (
        "preset=es_at_scale: optimizer.sigma=0.01 in place of 0.001; this is no longer what "
        "arXiv:2509.24372 describes\n"
    )
    # Of another optimizer nothing is set that it may not have.
    assert preset("essam", optimizer="genetic").optimizer.population_size == 64


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs/hyper_parameters.md").read_text("utf-8")
    for name, each in PRESETS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"({each.source.replace('arXiv:', 'https://arxiv.org/abs/')})" in row


def test_a_preset_that_is_none_is_refused() -> None:
    said = typed("countdown", "preset=copse").stderr
    assert said.startswith("preset=copse: did you mean 'copes'? Accepted: anchored, copes, eggroll")
    help_page = typed("countdown", "preset=copes", "--help").stdout
    assert "search_space.partitions=4" in help_page
    assert f"\nSettings of papers: preset={'|'.join(PRESETS)}.\n" in help_page


CHOICES = [
    *({"preset": name} for name in PRESETS),
    *({"surrogate": name} for name in SURROGATE_NAMES),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "=".join(*choice.items()))
def test_missing_gold_answers_are_refused_before_the_model_is_loaded(
    choice: dict[str, str], tmp_path: Path
) -> None:
    rows = [{"question": f"{number} + 1 =", "answer": number + 1} for number in range(30)]
    del rows[7]["answer"]  # One is enough, also if it is not in the first batch.
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = {
        **choice,
        **{"data": data, "reward": "tests.runs.test_presets:zero", "log_path": tmp_path / "run"},
        **{
            "model_name": ROOT / "es_cookbook/recipes/arithmetic/model",
            "engine": "tests.fakes:NoEngineBuilder",
            "size": "none",
        },
        **{"batch": 1, "dataset.num_test": 0, "dataset.full_reward": 0},
    }
    words = [f"{name}={value}" for name, value in options.items()]
    source = PRESETS[choice["preset"]].options if "preset" in choice else choice
    if source.get("surrogate") == "gold":
        said = typed("train", *words).stderr.splitlines()[-1]
        assert said.startswith(f"{data}, line 8: it has no gold answer, which surrogate=gold has")
    else:
        with pytest.raises(AssertionError, match="a model was loaded"):
            typed("train", *words)


def zero(text: str, row: object) -> float:
    del text, row
    return 0.0
