"""Trackers by their names: the core's, the plug-ins', and those that others have registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from es_cookbook.common.cli import built
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.plugins.trackers.libraries import WandbTrackerBuilder
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.distributions import Register

ROOT = Path(__file__).parents[3]
OTHER = """\
import chz
from es_cookbook.common.trust import needs_trust
from es_cookbook.runs.tracking.base import Tracker, TrackerBuilder

def word(mine):
    return f"mine:{mine.project}" if mine.project else None

@chz.chz
class Mine(TrackerBuilder):
    project: str = chz.field(default="", doc="p", metadata=needs_trust(word, "is reached"))

    def __call__(self, run):
        return Tracker()
"""
CHOSEN = """\
import sys
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.runs.tracking.trackers import TrackersBuilder

def show(builder):
    text = config_to_json(builder)
    print(builder.always is None, builder.mine, "mine" in text)
    print(config_from_json(text, ["mine:p"]) == builder)

run_cli(show, TrackersBuilder, sys.argv[1:])
"""


def test_the_command_line_reaches_a_tracker_that_is_off_by_default() -> None:
    assert built(TrackersBuilder, {}).wandb is None
    given = {"wandb.wandb_project": "mine", "live": "None", "report": "None"}
    assert built(TrackersBuilder, given) == TrackersBuilder(
        live=None, report=None, wandb=WandbTrackerBuilder(wandb_project="mine")
    )


def test_what_another_distribution_has_registered_is_chosen_like_the_plug_ins(
    tmp_path: Path, register: Register
) -> None:
    """One in the other group is there by default; one that is broken is in nobody's way."""
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "always.py").write_text(OTHER)
    folder = register(
        {
            "trackers": {"mine": "other:Mine", "broken": "no_such:X"},
            "default_trackers": {"always": "always:Mine"},
        }
    )
    path = [str(folder), str(tmp_path), *sys.path]

    def said(*options: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", CHOSEN, *options],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    assert said() == ["False None False", "True"]
    assert said("always=None") == ["True None False", "True"]
    assert said("mine.project=p") == ["False Mine(project='p') True", "True"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        said("broken=broken")
    assert "no_such:X cannot be imported: No module named 'no_such'" in caught.value.stderr


def test_a_config_does_not_record_trackers_that_are_off() -> None:
    text = config_to_json(TrackersBuilder())
    assert "wandb" not in text and "hub" not in text and "report" in text
    assert config_from_json(text) == TrackersBuilder()
