"""Of es_cookbook a config from a file names the parts that its fields are made for, and no more."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook.common.fields.parts import FUNCTIONS, may_be_named
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.plugins.hub.background_push import HubPush
from es_cookbook.plugins.hub.command import HubCommand
from es_cookbook.plugins.judges.judges import PairJudge
from es_cookbook.rl.objectives import Objective
from es_cookbook.rl.rewards.base import Reward
from es_cookbook.rl.types import RLDatasetBuilder
from es_cookbook.runs.tracking.base import TrackerBuilder
from tests.every_reference import found_in_source

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_every_function_and_class_as_every_field_is_a_part_or_is_refused_unread(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.every_reference", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["tried"] > 50_000
    assert (found["events"], found["imported"], found["tracebacks"]) == ([], [], [])
    assert list(tmp_path.iterdir()) == []
    functions = {text for text in found["taken"] if not text.startswith("$class")}
    assert functions == {
        f"{marker} {text}" for marker in ("$import", "$partial") for text in FUNCTIONS.values()
    }
    assert not {text for text in found["taken"] if ".commands." in text}


def test_a_kind_names_all_of_its_parts_that_a_user_can_choose() -> None:
    """A new optimizer or data set that is not named could not be read back."""
    for module in found_in_source().config_modules:
        __import__(module)
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
