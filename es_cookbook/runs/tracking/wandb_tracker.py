"""Weights & Biases, for those who use it: offline unless the user is logged in and names a project.

`wandb` is imported when a tracker is built. Its files lie under the run directory, and a run that
goes on keeps its W&B id, so both parts are one run there (`wandb sync <run
directory>/wandb/offline-run-*` uploads offline ones). Whatever fails in W&B is a warning; it never
stops a run.
"""

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Generator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import chz
from typing_extensions import override

from es_cookbook.common.errors import not_installed
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)


@chz.chz
class WandbTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Weights & Biases."""

    wandb_project: str | None = chz.field(
        default=None, doc="W&B project; without one, or when not logged in, W&B stays offline"
    )
    wandb_name: str | None = chz.field(
        default=None, doc="name of the run in W&B; the run directory's name if not given"
    )

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
        """Start or continue the W&B run."""
        return _WandbTracker(self, run)


class _WandbTracker(Tracker):
    def __init__(self, builder: WandbTrackerBuilder, run: RunInfo) -> None:
        self._run: Run | None = None
        with self._given_up_if_it_fails():
            self._run = _start(builder, run)

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        with self._given_up_if_it_fails():
            if self._run is not None:
                self._run.log(dict(metrics), step=generation)

    def close(self) -> None:
        with self._given_up_if_it_fails():
            if self._run is not None:
                self._run.finish()
        self._run = None

    @contextlib.contextmanager
    def _given_up_if_it_fails(self) -> Generator[None]:
        try:
            yield
        # W&B raises anything from its own errors to those of sockets and processes; none of them
        # may stop a run.
        except Exception as error:
            self._run = None
            name = type(error).__name__
            logger.warning("W&B is off for the rest of this run: %s: %s", name, error)


def _is_logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):  # Without a network `login` would take seconds to take it.
        return True
    import wandb

    return wandb.login(prompt=False, verify=False)


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
    elif wanted == "online" and project and _is_logged_in():
        mode = "online"
    else:
        # W&B's service would look up the address of its error reporting even when offline.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
    return wandb.init(
        project=project,
        name=builder.wandb_name or run.path.resolve().name,
        id=id_path.read_text(),
        resume="allow",
        dir=run.path,
        mode=mode,
        config=json.loads(run.config_json),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
    )
