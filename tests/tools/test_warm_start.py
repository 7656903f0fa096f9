"""How bundled models are made: seeded, as the bundled ones are, or not at all."""

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import chz
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.errors import ConfigError
from tests.families import sampled

TINY = {
    "arithmetic": {"BATCH_SIZE": 4, "SAMPLES": 2},
    "calculator": {"NUM_PROBLEMS": 4},
    "conciseness": {"NUM_PROBLEMS": 90},
    "countdown": {"NUM_PROBLEMS": 20, "BATCH_SIZE": 4, "SAMPLES": 2},
    "crossword": {"NUM_PROBLEMS": 90},
    "guess_number": {"NUM_PROBLEMS": 4},
    "logic": {"NUM_PROBLEMS": 9, "BATCH_SIZE": 4},
    "markovian": {"BATCH_SIZE": 6, "NUM_MEASURED": 40},
    "math": {"NUM_PROBLEMS": 8, "BATCH_SIZE": 2},
    "pairwise": {"NUM_MEASURED": 40},
    "rush_hour": {"NUM_PROBLEMS": 6, "BATCH_SIZE": 4},
    "search": {"NUM_PROBLEMS": 4},
    "tic_tac_toe": {"BATCH_SIZE": 8, "NUM_MEASURED": 40},
}
"""Recipes with a model of their own -> of their warm start, what a tiny one is made of."""
MORE = {"countdown": {"habit_steps": 1}, "markovian": {"settling": 1}}
"""Options of their warm starts."""
needs_reasoning_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
MADE = [pytest.param(name, marks=needs_reasoning_gym if name == "logic" else ()) for name in TINY]


def warm_start_of(name: str) -> ModuleType:
    return importlib.import_module(f"tools.bundled.{name}")


@pytest.mark.daily
@pytest.mark.parametrize("name", sampled(MADE, 4))
def test_the_warm_start_is_seeded_and_loads_as_the_bundled_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, recipe = warm_start_of(name), recipe_defaults(name)
    if hasattr(module, "CLIConfig"):  # on whose held-out problems it is measured
        few = chz.replace(recipe, dataset=chz.replace(recipe.dataset, num_test=4))
        monkeypatch.setattr(module, "CLIConfig", lambda: few)
    for constant, value in TINY[name].items():
        monkeypatch.setattr(module, constant, value)
    before, weights = torch.random.get_rng_state(), set[bytes]()
    for output in (tmp_path / "a", tmp_path / "b"):
        config = module.Config(output=str(output), steps=2, **MORE.get(name, {}))
        module.main(config)
        weights.add((output / "model.safetensors").read_bytes())
        assert capsys.readouterr().out.endswith(f"written to {output}\n")
    assert len(weights) == 1 and torch.equal(before, torch.random.get_rng_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    made, bundled = (
        AutoModelForCausalLM.from_pretrained(d) for d in (tmp_path / "a", recipe.model_name)
    )
    assert {n: w.shape for n, w in made.state_dict().items()} == {
        n: w.shape for n, w in bundled.state_dict().items()
    }
    tokenizers = [AutoTokenizer.from_pretrained(d) for d in (tmp_path / "a", recipe.model_name)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


def test_a_warm_start_refuses_what_cannot_be(tmp_path: Path) -> None:
    module = warm_start_of("arithmetic")
    with pytest.raises(ConfigError, match="output must be a new directory"):
        module.main(module.Config(output=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"steps must be (at least|0 or more)"):
        module.Config(output="x", steps=-1)
