"""Of es_cookbook a config from a file names the parts that its fields are made for, and no more."""

import ast
import importlib
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import chz

import es_cookbook
from es_cookbook.common.configs import config_from_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields import may_be_called
from es_cookbook.common.names import FUNCTIONS, may_be_named
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.plugins.hub.background_push import HubPush
from es_cookbook.plugins.hub.command import HubCommand
from es_cookbook.plugins.judges.judges import PairJudge
from es_cookbook.rl.objectives import Objective
from es_cookbook.rl.rewards.base import Reward
from es_cookbook.rl.types import RLDatasetBuilder
from es_cookbook.runs.tracking.base import TrackerBuilder

PACKAGE = Path(es_cookbook.__file__).parent


def defined() -> Iterator[tuple[str, str, bool]]:
    """Module, function or class at its top, and whether the module has configs; nothing is run."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("es_cookbook", *path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text("utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                module = ".".join(parts).removesuffix(".__init__")
                yield module, node.name, "@chz.chz" in text


DEFINED = list(defined())
CONFIG_MODULES = sorted({module for module, _, has_configs in DEFINED if has_configs})


def declared_types() -> dict[str, object]:
    """The types of all fields of all configs."""
    found: dict[str, object] = {"object": object}
    for name in CONFIG_MODULES:
        for thing in vars(importlib.import_module(name)).values():
            if isinstance(thing, type) and chz.is_chz(thing):
                found |= {str(f.x_type): f.x_type for f in chz.chz_fields(thing).values()}
    return found


def holder(number: int, declared: object) -> str:
    """Make a config class with one field of a type; its name."""
    name = f"Holder{number}"
    made = type(name, (), {"__annotations__": {"field": declared}, "__module__": __name__})
    setattr(sys.modules[__name__], name, chz.chz(made))
    return f"{__name__}:{name}"


def test_a_field_takes_parts_of_its_kind_and_refuses_all_else_before_it_is_imported() -> None:
    rng, num_taken = random.Random(0), 0
    names = [f"{module}:{name}" for module, name, _ in DEFINED]
    for number, declared in enumerate(declared_types().values()):
        config_class = holder(number, declared)
        for text in rng.sample(names, 25):
            for marker in ("$class", "$import"):
                found = {marker: text}
                before = set(sys.modules)
                try:
                    config_from_json(
                        json.dumps({"$class": config_class, "field": found}), ["tests"]
                    )
                    taken = True
                except ConfigError as error:
                    taken = "missing required" in str(error)  # It was found, and lacks a field.
                is_part = marker == "$class" and may_be_named(text, declared)
                is_function = marker == "$import" and text in FUNCTIONS.values()
                assert not taken or is_part or (is_function and may_be_called(declared)), text
                assert is_part or is_function or set(sys.modules) == before, text
                num_taken += taken
    assert num_taken


def test_a_kind_names_all_of_its_parts_that_a_user_can_choose() -> None:
    """A new optimizer or data set that is not named could not be read back."""
    for module in CONFIG_MODULES:
        importlib.import_module(module)
    for kind in (RLDatasetBuilder, OptimizerBuilder, EngineBuilder, Reward, Objective, PairJudge):
        for part in _subclasses(kind):
            own = part.__module__.startswith("es_cookbook.")
            if own and chz.is_chz(part) and not inspect.isabstract(part):
                assert may_be_named(f"{part.__module__}:{part.__qualname__}", kind), part


def _subclasses(of: type) -> list[type]:
    direct = of.__subclasses__()
    return [*direct, *(each for kind in direct for each in _subclasses(kind))]


def test_a_push_is_a_tracker_and_its_command_is_none() -> None:
    pushing = f"{HubPush.__module__}:HubPush"
    assert may_be_named(pushing, TrackerBuilder | None)
    assert not may_be_named(f"{HubCommand.__module__}:HubCommand", TrackerBuilder | None)
