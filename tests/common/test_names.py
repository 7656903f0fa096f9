"""A config from a file names chz classes that fit their fields, and no functions of es_cookbook."""

import json
from collections.abc import Callable
from typing import Any

import chz
import pytest

from es_cookbook.common.configs import config_from_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.rl.rewards.base import Reward
from es_cookbook.runs.tracking.base import TrackerBuilder


@chz.chz
class Holder:
    optimizer: OptimizerBuilder | None = None
    reward: Callable[..., float] | Reward | None = None
    trackers: tuple[TrackerBuilder, ...] = ()
    anything: object = None


def read(field: str, value: object) -> Holder:
    text = json.dumps({"$class": f"{__name__}:Holder", field: value})
    found = config_from_json(text, [__name__])
    assert isinstance(found, Holder)
    return found


def test_a_class_that_fits_the_field_is_taken() -> None:
    es = {"$class": "es_cookbook.evolution.optimizers.es:ES"}
    assert read("optimizer", es).optimizer == read("anything", es).anything == ES()


HUB = {"$class": "es_cookbook.plugins.hub.background_push:HubPush", "repo_id": "me/run"}
EXPORT = {"$class": "es_cookbook.cli.export:ExportConfig", "log_path": "run", "output": "out"}
LOAD = "es_cookbook.common.configs:load_fields"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("optimizer", HUB, "must be OptimizerBuilder | "),
        ("trackers", {"$tuple": [EXPORT]}, "must be tuple[Tracke"),
        ("reward", {"$import": LOAD}, "es_cookbook's own;"),
        ("anything", {"$import": LOAD}, "only where the type asks"),
        ("anything", {"$class": "es_cookbook.runs.program:run"}, "is not a chz class"),
    ],
)
def test_what_does_not_fit_and_functions_are_refused(
    field: str, value: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(field, value)
    assert said in str(caught.value)
