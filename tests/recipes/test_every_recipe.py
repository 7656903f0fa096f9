"""What holds of every recipe: its Config, its bundled model, and how that is made."""

import dataclasses
import functools
import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from es_cookbook import train
from es_cookbook.commands.recipe_configs import recipe_config, recipe_names
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.recipe import Recipe
from es_cookbook.train.program import default_log_path

OPTIONS = {
    "arithmetic": ("dataset.prompt=words", "dataset.fold=1"),
    "calculator": ("dataset.prompt=words", "dataset.chat.tools_in=system"),
    "code": ("dataset.reward=all", "dataset.limits.seconds=2"),
    "conciseness": ("kl.weight=0.1", "dataset.tag=kind"),
    "countdown": ("dataset.prompt=paper", "optimizer=momentum"),
    "crossword": ("dataset.reward.form=exact", "dataset.prompt=words"),
    "guess_number": ("dataset.prompt=words", "dataset.chat.max_tokens=9"),
    "logic": ("dataset.task=lcm", "dataset.options=max_value=9,min_numbers=2"),
    "markovian": ("dataset.template=words", "dataset.template.chat=False"),
    "math": ("dataset.prompt=boxed", "dataset.grading=math"),
    "mixture": ("dataset.replay=None", "dataset.main.num_train=99"),
    "pairwise": ("dataset.tournament.pattern=ring",),
    "rush_hour": ("dataset.size=6", "dataset.reward.moves=optimal"),
    "search": ("dataset.prompt=words", "dataset.chat.tools_in=system"),
    "tic_tac_toe": ("dataset.pairing=swiss", "dataset.draw=0.25"),
}
TINY = {
    "arithmetic": {"batch_size": 4},
    "calculator": {"num_problems": 4, "batch_size": 4},
    "conciseness": {"num_problems": 90},
    "countdown": {"num_problems": 20, "batch_size": 4, "habit_steps": 1},
    "crossword": {"num_problems": 90},
    "guess_number": {"num_problems": 4, "batch_size": 4},
    "logic": {"num_problems": 9, "batch_size": 4},
    "markovian": {"batch_size": 6, "settling": 1},
    "math": {"num_problems": 8, "batch_size": 2},
    "pairwise": {},
    "rush_hour": {"num_problems": 6, "batch_size": 4},
    "search": {"num_problems": 4, "batch_size": 4},
    "tic_tac_toe": {"batch_size": 8},
}
"""Recipes with a model of their own -> options that make a tiny one."""
needs_reasoning_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
MADE = [pytest.param(name, marks=needs_reasoning_gym if name == "logic" else ()) for name in TINY]


def recipe_of(name: str) -> Recipe:
    return importlib.import_module(f"es_cookbook.recipes.{name}.train_cli").RECIPE


def warm_start_of(name: str) -> ModuleType:
    return importlib.import_module(f"es_cookbook.recipes.{name}.warm_start")


@pytest.mark.parametrize("name", recipe_names())
def test_the_config_round_trips_and_names_the_run(name: str) -> None:
    seen: list[train.Config] = []
    options = ("optimizer.sigma=0.02", "num_generations=3", *OPTIONS.get(name, ()))
    run_cli(seen.append, recipe_config(name), options)
    again = config_from_json(config_to_json(seen[0]))
    assert type(again) is recipe_config(name) and again == seen[0]
    assert again != recipe_config(name)(log_path=seen[0].log_path)  # pyright: ignore
    assert default_log_path(seen[0], name).startswith(f"runs/{name}-seed0-")


@pytest.mark.parametrize("name", recipe_names())
def test_the_bundled_model_is_there_and_small(name: str) -> None:
    model = recipe_of(name).model
    assert (model.parent.name == name) == (name in TINY)
    assert 0 < sum(path.stat().st_size for path in model.iterdir()) <= 4_000_000


@pytest.mark.parametrize("name", MADE)
def test_the_warm_start_is_seeded_and_loads_as_the_bundled_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, recipe = warm_start_of(name), recipe_of(name)
    few = dataclasses.replace(recipe, dataset=functools.partial(recipe.dataset, num_test=4))
    monkeypatch.setattr(module, "RECIPE", few, raising=False)
    monkeypatch.setattr(module, "NUM_MEASURED", 40, raising=False)
    before, weights = torch.random.get_rng_state(), set[bytes]()
    for output in (tmp_path / "a", tmp_path / "b"):
        config = module.Config(output=str(output), steps=2, **TINY[name])
        module.main(config)
        weights.add((output / "model.safetensors").read_bytes())
        assert capsys.readouterr().out.endswith(f"written to {output}\n")
    assert len(weights) == 1 and torch.equal(before, torch.random.get_rng_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    made, bundled = (
        AutoModelForCausalLM.from_pretrained(d) for d in (tmp_path / "a", recipe.model)
    )
    assert {n: w.shape for n, w in made.state_dict().items()} == {
        n: w.shape for n, w in bundled.state_dict().items()
    }
    tokenizers = [AutoTokenizer.from_pretrained(d) for d in (tmp_path / "a", recipe.model)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template


@pytest.mark.parametrize("name", MADE)
def test_a_warm_start_refuses_what_cannot_be(name: str, tmp_path: Path) -> None:
    module = warm_start_of(name)
    for output in (tmp_path, tmp_path / "none" / "model"):
        with pytest.raises(ConfigError, match="output must be a new directory"):
            module.main(module.Config(output=str(output)))
    for option in ("steps", *TINY[name]):
        with pytest.raises(ConfigError, match=f"{option} must be (at least|0 or more)"):
            module.Config(output="x", **{option: -1})
