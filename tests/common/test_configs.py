"""Configs survive a trip through text, and names stand for the classes a user means."""

import contextlib
import functools
import inspect
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Literal, cast

import chz
import pytest
from chz.blueprint import InvalidBlueprintArg
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.checks import fits, may_be_called
from es_cookbook.common.configs import (
    config_from_json,
    config_to_json,
    load_config,
    load_fields,
    trust_of,
)
from es_cookbook.common.errors import ConfigError, ESCookbookError
from es_cookbook.common.names import Names
from es_cookbook.common.registry import Registered
from es_cookbook.common.trust import resolve
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.recipes.arithmetic.dataset import ArithmeticDatasetBuilder
from es_cookbook.rl.rewards.base import Reward
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.runs.tracking.base import TrackerBuilder

TRUST = ["tests"]


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
    part: Part = _PARTS.field("a part")
    other: Part | None = Names(_PARTS.accepted, default=None).field("another, or none")
    values: tuple[object, ...] = chz.field(default=(), doc="anything")


def make(*argv: str) -> Whole:
    return chz.Blueprint(Whole).make_from_argv(list(argv))


def test_a_nested_config_is_rebuilt_with_its_classes_and_values() -> None:
    config = Whole(
        part=Small(size=7),
        other=Large(weight=0.1),
        values=(1, 0.1, "ü", None, True, Path("a/b"), ("x", [1, 2]), {"k": 1}),
    )
    rebuilt = config_from_json(config_to_json(config), TRUST)
    assert rebuilt == config
    assert isinstance(rebuilt, Whole)
    assert type(rebuilt.part) is Small and type(rebuilt.values[5]) is type(Path())


def graded(answer: str, weight: float = 1.0, *, part: Part | None = None) -> float:
    return weight * len(answer)


@chz.chz
class WithFunctions:
    grade: Callable[[str], float] = chz.field(default=graded, doc="grades")
    made: Callable[..., Part] | None = chz.field(default=None, doc="makes a part")
    part: type[Part] = chz.field(default=Small, doc="a class of parts")


def test_partials_and_functions_are_written_by_name_and_rebuilt() -> None:
    config = WithFunctions(
        grade=functools.partial(graded, weight=2.0, part=Small(size=3)),
        made=functools.partial(Large, weight=0.5),
        part=Large,
    )
    rebuilt = config_from_json(config_to_json(config), TRUST)
    assert isinstance(rebuilt, WithFunctions)
    assert rebuilt.part is Large and rebuilt.made is not None
    assert rebuilt.made() == Large(weight=0.5)
    assert isinstance(rebuilt.grade, functools.partial) and rebuilt.grade.func is graded
    assert rebuilt.grade.keywords == {"weight": 2.0, "part": Small(size=3)}
    assert config_from_json(config_to_json(WithFunctions()), TRUST) == WithFunctions()


def test_defaults_are_written_so_that_later_ones_do_not_change_an_old_run() -> None:
    assert json.loads(config_to_json(Large())) == {
        "$format": 1,
        "$class": f"{__name__}:Large",
        "size": 1,
        "weight": 2.0,
    }


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text().filter(lambda key: key[:1] != "$"), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_any_plain_value_comes_back_equal_and_of_the_same_type(value: object) -> None:
    rebuilt = config_from_json(config_to_json(value))
    assert rebuilt == value and repr(rebuilt) == repr(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Whole(values=(lambda: 1,)), r"config\.values\[0\]: .*lambda.*cannot be imported again"),
        (
            Whole(values=(operator.add,)),
            r"config\.values\[0\]: .* only where the type asks for one",
        ),
        (Whole(part=3), r"config\.part must be Part, found 3"),  # pyright: ignore
        (Whole(values=(object(),)), r"config\.values\[0\]: <object .* cannot be written"),
        (Whole(values=({2: 3},)), r"config\.values\[0\]: \{2: 3\} cannot be written"),
        (Whole(values=({"$a": 1},)), r"cannot be written to a config; accepted: .*names as keys"),
        (Whole(values=(math.inf,)), r"config\.values\[0\]: inf cannot be written"),
        (Whole(values=("\udcff",)), r"config\.values\[0\]: '\\udcff' cannot be written"),
        (functools.partial(lambda: 1), r"config: .*cannot be imported again"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_field(value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_to_json(value)


@chz.chz
class Holder:
    optimizer: OptimizerBuilder | None = None
    reward: Callable[..., float] | Reward | None = None
    trackers: tuple[TrackerBuilder, ...] = ()
    anything: object = None


ES_CLASS = {"$class": "es_cookbook.evolution.optimizers.es:ES"}
HUB = {"$class": "es_cookbook.plugins.hub.background_push:HubPush", "repo_id": "me/run"}
EXPORT = {"$class": "es_cookbook.cli.export:ExportConfig", "log_path": "run", "output": "out"}
LOAD = {"$import": "es_cookbook.common.configs:load_fields"}


def written(name: str, **fields: object) -> str:
    """A class of this module, as a config has it."""
    return json.dumps({"$class": f"{__name__}:{name}", **fields})


def graded_by(marker: str, name: str, **more: object) -> str:
    return written("WithFunctions", grade={marker: f"{__name__}:{name}", **more})


def test_a_class_that_fits_the_field_is_taken() -> None:
    found = config_from_json(written("Holder", optimizer=ES_CLASS, anything=ES_CLASS), TRUST)
    assert found == Holder(optimizer=ES(), anything=ES())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON; this is not JSON: Expecting"),
        (written("Smal"), "nothing called Smal; did you mean 'Small'"),
        ('{"$class": "no_such_package:X"}', "no_such_package:X is not part of es_cookbook"),
        ('{"$class": "tests.nowhere:X"}', "config: tests.nowhere:X cannot be imported: No module"),
        ('{"$class": "tests.fakes:digest"}', "tests.fakes:digest is not a chz class"),
        (written("Large", wieght=1), "no field 'wieght': did you mean 'weight'"),
        (written("Large", weight=-1), "config: weight must be 0 or more"),
        (written("Large", **{"$format": 2}), "it has format version 2, and this es_cookbook reads"),
        (written("Whole", part={"$format": 1}), r"config.part: '\$format' is not how a config is"),
        ('{"$pickle": "gASV"}', r"'\$pickle' is not how a config is written"),
        ('{"$import": "sys:exit"}', "a class or a function itself may stand only where"),
        (written("Large", weight="1"), "config.weight must be float, found '1'"),
        (
            written("Whole", part={"$class": f"{__name__}:Whole"}),
            "config.part must be Part, found Whole",
        ),
        (graded_by("$partial", "graded"), r"config.grade: '\$partial' is not how a config is"),
        (written("Holder", optimizer=HUB), r"config.optimizer must be OptimizerBuilder \| "),
        (written("Holder", trackers={"$tuple": [EXPORT]}), r"must be tuple\[Tracker"),
        (written("Holder", reward=LOAD), "es_cookbook's own;"),
        (written("Holder", anything=LOAD), "only where the type asks"),
        (written("Holder", anything={"$class": "json:dumps"}), "json:dumps is not part of"),
        ("[" * 100_000, "must be JSON; this is nested too deeply"),
        ("9" * 5_000, "must be JSON; this Exceeds"),
    ],
)
def test_a_damaged_config_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config_from_json(text, TRUST)
    assert "\n" not in str(caught.value)


def test_some_fields_are_read_without_the_classes_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    part = json.loads(written("Small", size=2))
    path.write_text(json.dumps({"$class": "no_such_package:X", "part": part, "name": "a"}))
    types = {"name": str, "part": Part}
    fields, plain = load_fields(path, types, TRUST)
    assert fields == {"name": "a", "part": Small(size=2)} and plain["part"] == part
    with pytest.raises(ConfigError, match=r"config\.json: config\.name must be int, found 'a'"):
        load_fields(path, {"name": int})
    with pytest.raises(ConfigError, match=r"config\.json: config\.part: tests.* add trust=tests"):
        load_fields(path, types)


def test_a_file_that_holds_another_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config_to_json(Small()))
    assert load_config(path, Part, TRUST) == Small()
    with pytest.raises(ConfigError, match=r"config\.json: config must be Whole, found Small"):
        load_config(path, Whole, TRUST)


def test_a_part_is_chosen_by_name_by_class_or_by_module_and_class() -> None:
    for word in ("small", "Small", f"{__name__}:Small"):
        assert make(f"part={word}", "part.size=5").part == Small(size=5)


def test_settings_of_a_choice_hold_however_it_is_chosen() -> None:
    assert Whole().part == make().part == make("part=large").part == Large(weight=3.0)
    assert make("part.size=2").part == Large(size=2, weight=3.0)
    assert make("part.weight=1").part == Large(weight=1.0)
    assert make("part=small").part == make("part=Small").part == Small(size=4)


def test_a_name_is_imported_only_when_it_is_chosen() -> None:
    assert make().part == Large(weight=3.0)
    with pytest.raises(InvalidBlueprintArg, match="no_such_package:Part cannot be imported"):
        make("part=absent")


def either(size: int) -> float | None:
    return size or None


@pytest.mark.parametrize(
    ("value", "declared", "whether"),
    [
        (1.0, int, False),
        (True, bool | None, True),
        ((1, 2.0), tuple[float, ...], True),
        ({1: 1}, Mapping[str, Any], False),
        (Small(), Part, True),
        (Small, type[Part], True),
        (Part, type[Small], False),
        (either, Part | Callable[..., float | None], True),
        (either, Part | None, False),
    ],
)
def test_values_are_checked_against_types(value: object, declared: object, whether: bool) -> None:
    assert fits(value, declared) is whether


def test_classes_and_functions_are_values_only_if_the_type_or_its_items_ask_for_them() -> None:
    assert may_be_called(Callable[..., Part] | None) and may_be_called(type[Part])
    assert may_be_called(tuple[Callable[..., int], ...])
    assert not any(map(may_be_called, (object, Any, Part, int, Literal[1])))


NEEDED: Mapping[str, object] = {
    **{"source": "rows.jsonl", "reward": Exact(), "program": "true", "tools": "mcp:true"},
    **{"game": "Chess-v0", "weight": 0.5, "repo_id": "us/it", "project": "it"},
    **{"model_name": "base", "dataset": ArithmeticDatasetBuilder()},
}
"""Values of options without a default."""
SKIPPED = {"default", "merge", "mixture", "singular_values", "verifiers"}
"""Parts of files, of a library, or of other parts."""
GROUPS = sorted({part.group for part in distribution("es-cookbook").entry_points})
WRONG = (object(), "wrong", True, 2.5, ["a"], {"a": 1}, None)


@pytest.mark.parametrize("group", GROUPS)
def test_a_value_from_a_script_is_read_back_as_it_is_or_refused_in_a_sentence(group: str) -> None:
    names = Registered(group.removeprefix("es_cookbook."))
    for name in names.keys() - SKIPPED:
        part = cast(Any, resolve(names[name]))
        if not (isinstance(part, type) and chz.is_chz(part)):
            continue
        fields = chz.chz_fields(part)
        options = inspect.signature(part).parameters
        needed = [each for each in fields if options[each].default is inspect.Parameter.empty]
        whole = part(**{each: NEEDED[each] for each in needed})
        for field, value in itertools.product(fields, WRONG):
            with contextlib.suppress(ESCookbookError):
                changed = chz.replace(whole, **{field: value})
                text = config_to_json(changed)
                trust = ["es_cookbook", *trust_of(text)]
                assert config_from_json(text, trust) == changed, (name, field, value)
