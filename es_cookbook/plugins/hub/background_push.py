"""Push a run to the Hub from a background thread, without delaying or stopping the run.

A failed push is counted and its reason logged once. Each push uploads everything, so the next one
makes up for it. A push that is due while another is in progress starts after a later generation.
The end of a run waits for the last push for at most `timeout` seconds, and the thread never delays
the end of the process.

A run of gradients pushes checkpoints, each to a separate branch. A checkpoint that the run replaces
during its upload may fail to upload; the last one is always pushed.

Left out: exports. Each takes a replay; run the commands `export` and `hub` beside the run, on any
machine.
"""

import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, ESCookbookError, HubError
from es_cookbook.common.trust import needs_trust
from es_cookbook.plugins.hub.client import is_refusal
from es_cookbook.plugins.hub.push import MAIN, check_push, check_repo_id, push
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder

_NUMBER = "{generation}"
_BRANCH = re.compile(r"[^\s\x00-\x1f\x7f~^:?*\[\\{}]{1,200}")

logger = logging.getLogger(__name__)


@chz.chz
class HubPush(TrackerBuilder):
    """Builds the tracker that pushes a run every few generations.

    A run of gradients pushes its checkpoints, each to a separate branch.
    """

    is_of_one_run: ClassVar[bool] = True

    repo_id: str = chz.field(
        doc="repository on the Hub: owner/name; created if it does not exist",
        metadata=needs_trust(
            lambda push: f"hub:{push.repo_id}",
            "is where the run would be pushed, as you on the Hub",
        ),
    )
    every: int = chz.field(default=10, doc="generations between pushes; the last is always pushed")
    revision: str = chz.field(
        default=MAIN,
        doc="branch; {generation} becomes the number of recorded generations, in nine digits. "
        "Checkpoints go to <revision>-step-{generation} if it has no {generation}",
    )
    private: bool = chz.field(
        default=True, doc="create a private repository, and refuse to push to a public one"
    )
    timeout: float = chz.field(
        default=120.0, doc="seconds that the end of the run waits for the last push"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_repo_id(self.repo_id)
        check_range(self, "timeout", above=0)
        check_range(self, "every", at_least=1)
        if not _BRANCH.fullmatch(self.revision_of(0)):
            raise ConfigError(
                "revision must be a branch of at most 200 characters, in which {generation} may "
                f"stand for a number, found {self.revision!r:.80}"
            )

    def revision_of(self, generations: int, *, is_model: bool = False) -> str:
        """Return the branch for a run with so many recorded generations, or for its model."""
        revision = self.revision
        if is_model and _NUMBER not in revision:
            revision += f"-step-{_NUMBER}"
        return revision.replace(_NUMBER, f"{generations:09}")

    @override
    def check(self) -> None:
        """Refuse a push that the Hub would refuse; warn if the Hub cannot be reached.

        A run may continue while the Hub or the network is down; a later push makes up for it.

        Raises:
            HubError: There is no token, or the Hub refuses.
        """
        try:
            check_push(self.repo_id, self.private)
        except HubError as error:
            reason = f"cannot push to {self.repo_id}: {error}"
            if error.__cause__ is None or is_refusal(error):
                raise HubError(
                    f"{reason}; a run without trackers.hub pushes nothing, and resume with "
                    "trackers.hub=None"
                ) from error
            logger.warning(
                "%s; the run goes on, and tries it every trackers.hub.every generations", reason
            )

    def __call__(self, run: RunInfo) -> Tracker:
        return _Pushes(self, run)


class _Pushes(Tracker):
    """Pushes a run, or its checkpoints, from a thread."""

    def __init__(self, config: HubPush, run: RunInfo) -> None:
        self._config = config
        self._run = run
        self._is_history = run.learns == "history"
        self._recorded = self._started = run.start_generation
        self._thread: threading.Thread | None = None
        self._counts = {"hub/pushed": 0.0, "hub/failed": 0.0}
        self._logged: set[str] = set()

    @override
    def recorded(self, generations: int) -> None:
        """Start a push if one is due and none is in progress. Returns at once."""
        self._recorded, every = generations, self._config.every
        is_busy = self._thread is not None and self._thread.is_alive()
        if generations // every > self._started // every and not is_busy:
            self._start(generations)

    @override
    def metrics(self) -> Mapping[str, float]:
        """Return `hub/pushed` and `hub/failed`: pushes since this process started."""
        return {**self._counts}

    @override
    def finish(self) -> None:
        """Push the run as it is at its end, and wait for at most `timeout` seconds."""
        until = time.monotonic() + self._config.timeout
        is_done = self._wait(until)
        if is_done and (self._is_history or self._started != self._recorded):
            self._start(self._recorded)
            is_done = self._wait(until)
        if not is_done:
            self._fail(
                f"the last push was not done within {self._config.timeout:g} s of the end of the "
                f"run; `es-cookbook hub {self._run.path} repo_id={self._config.repo_id}` "
                "pushes it again"
            )

    def _wait(self, until: float) -> bool:
        """Wait for a push in progress; returns whether it is done."""
        if self._thread is not None:
            self._thread.join(max(until - time.monotonic(), 0))
        return self._thread is None or not self._thread.is_alive()

    def _start(self, generations: int) -> None:
        if not self._is_history and not self._run.model_path(generations).is_dir():
            return
        self._started = generations
        self._thread = threading.Thread(
            target=self._push, args=(generations,), name="hub", daemon=True
        )
        self._thread.start()

    def _push(self, generations: int) -> None:
        config, run = self._config, self._run
        path = run.path if self._is_history else run.model_path(generations)
        revision = config.revision_of(generations, is_model=not self._is_history)
        try:
            push(path, config.repo_id, revision, config.private)
        except (ESCookbookError, OSError) as error:  # OSError: a file that the run has replaced.
            self._fail(f"{error}; the run goes on, and the next push takes everything")
        else:
            self._counts["hub/pushed"] += 1

    def _fail(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("cannot push to %s: %s", self._config.repo_id, reason)
        self._counts["hub/failed"] += 1  # Last, so that the log is complete.
