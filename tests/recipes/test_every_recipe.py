"""What holds of every recipe: its Config, its bundled model, and a short run."""

from importlib.util import find_spec
from pathlib import Path

import chz
import pytest

from es_cookbook import ES, Config
from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_config, recipe_defaults
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.options import options_of
from es_cookbook.runs.program import with_log_path
from tests.recipe_problems import short_run

OPTIONS = {
    "arithmetic": ("dataset.prompt=words", "dataset.fold=1"),
    "calculator": ("dataset.prompt=words", "dataset.chat.tools_in=system"),
    "chat": ("dataset.task=extraction", "optimizer=adam"),
    "code": ("dataset.reward=all", "dataset.limits.seconds=2"),
    "conciseness": ("kl.weight=0.1", "dataset.tag=kind"),
    "countdown": ("dataset.prompt=paper", "optimizer=momentum"),
    "crossword": ("dataset.reward.form=exact", "dataset.prompt=words"),
    "guess_number": ("dataset.prompt=words", "dataset.chat.max_tokens=9"),
    "knows": ("dataset.meta=Is {} easy?", "dataset.fold=1"),
    "logic": ("dataset.task=lcm", "dataset.options=max_value=9,min_numbers=2"),
    "markovian": ("dataset.template=words", "dataset.template.chat=False"),
    "math": ("dataset.prompt=boxed", "dataset.grading=math"),
    "merge": ("dataset.tasks=sums,conciseness", "search_space.each=layer", "optimizer=cma"),
    "mixture": ("dataset.replay=None", "dataset.main.num_train=99"),
    "pairwise": ("dataset.tournament.pattern=ring",),
    "rush_hour": ("dataset.size=6", "dataset.reward.moves=optimal"),
    "search": ("dataset.prompt=words", "dataset.chat.tools_in=system"),
    "tic_tac_toe": ("dataset.draw=0.25",),
}
BORROWED = {"code": "countdown", "mixture": "countdown", "alignment": "conciseness"}
"""Recipes without a model of their own -> whose they train."""
REAL = {"chat", "knows", "merge"}
"""Recipes of a real chat model, which is not bundled."""
needs_reasoning_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


@pytest.mark.parametrize("name", RECIPES)
def test_the_config_round_trips_and_names_the_run(name: str) -> None:
    seen: list[Config] = []
    options = ("optimizer.sigma=0.02", "num_generations=3", *OPTIONS.get(name, ()))
    run_cli(seen.append, recipe_config(name), options)
    again = config_from_json(config_to_json(seen[0]))
    assert type(again) is recipe_config(name) and again == seen[0]
    assert again != recipe_config(name)(log_path=seen[0].log_path)  # pyright: ignore
    unnamed = chz.replace(seen[0], log_path="")
    assert with_log_path(unnamed, name).log_path.startswith(f"runs/{name}-seed0-")


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_without_options_has_what_the_recipe_says(name: str) -> None:
    made = list[Config]()
    run_cli(made.append, recipe_config(name), ())
    (config,) = made
    assert config == recipe_defaults(name) and type(config.optimizer) is ES
    assert all(option.doc for option in options_of(type(config)).values())
    samples = name in ("conciseness", "alignment")  # What they do seldom shows up.
    assert config.sampling.temperature == (1.0 if samples else 0.0)


@pytest.mark.parametrize("name", sorted({*RECIPES} - REAL))
def test_the_bundled_model_is_there_and_small(name: str) -> None:
    model = Path(recipe_defaults(name).model_name)
    assert model.parent.name == BORROWED.get(name, name)
    assert 0 < sum(path.stat().st_size for path in model.iterdir()) <= 4_000_000


RUNS: dict[str, tuple[int, tuple[str, ...], dict[str, tuple[float, float]]]] = {
    "arithmetic": (
        *(100, ("digits", "forgot_carry")),
        {"well_formed": (0.98, 1), "correct": (0.3, 0.6)},
    ),
    "calculator": (3, ("tool_calls",), {"well_formed": (0.5, 1)}),
    "countdown": (60, ("well_formed",), {"correct": (0.2, 0.6), "format": (0.5, 0.999)}),
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


@pytest.mark.daily
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
