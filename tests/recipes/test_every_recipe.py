"""What holds of every recipe: its Config, its bundled model, and how that is made."""

import importlib
import random
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType

import chz
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config, recipe_defaults
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.chz_fields import doc_of
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.runs.config import Config
from es_cookbook.runs.program import default_log_path
from tests.recipe_problems import short_run
from tools.warm_start import sampled

OPTIONS = {
    "arithmetic": ("dataset.prompt=words", "dataset.fold=1"),
    "calculator": ("dataset.prompt=words", "dataset.chat.tools_in=system"),
    "chat": ("dataset.task=extraction", "optimizer=adam"),
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


@pytest.mark.parametrize("name", RECIPES)
def test_the_config_round_trips_and_names_the_run(name: str) -> None:
    seen: list[Config] = []
    options = ("optimizer.sigma=0.02", "num_generations=3", *OPTIONS.get(name, ()))
    run_cli(seen.append, recipe_config(name), options)
    again = config_from_json(config_to_json(seen[0]))
    assert type(again) is recipe_config(name) and again == seen[0]
    assert again != recipe_config(name)(log_path=seen[0].log_path)  # pyright: ignore
    assert default_log_path(seen[0], name).startswith(f"runs/{name}-seed0-")


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_without_options_has_what_the_recipe_says(name: str) -> None:
    made = list[Config]()
    run_cli(made.append, recipe_config(name), ())
    (config,) = made
    assert config == recipe_defaults(name) and type(config.optimizer) is ES
    assert all(doc_of(type(config), field) for field in chz.chz_fields(config))
    samples = name in ("conciseness", "alignment")  # What they do seldom shows up.
    assert config.sampling.temperature == (1.0 if samples else 0.0)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "chat"])
def test_the_bundled_model_is_there_and_small(name: str) -> None:
    model = Path(recipe_defaults(name).model_name)
    assert (model.parent.name == name) == (name in TINY)
    assert 0 < sum(path.stat().st_size for path in model.iterdir()) <= 4_000_000


@pytest.mark.parametrize("name", MADE)
def test_the_warm_start_is_seeded_and_loads_as_the_bundled_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, recipe = warm_start_of(name), recipe_defaults(name)
    few = chz.replace(recipe, dataset=chz.replace(recipe.dataset, num_test=4))  # pyright: ignore
    monkeypatch.setattr(module, "CLIConfig", lambda: few, raising=False)
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


def test_demonstrations_are_drawn_anew_from_all_problems() -> None:
    batches = sampled(lambda _: list(range(9)), lambda problem, _: (str(problem), ""), 4)
    drawn = [{asked for asked, _ in batch} for batch in islice(batches(random.Random(0)), 20)]
    assert all(len(batch) == 4 for batch in drawn) and len(set.union(*drawn)) == 9


@pytest.mark.parametrize("name", MADE)
def test_a_warm_start_refuses_what_cannot_be(name: str, tmp_path: Path) -> None:
    module = warm_start_of(name)
    for output in (tmp_path, tmp_path / "none" / "model"):
        with pytest.raises(ConfigError, match="output must be a new directory"):
            module.main(module.Config(output=str(output)))
    for option in ("steps", *MORE.get(name, {})):
        with pytest.raises(ConfigError, match=f"{option} must be (at least|0 or more)"):
            module.Config(output="x", **{option: -1})


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("alignment", "pairs"),
        ("conciseness", "questions"),
        ("crossword", "clues"),
        ("pairwise", "additions"),
    ],
)
def test_bundled_rows_are_those_of_the_command(name: str, program: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"es_cookbook.recipes.{name}.{program}")
    output = tmp_path / f"{program}.jsonl"
    module.main(module.Config(output=str(output)))
    assert output.read_bytes() == Path(str(module.__file__)).with_name(output.name).read_bytes()
    with pytest.raises(ConfigError, match=r"cannot write output .*: File exists"):
        module.main(module.Config(output=str(output)))
    module.main(module.Config(output=str(tmp_path / "few"), count=3))
    with pytest.raises(ConfigError, match="count must be at least 1"):
        module.Config(output="x", count=0)
    few = (tmp_path / "few").read_bytes()
    assert few.count(b"\n") == 3 and output.read_bytes().startswith(few)


RUNS: dict[str, tuple[int, tuple[str, ...], dict[str, tuple[float, float]]]] = {
    "arithmetic": (3, ("digits", "forgot_carry"), {"well_formed": (0.5, 1)}),
    "calculator": (3, ("tool_calls",), {"well_formed": (0.5, 1)}),
    "crossword": (8, ("fits", "format"), {}),
    "guess_number": (3, ("turns", "halving"), {"well_formed": (0.5, 1)}),
    "logic": (50, ("score",), {"well_formed": (1, 1), "correct": (0.1, 0.6)}),
    "math": (20, ("format",), {"answered": (0.98, 1), "correct": (0.2, 0.9)}),
    "rush_hour": (
        *(60, ("legal", "optimal")),
        {"well_formed": (0.97, 1), "correct": (0.1, 1), "stops_early": (0.4, 1)},
    ),
    "search": (3, ("tool_calls",), {"well_formed": (0.5, 1)}),
}
"""Recipe -> held-out problems, metrics, and between what they are of the bundled model."""
TAGS = {"rush_hour": ("easy", "medium", "hard"), "crossword": ("initials",)}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_reasoning_gym if n == "logic" else ()) for n in RUNS]
)
def test_a_run_of_two_generations(name: str, tmp_path: Path) -> None:
    num_test, metrics, bounds = RUNS[name]
    first, second, last = short_run(name, tmp_path / "run", f"dataset.num_test={num_test}")
    named = {"correct", *metrics, *bounds}
    assert all({f"env/all/{metric}" for metric in named} <= row.keys() for row in (first, second))
    for tag in ("all", *TAGS.get(name, ())):
        assert {f"test/env/{tag}/{metric}" for metric in named} <= last.keys()
    for metric, (low, high) in bounds.items():
        assert low <= first[f"test/env/all/{metric}"] <= high, "the bundled model half knows it"
