"""TensorBoard: event files in the run directory, for those who look at runs with it.

    es-cookbook countdown trackers.tensorboard.rollouts_every=10
    tensorboard --logdir runs

The files are written with the package `tensorboard` alone, neither torch nor TensorFlow takes part.
A run that goes on begins another file, before which TensorBoard drops what an earlier one said of
the same and later generations. Its text panel renders Markdown, so the Config and rollouts are
indented: Markdown shows that as it stands.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import not_installed
from es_cookbook.rl.types import TrajectoryGroup
from es_cookbook.runs.directory import TENSORBOARD
from es_cookbook.runs.tracking.base import Decode, RunInfo, Tracker, TrackerBuilder
from es_cookbook.runs.tracking.libraries import COLUMNS, Library, readable, rows_of

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


@chz.chz
class TensorboardTrackerBuilder(TrackerBuilder):
    """Builds the tracker that writes files for TensorBoard."""

    rollouts_every: int = chz.field(default=20, doc="generations between rollouts as text; 0: none")
    rollouts_shown: int = chz.field(default=8, doc="of them, chosen at random")

    @chz.validate
    def _ranges(self) -> None:
        prefix = "trackers.tensorboard."
        check_range(self, "rollouts_every", "rollouts_shown", at_least=0, prefix=prefix)

    @override
    def check(self) -> None:
        found = find_spec("tensorboard")
        if found is None or found.origin is None:
            raise not_installed("trackers.tensorboard", "tensorboard", "es-cookbook[tensorboard]")

    def __call__(self, run: RunInfo) -> Tracker:
        return _TensorboardTracker(self, run)


class _TensorboardTracker(Tracker):
    def __init__(self, builder: TensorboardTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        self._info = run
        self._library = Library("TensorBoard")
        self._writer: EventFileWriter | None = None
        with self._library.may_fail():
            self._begin()

    def _begin(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._info.path / TENSORBOARD))
        first = self._info.start_generation
        start = _events().SessionLog(status=_events().SessionLog.START)
        self._event(first, session_log=start)
        config = json.dumps(readable(self._info.config_json), indent=2, ensure_ascii=False)
        self._event(first, summary=_text("config", config))

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        every, count = self._builder.rollouts_every, self._builder.rollouts_shown
        if self._writer is None or not every or generation % every:
            return
        with self._library.may_fail():
            rows = rows_of(self._info.run_seed, generation, groups_P, decode, count)
            told = [
                "\n".join(f"{name}: {cell}" for name, cell in zip(COLUMNS, row, strict=True))
                for row in rows
            ]
            self._event(generation, summary=_text("rollouts", "\n\n".join(told)))

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        with self._library.may_fail():
            summary = _summaries().Summary
            there = {key: value for key, value in metrics.items() if math.isfinite(value)}
            values = [summary.Value(tag=key, simple_value=there[key]) for key in there]
            self._event(generation, summary=summary(value=values))
            self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._library.may_fail():
                writer.close()

    def _event(self, generation: int, **what: object) -> None:
        if self._writer is not None and not self._library.has_failed:
            event = _events().Event(wall_time=time.time(), step=generation, **what)
            self._writer.add_event(event)


# The classes of TensorBoard's messages are made when their modules are imported.
def _events() -> ModuleType:
    from tensorboard.compat.proto import event_pb2

    return event_pb2


def _summaries() -> ModuleType:
    from tensorboard.compat.proto import summary_pb2

    return summary_pb2


def _text(tag: str, text: str) -> object:
    """Text as it stands: of Markdown an indented line is code."""
    from tensorboard.plugins.text import summary_v2

    texts: ModuleType = summary_v2  # It has no types.
    return texts.text_pb(tag, "\n".join(f"    {line}" for line in text.splitlines()))
