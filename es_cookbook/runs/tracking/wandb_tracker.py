"""Weights & Biases, for those who use it: offline unless the user is logged in and names a project.

`wandb` is imported when a tracker is built. Its files lie under the run directory, and a run that
goes on keeps its W&B id, so both parts are one run there (`wandb sync <run
directory>/wandb/offline-run-*` uploads offline ones). Metrics have the names of `metrics.jsonl`;
every few generations a table has some rollouts, as text. A W&B that is not reachable is told once,
and the run is kept offline. Whatever fails in W&B is a warning; it never stops a run.
"""

import contextlib
import logging
import os
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import not_installed
from es_cookbook.common.fields.reach import needs_trust
from es_cookbook.common.files import read_file
from es_cookbook.rl.types import TrajectoryGroup
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.base import GENERATION, Decode, RunInfo, Tracker, TrackerBuilder
from es_cookbook.runs.tracking.libraries import COLUMNS, Library, readable, rows_of

if TYPE_CHECKING:
    from wandb import Run

_PATIENCE = 5.0
"""Seconds in which W&B's server has to answer at the start of a run."""
_LAST_UPLOAD = 60.0
"""Seconds that are waited for W&B in the end; what is left is on the disk."""

logger = logging.getLogger(__name__)


def _project(tracker: "WandbTrackerBuilder") -> str | None:
    return None if tracker.wandb_project is None else f"wandb:{tracker.wandb_project}"


@chz.chz
class WandbTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Weights & Biases."""

    wandb_project: str | None = chz.field(
        default=None,
        doc="W&B project; without one, or when not logged in, W&B stays offline",
        metadata=needs_trust(_project, "is a project that the run would be logged to, as you"),
    )
    wandb_name: str | None = chz.field(
        default=None, doc="name of the run in W&B; the run directory's name if not given"
    )
    wandb_group: str | None = chz.field(
        default=None, doc="group of the run in W&B: one name for the seeds of an experiment"
    )
    rollouts_every: int = chz.field(
        default=20, doc="generations between tables of rollouts; 0: none"
    )
    rollouts_per_table: int = chz.field(default=16, doc="chosen at random")

    @chz.validate
    def _ranges(self) -> None:
        prefix = "trackers.wandb."
        check_range(self, "rollouts_every", "rollouts_per_table", at_least=0, prefix=prefix)

    @override
    def check(self) -> None:
        """Say now, not beside the first generation, that nothing will reach W&B.

        Raises:
            ConfigError: It is not installed.
        """
        found = find_spec("wandb")
        if found is None or found.origin is None:  # A folder of W&B's own files is no package.
            raise not_installed("trackers.wandb", "wandb", "wandb")
        if self.wandb_project is None or os.environ.get("WANDB_MODE", "online") != "online":
            return
        with contextlib.suppress(Exception):  # The tracker says what fails in W&B.
            if not _is_logged_in():
                logger.warning(
                    "trackers.wandb.wandb_project=%s: nobody is logged in to W&B, so the run stays "
                    "offline; set WANDB_API_KEY or run `wandb login` before it, or upload it with "
                    "`wandb sync` later",
                    self.wandb_project,
                )

    def __call__(self, run: RunInfo) -> Tracker:
        return _WandbTracker(self, run)


class _WandbTracker(Tracker):
    def __init__(self, builder: WandbTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        self._info = run
        self._library = Library("W&B")
        self._run: Run | None = None
        self._table: list[list[str | int | float]] = []
        with self._library.may_fail():
            self._run = _start(builder, run)

    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        every, count = self._builder.rollouts_every, self._builder.rollouts_per_table
        if self._is_on and every and generation % every == 0:
            self._table = rows_of(self._info.run_seed, generation, groups_P, decode, count)

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        run = self._run
        if run is None or not self._is_on:
            return
        with self._library.may_fail():
            logged: dict[str, object] = {**metrics, GENERATION: generation}
            if self._table:
                import wandb

                rows: list[Iterable[object]] = [*self._table]
                logged["rollouts"] = wandb.Table(columns=list(COLUMNS), data=rows)
                self._table = []
            run.log(logged, step=generation)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._is_on:
            with self._library.may_fail():
                run.finish()

    @property
    def _is_on(self) -> bool:
        return not self._library.has_failed


def _is_logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):  # Without a network `login` would take seconds to take it.
        return True
    import wandb

    return wandb.login(prompt=False, verify=False)


def _is_reachable() -> bool:
    """Whether W&B's server answers, with anything at all."""
    import wandb

    url = wandb.setup().settings.base_url  # Of the environment, and of W&B's own files.
    try:
        urllib.request.urlopen(url, timeout=_PATIENCE).close()
    except urllib.error.HTTPError:  # An answer.
        return True
    except (OSError, ValueError) as error:
        logger.warning(
            "W&B at %s is not reachable (%s): the run goes on, and is kept offline; `wandb sync` "
            "uploads it later",
            *(url, getattr(error, "reason", error)),
        )
        return False
    return True


def _start(builder: WandbTrackerBuilder, run: RunInfo) -> "Run":
    import wandb

    id_path = run.path / "wandb_id"
    if not id_path.exists():
        replace_file(id_path, [uuid.uuid4().hex[:8].encode()])
    wanted = os.environ.get("WANDB_MODE", "online")
    project = builder.wandb_project
    mode: Literal["online", "offline", "disabled"] = "offline"
    if wanted == "disabled":
        mode = "disabled"
    elif wanted == "online" and project and _is_logged_in() and _is_reachable():
        mode = "online"
    else:
        # W&B's service would look up the address of its error reporting even when offline.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
    started = wandb.init(
        project=project,
        name=builder.wandb_name or run.path.resolve().name,
        group=builder.wandb_group,
        id=read_file(id_path, 100, run.path).decode("ascii", "replace"),
        resume="allow",
        dir=run.path,
        mode=mode,
        config=readable(run.config_json),
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            finish_timeout=_LAST_UPLOAD,
        ),
    )
    started.define_metric("*", step_metric=GENERATION)
    started.define_metric("test/*", step_metric=GENERATION, summary="last,max")
    return started
