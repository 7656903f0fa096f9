"""Options of configs: those that are shown, those of a file, and those that make a config again."""

from pathlib import Path

import chz
import pytest

from es_cookbook.cli import RECIPES
from es_cookbook.common.cli import built, options_file
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.options import each_option, options_in, options_of
from es_cookbook.common.references import resolve
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.recipes.chat.train_cli import CLIConfig as Chat
from es_cookbook.recipes.countdown.train_cli import CLIConfig as Countdown

YAML = """\
num_generations: 7   # how long
seed: 007
optimizer: momentum
optimizer.sigma: 1e-3
optimizer.learning_rate: 2
trackers.live: null
search_space: {exclude: [a, b]}
sampling:
  max_tokens: 5
"""
TOML = """\
num_generations = 7
seed = "007"
"trackers.live" = "None"
optimizer = "momentum"
"optimizer.sigma" = 1e-3
"optimizer.learning_rate" = 2
search_space.exclude = ["a", "b"]
[sampling]
max_tokens = 5
"""
TYPED = {
    *("num_generations=7", "seed=007", "optimizer=momentum", "optimizer.sigma=1e-3"),
    *("optimizer.learning_rate=2", "trackers.live=None", "search_space.exclude=a,b"),
    "sampling.max_tokens=5",
}


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.toml", TOML)])
def test_a_file_has_options_as_they_would_be_typed(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert set(options_in(tmp_path / name)) == TYPED


def test_items_of_a_list_of_parts_have_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("parts:\n- {tag: a}\n- tag: b\n  names: [c, d]\n")
    assert options_in(path) == ["parts.0.tag=a", "parts.1.tag=b", "parts.1.names=c,d"]


LAUGHS = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "", "must hold options, .* found nothing"),
        ("a.yaml", "- seed", "must hold options, .* found list"),
        ("a.yaml", "a: [", "cannot be read as YAML"),
        ("a.yaml", "a: 1\n---\na: 2", "cannot be read as YAML: expected a single document"),
        ("a.yaml", "a: [[1]]", "a must be text, a number, .* found list"),
        ("a.yaml", "a: [x, 'y,z']", "a: no item of a list can have a comma"),
        ("a.yaml", "a: 1\nb: 2\na: 3", "a is there twice, again in line 3"),
        ("a.yaml", "a: {b: 1}\na: {c: 2}", "a is there twice, again in line 2"),
        ("a.yaml", "a.b: 1\na: {b: 2}", "a.b is there twice, with and without dots"),
        ("a.yaml", "a=b: 1", "options have names, found 'a=b'"),
        ("a.yaml", "? [a]\n: b", "options have names, found a list or a mapping"),
        ("a.yaml", "config: b.yaml", "names no other one, found config"),
        ("a.yaml", "a: &a [*a]", "must not stand for another one"),
        ("a.yaml", f"a0: &a0 [x, x]\n{LAUGHS}", "must not stand for another one"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "the tag !!python/object/apply"),
        ("a.yaml", "[" * 5000, "nested too deeply"),
        ("a.toml", "a: 1", "cannot be read as TOML: Expected '='"),
        ("a.toml", "a = 1\na = 2", "cannot be read as TOML: Cannot overwrite a value"),
        ("a.toml", "a = 2026-01-01", "a must be text, a number, .* found date"),
        ("a.toml", "a = " + "[" * 5000, "nested too deeply"),
        ("a.json", "{}", "must be a .yaml or a .toml file of options"),
    ],
)
def test_files_that_hold_no_options(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        options_in(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        options_in(tmp_path / "none.yaml")


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_that_a_recipe_shows_can_be_typed(recipe: str) -> None:
    config_class = resolve(RECIPES[recipe])
    shown = {each.path: each.value for each in options_of(config_class) if each.value is not None}
    assert len(shown) > 30
    assert built(config_class, shown) == config_class()


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_all_that_an_optimizer_shows_can_be_typed(name: str) -> None:
    chosen = {"optimizer": name}
    shown = {each.path: each.value or "" for each in each_option(Chat, "", chosen, {})}
    spaces = {"qes": "quant_codes", "cma": "full_rank", "sep_cma": "full_rank"}
    space = {"search_space": spaces.get(name, "low_rank")}
    own = {path: text for path, text in shown.items() if path.startswith("optimizer")}
    assert built(Chat, own | space) == built(Chat, chosen | space)


def test_a_config_is_made_again_of_the_options_that_are_no_defaults(tmp_path: Path) -> None:
    config = Countdown(
        optimizer=ES(sigma=1e-5), kl=KLToBase(weight=0.1), seed=3, log_path="somewhere"
    )
    text = options_file(config, without=["log_path"])
    assert text is not None
    path = tmp_path / "run.yaml"
    path.write_text(text)
    options = dict(option.split("=", 1) for option in options_in(path))
    assert options.items() >= {"seed": "3", "optimizer.sigma": "1.0e-05", "kl": "true"}.items()
    assert not {"log_path", "num_generations", "dataset"} & options.keys()
    assert chz.replace(built(Countdown, options), log_path="somewhere") == config
