"""The trackers of a run by name: two of the core, and all that are registered.

    trackers.wandb.wandb_project=mine  trackers.hub.repo_id=me/run  trackers.report=None

A tracker plugs in as an entry point. In the group `trackers` it is off until it, or an option of
it, is given; in `default_trackers` it is on unless it is None.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook.common.names import with_each
from es_cookbook.common.registry import Registered
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from es_cookbook.runs.tracking.live import LiveTrackerBuilder

_OFF, _ON = Registered("trackers"), Registered("default_trackers")


@chz.chz
@with_each(_ON, TrackerBuilder, "tracker", optional=False)
@with_each(_OFF, TrackerBuilder, "tracker")
class TrackersBuilder(TrackerBuilder):
    """Builds the trackers of a run: its files, the live view, and those that are registered."""

    jsonl: JsonlTrackerBuilder = chz.field(
        default_factory=JsonlTrackerBuilder, doc="metrics.jsonl and rollouts.jsonl"
    )
    live: LiveTrackerBuilder | None = chz.field(
        default_factory=LiveTrackerBuilder, doc="the view in the terminal; None shows nothing"
    )

    @override
    def check(self) -> None:
        for builder in self._builders():
            builder.check()

    @override
    def summarise(
        self, log_path: Path, rows: Sequence[Mapping[str, object]], *, is_over: bool
    ) -> str:
        said = [b.summarise(log_path, rows, is_over=is_over) for b in self._builders()]
        return "\n".join(filter(None, said))

    def __call__(self, run: RunInfo) -> Tracker:
        """Build all of them, the files first."""
        trackers: list[Tracker] = []
        with contextlib.ExitStack() as opened:
            for builder in self._builders():
                trackers.append(builder(run))
                opened.callback(trackers[-1].close)
            opened.pop_all()
        return Trackers(trackers)

    def _builders(self) -> list[TrackerBuilder]:
        others = chz.chz_fields(self).keys() - {"jsonl", "live"}
        registered: list[TrackerBuilder | None] = [getattr(self, name) for name in sorted(others)]
        # The live view last: from then on it has the terminal.
        builders = [self.jsonl, *registered, self.live]
        return [builder for builder in builders if builder is not None]
