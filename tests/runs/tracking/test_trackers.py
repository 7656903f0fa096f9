"""Trackers by their names: the core's, the plug-ins', and those that others have registered."""

from pathlib import Path

from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.common.options import built
from es_cookbook.plugins.trackers.libraries import WandbTrackerBuilder
from es_cookbook.runs.tracking.trackers import TrackersBuilder

ROOT = Path(__file__).parents[3]


def test_the_command_line_reaches_a_tracker_that_is_off_by_default() -> None:
    assert built(TrackersBuilder, {}).wandb is None
    given = {"wandb.wandb_project": "mine", "live": "None", "report": "None"}
    assert built(TrackersBuilder, given) == TrackersBuilder(
        live=None, report=None, wandb=WandbTrackerBuilder(wandb_project="mine")
    )


def test_a_config_does_not_record_trackers_that_are_off() -> None:
    text = config_to_json(TrackersBuilder())
    assert "wandb" not in text and "hub" not in text and "report" in text
    assert config_from_json(text) == TrackersBuilder()
