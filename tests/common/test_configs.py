"""Configs survive a trip through text, and names stand for the classes a user means."""

import functools
import json
import math
import operator
import subprocess
import sys
from pathlib import Path

import chz
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.configs import (
    Names,
    config_from_json,
    config_to_json,
    load_config,
    reference,
    resolve,
)
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.optimizers.genetic.genetic import Genetic
from es_cookbook.evolution.schedules import Cosine, Linear


@chz.chz
class Part:
    size: int = chz.field(default=1, doc="how big")


@chz.chz
class Small(Part):
    pass


@chz.chz
class Large(Part):
    weight: float = chz.field(default=2.0, doc="how heavy")

    @chz.validate
    def _weight(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be 0 or more, found {self.weight}")


_PARTS = Names(
    {"small": f"{__name__}:Small", "large": f"{__name__}:Large", "absent": "no_such_package:Part"},
    default="large",
    settings={"large": {"weight": 3.0}, "small": {"size": 4}},
)


@chz.chz
class Whole:
    part: Part = chz.field(default_factory=_PARTS.build_default, meta_factory=_PARTS, doc="a part")
    other: Part | None = chz.field(
        default=None, meta_factory=Names(_PARTS.accepted, default=None), doc="another, or none"
    )
    values: tuple[object, ...] = chz.field(default=(), doc="anything")


def make(*argv: str) -> Whole:
    return chz.Blueprint(Whole).make_from_argv(list(argv))


def test_a_nested_config_is_rebuilt_with_its_classes_and_values() -> None:
    config = Whole(
        part=Small(size=7),
        other=Large(weight=0.1),
        values=(
            1,
            0.1,
            "ü",
            None,
            True,
            Path("a/b"),
            ("x", [1, 2]),
            {"k": 1},
            {2: (3,)},
            {"$a": 1},
        ),
    )
    rebuilt = config_from_json(config_to_json(config))
    assert rebuilt == config
    assert isinstance(rebuilt, Whole)
    assert type(rebuilt.part) is Small and type(rebuilt.values[5]) is type(Path())


def test_the_optimizer_of_a_run_is_rebuilt() -> None:
    config = ES(
        population_size=64, sigma_schedule=Cosine(final=0.1), learning_rate_schedule=Linear()
    )
    assert config_from_json(config_to_json(config)) == config


def test_partials_and_functions_are_written_by_name_and_rebuilt() -> None:
    config = Whole(values=(functools.partial(round, 2.5, ndigits=0), operator.add, Small))
    rebuilt = config_from_json(config_to_json(config))
    assert isinstance(rebuilt, Whole)
    partial, function, cls = rebuilt.values
    assert isinstance(partial, functools.partial)
    assert (partial.func, partial.args, partial.keywords) == (round, (2.5,), {"ndigits": 0})
    assert function is operator.add and cls is Small


def test_defaults_are_written_out_so_that_later_defaults_do_not_change_an_old_run() -> None:
    assert json.loads(config_to_json(Large())) == {
        "$class": f"{__name__}:Large",
        "size": 1,
        "weight": 2.0,
    }


scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_any_plain_value_comes_back_equal_and_of_the_same_type(value: object) -> None:
    rebuilt = config_from_json(config_to_json(value))
    assert rebuilt == value and repr(rebuilt) == repr(value)


def test_nan_comes_back() -> None:
    rebuilt = config_from_json(config_to_json(math.nan))
    assert isinstance(rebuilt, float) and math.isnan(rebuilt)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Whole(values=(lambda: 1,)), r"config\.values\[0\]: .*lambda.*cannot be imported again"),
        (Whole(values=(object(),)), r"config\.values\[0\]: a object cannot be written"),
        (functools.partial(lambda: 1), r"config: .*cannot be imported again"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_field(value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_to_json(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON, found a mistake at"),
        (f'{{"$class": "{__name__}:Smal"}}', "nothing called Smal; did you mean 'Small'"),
        ('{"$class": "no_such_package:X"}', "config: no_such_package:X cannot be imported"),
        ('{"$class": "X"}', "written as module:name, found 'X'"),
        ('{"$class": "os:getcwd"}', "os:getcwd is not a chz class"),
        (
            f'{{"$class": "{__name__}:Large", "wieght": 1}}',
            "no field 'wieght': did you mean 'weight'",
        ),
        (f'{{"$class": "{__name__}:Large", "weight": -1}}', "config: weight must be 0 or more"),
        ('{"$pickle": "gASV"}', r"\$pickle is not how a config is written"),
        ('{"$import": "sys:path"}', "must be a class or a function, found list"),
        ('[{"$tuple": 3}]', r"config\[0\]: \$tuple is not how"),
    ],
)
def test_a_damaged_config_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config_from_json(text)
    assert "\n" not in str(caught.value)


def test_a_partial_is_rebuilt_but_never_called() -> None:
    rebuilt = config_from_json('{"$partial": "os:remove", "args": ["/nowhere"], "keywords": {}}')
    assert isinstance(rebuilt, functools.partial)


def test_a_field_that_was_dropped_may_have_the_value_that_holds_now_and_no_other() -> None:
    text = json.dumps(
        {
            "$class": "es_cookbook.evolution.optimizers.genetic:Genetic",
            "antithetic": False,
            "sigma": 0.25,
        }
    )
    assert config_from_json(text) == Genetic(sigma=0.25)
    with pytest.raises(ConfigError, match=r"the option antithetic, .* be False; found True"):
        config_from_json(text.replace("false", "true"))


def test_a_file_that_holds_another_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config_to_json(Small()))
    assert load_config(path, Part) == Small()
    with pytest.raises(ConfigError, match=r"config\.json must hold a Whole, found a Small"):
        load_config(path, Whole)


def test_local_classes_have_no_reference() -> None:
    class Local:
        pass

    assert resolve(reference(Small)) is Small
    with pytest.raises(ConfigError, match="top level of a module"):
        reference(Local)


@pytest.mark.parametrize("word", ["small", "Small", f"{__name__}:Small"])
def test_a_part_is_chosen_by_name_by_class_or_by_module_and_class(word: str) -> None:
    assert make(f"part={word}", "part.size=5").part == Small(size=5)


def test_settings_of_a_choice_hold_however_it_is_chosen() -> None:
    assert Whole().part == make().part == make("part=large").part == Large(weight=3.0)
    assert make("part.size=2").part == Large(size=2, weight=3.0)
    assert make("part.weight=1").part == Large(weight=1.0)
    assert make("part=small").part == make("part=Small").part == Small(size=4)


def test_an_optional_part_is_none_or_chosen() -> None:
    assert make("other=None").other is None
    assert make("other=small").other == Small()


def test_a_subclass_defined_by_the_user_is_found_by_its_name() -> None:
    @chz.chz
    class UsersOwnPart(Part):
        pass

    assert type(make("part=UsersOwnPart").part) is UsersOwnPart


def test_a_name_is_imported_only_when_it_is_chosen() -> None:
    assert make().part == Large(weight=3.0)
    with pytest.raises(ConfigError, match="no_such_package:Part cannot be imported"):
        make("part=absent")


def test_a_default_that_is_not_a_name_is_a_programming_mistake() -> None:
    with pytest.raises(ValueError, match="unknown default 'smal': did you mean 'small'"):
        Names(_PARTS.accepted, default="smal")
    with pytest.raises(ValueError, match="settings of unknown 'smal': did you mean 'small'"):
        Names(_PARTS.accepted, default="small", settings={"smal": {"size": 2}})


def test_a_class_of_the_module_that_was_run_keeps_its_real_name(tmp_path: Path) -> None:
    (tmp_path / "dish.py").write_text(
        "import chz\n"
        "from es_cookbook.common.configs import config_from_json, config_to_json\n"
        "@chz.chz\n"
        "class Dish:\n"
        "    salt: float = 1.0\n"
        "text = config_to_json(Dish(salt=2.0))\n"
        "assert config_from_json(text) == Dish(salt=2.0)\n"
        "print(text)\n"
    )
    command = [sys.executable, "-m", "dish"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"$class": "dish:Dish", "salt": 2.0}
