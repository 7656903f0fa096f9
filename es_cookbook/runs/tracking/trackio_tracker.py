"""Trackio: metrics in a local database, which `trackio show` draws, for those who use it.

    es-cookbook countdown trackers.trackio.project=mine

Trackio keeps all projects in one directory (`TRACKIO_DIR`), outside of run directories, and is used
without a Space here, so nothing leaves this machine. A run that goes on keeps its name there, and
so stays one run; generations that are done again after a crash are in it twice. It takes seconds to
import.
"""

import contextlib
import contextvars
import io
import math
from collections.abc import Generator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.errors import not_installed
from es_cookbook.common.fields.reach import needs_trust
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder
from es_cookbook.runs.tracking.libraries import Library, readable

if TYPE_CHECKING:
    from trackio.run import Run


def _project(tracker: "TrackioTrackerBuilder") -> str:
    return f"trackio:{tracker.project}"


@chz.chz
class TrackioTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Trackio."""

    project: str = chz.field(
        doc="project in Trackio",
        metadata=needs_trust(_project, "is a project that the run would be logged to"),
    )
    name: str | None = chz.field(
        default=None, doc="name of the run there; the run directory's name if not given"
    )

    @override
    def check(self) -> None:
        found = find_spec("trackio")
        if found is None or found.origin is None:
            raise not_installed("trackers.trackio", "trackio", "es-cookbook[trackio]")

    def __call__(self, run: RunInfo) -> Tracker:
        return _TrackioTracker(self, run)


class _TrackioTracker(Tracker):
    def __init__(self, builder: TrackioTrackerBuilder, run: RunInfo) -> None:
        self._library = Library("Trackio")
        self._run: Run | None = None
        with self._library.may_fail(), _quiet():
            # Trackio's notion of a current run stays in this context, or it would be ended again.
            self._run = contextvars.copy_context().run(_start, builder, run)

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None and not self._library.has_failed:
            with self._library.may_fail():
                there = {key: value for key, value in metrics.items() if math.isfinite(value)}
                self._run.log(there, step=generation)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and not self._library.has_failed:
            with self._library.may_fail(), _quiet():
                run.finish()


def _start(builder: TrackioTrackerBuilder, run: RunInfo) -> "Run":
    import trackio

    return trackio.init(
        project=builder.project,
        name=builder.name or run.path.resolve().name,
        config=readable(run.config_json),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Inside, what the library prints for people is dropped: the live view has the terminal."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
