"""Push a run to the Hub from a background thread, without delaying or stopping the run.

A failed push is counted and its reason logged once; the next push uploads everything again. While a
push is in progress, later ones are merged into one, the latest. The end of a run waits for the last
push for at most `timeout` seconds, and the thread never delays the end of the process.

Of a run of gradients each checkpoint goes to its own branch. A checkpoint that the run replaces
during its upload may fail to upload; the last one is always pushed.

Left out: exports. They take a replay each; run the commands `export` and `hub` beside the run, on
any machine.
"""

import logging
import re
import threading
from collections.abc import Mapping

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


def _repository(push: "HubPush") -> str:
    return f"hub:{push.repo_id}"


@chz.chz
class HubPush(TrackerBuilder):
    """Builds the tracker that pushes a run every few generations.

    Of a run of gradients it pushes checkpoints, each to its own branch.
    """

    repo_id: str = chz.field(
        doc="repository on the Hub: owner/name; created if it does not exist",
        metadata=needs_trust(_repository, "is where the run would be pushed, as you on the Hub"),
    )
    every: int = chz.field(default=10, doc="generations between pushes; the last is always pushed")
    revision: str = chz.field(
        default=MAIN,
        doc="branch; {generation} stands for the number of recorded generations, in nine digits. "
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
        check_range(self, "timeout", above=0, finite=False)
        check_range(self, "every", at_least=1)
        if not _BRANCH.fullmatch(self.revision_of(0)):
            raise ConfigError(
                "revision must be a branch of at most 200 characters, in which {generation} may "
                f"stand for a number, found {self.revision!r:.80}"
            )

    def revision_of(self, generations: int, *, is_model: bool = False) -> str:
        """The branch for a run of so many recorded generations, or for its model."""
        revision = self.revision
        if is_model and _NUMBER not in revision:
            revision += f"-step-{_NUMBER}"
        return revision.replace(_NUMBER, f"{generations:09}")

    @override
    def check(self) -> None:
        """Refuse a push that the Hub would refuse; log a Hub that is out of reach.

        A run may go on while the Hub or the network is down; a later push makes up for it.

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
        self._run_info = run
        self._is_history = run.learns == "history"
        self._recorded = self._last_wanted = 0
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._is_busy = self._is_closed = False
        self._counts = {"hub/pushed": 0.0, "hub/failed": 0.0}
        self._logged: set[str] = set()
        threading.Thread(target=self._work, name="hub", daemon=True).start()

    def recorded(self, generations: int) -> None:
        """Push the run if it is time. Returns at once.

        A run is pushed after every `every` generations, and a model at the first checkpoint after
        so many.
        """
        self._recorded, every = generations, self._config.every
        if self._is_history:
            is_due = generations % every == 0
        else:
            is_due = generations // every > self._last_wanted // every
        if is_due:
            self._want(generations)

    def metrics(self) -> Mapping[str, float]:
        """`hub/pushed` and `hub/failed`: pushes since this process started."""
        return {**self._counts}

    def finish(self) -> None:
        """Push the run as it is at its end, and wait for at most `timeout` seconds."""
        if self._is_history or self._last_wanted != self._recorded:
            self._want(self._recorded)
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._wanted is None and not self._is_busy, self._config.timeout
            )
        if not done:
            self._fail(
                f"the last push was not done within {self._config.timeout:g} s of the end of the "
                f"run; `es-cookbook hub {self._run_info.path} repo_id={self._config.repo_id}` "
                "pushes it again"
            )

    def close(self) -> None:
        """Start no more pushes; closing twice is harmless."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _want(self, generations: int) -> None:
        if not self._is_history and not self._run_info.model_path(generations).is_dir():
            return
        self._last_wanted = generations
        with self._changed:
            self._wanted = generations
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or self._wanted is not None)
                wanted, self._wanted = self._wanted, None
                if self._is_closed or wanted is None:
                    return
                self._is_busy = True
            self._push(wanted)

    def _push(self, generations: int) -> None:
        config, run = self._config, self._run_info
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
        self._counts["hub/failed"] += 1  # After the sentence: the count says that it is there.
