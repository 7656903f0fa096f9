"""The trackers of a run: JSONL always, the live view, others' libraries where asked for."""

import chz
from typing_extensions import override

from es_cookbook.plugins.trackers.libraries import (
    TensorboardTrackerBuilder,
    TrackioTrackerBuilder,
    WandbTrackerBuilder,
)
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from es_cookbook.runs.tracking.live import LiveTrackerBuilder


@chz.chz
class StandardTrackersBuilder(TrackerBuilder):
    """Builds JSONL files, the live view, and W&B, TensorBoard and Trackio where asked for."""

    jsonl: JsonlTrackerBuilder = chz.field(
        default_factory=JsonlTrackerBuilder, doc="metrics.jsonl and rollouts.jsonl"
    )
    live: LiveTrackerBuilder | None = chz.field(
        default_factory=LiveTrackerBuilder, doc="the view in the terminal; None shows nothing"
    )
    wandb: WandbTrackerBuilder | None = chz.field(
        default=None,
        blueprint_unspecified=WandbTrackerBuilder,
        doc="Weights & Biases; None leaves it out",
    )
    tensorboard: TensorboardTrackerBuilder | None = chz.field(
        default=None,
        blueprint_unspecified=TensorboardTrackerBuilder,
        doc="event files for TensorBoard in the run directory; None leaves it out",
    )
    trackio: TrackioTrackerBuilder | None = chz.field(
        default=None,
        blueprint_unspecified=TrackioTrackerBuilder,
        doc="Trackio; None leaves it out",
    )

    @override
    def check(self) -> None:
        for builder in self._builders():
            builder.check()

    def __call__(self, run: RunInfo) -> Tracker:
        """Open them all, the files first: what is shown is also on the disk."""
        return Trackers([builder(run) for builder in self._builders()])

    def _builders(self) -> list[TrackerBuilder]:
        libraries = (self.wandb, self.tensorboard, self.trackio)
        builders: list[TrackerBuilder | None] = [self.jsonl, *libraries, self.live]
        return [builder for builder in builders if builder is not None]
