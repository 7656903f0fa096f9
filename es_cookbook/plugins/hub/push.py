"""The options of pushes to the Hub; `es_cookbook.plugins.hub.background_push` is what they do."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, HubError
from es_cookbook.common.fields.reach import needs_trust
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder

MAIN = "main"
_NUMBER = re.compile(r"\{generation(?::(0?[<>=^]?\d{0,2}[dxXob]?))?\}")
_BRANCH = re.compile(r"[^\s\x00-\x1f\x7f~^:?*\[\\{}]{1,200}")
_CHECK_SECONDS = 10.0
"""How long a run's start waits for the Hub."""

logger = logging.getLogger(__name__)


def check_repo_id(repo_id: str) -> None:
    """Refuse what is not the name of a repository.

    Raises:
        ConfigError: It is not.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise ConfigError(
            f"repo_id must be owner/name in letters, digits, '-', '_' and '.', found {repo_id!r}"
        )


def _repository(push: "HubPush") -> str:
    return f"hub:{push.repo_id}"


def _command(push: "HubPush") -> str | None:
    return "options:evaluate" if push.evaluate else None


@chz.chz
class HubPush(TrackerBuilder):
    """Builds the tracker that pushes a run every few generations.

    Of a run of gradients it pushes checkpoints, each to a branch of its own.
    """

    repo_id: str = chz.field(
        doc="repository on the Hub: owner/name; made if there is none",
        metadata=needs_trust(_repository, "is where the run would be pushed, as you on the Hub"),
    )
    every: int = chz.field(default=10, doc="generations between pushes; the last is pushed anyway")
    revision: str = chz.field(
        default=MAIN,
        doc="branch; {generation} stands for how many are recorded: generation-{generation:05d}. "
        "Checkpoints go to <revision>-step-<generation, nine digits> unless it stands there",
    )
    private: bool = chz.field(
        default=True, doc="make the repository private; a public one is then refused"
    )
    timeout: float = chz.field(
        default=120.0, doc="seconds a push may take; the end of the run waits no longer either"
    )
    evaluate: tuple[str, ...] = chz.field(
        default=(),
        doc="options of the evaluate command, recipe=countdown,attempts=4, by which what was "
        "pushed is measured; it writes pushed/<generation or branch>.json",
        metadata=needs_trust(_command, "would be options of a command"),
    )
    then: Callable[[Path, str], object] | None = chz.field(
        default=None, doc="called with a directory of what was pushed, and the branch"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_repo_id(self.repo_id)
        check_range(self, "timeout", above=0, finite=False)
        check_range(self, "every", at_least=1)
        # In two steps: a number may be told to have a billion digits.
        shown = _NUMBER.sub("0", self.revision)
        if not _BRANCH.fullmatch(shown) or not _BRANCH.fullmatch(self.revision_of(0)):
            raise ConfigError(
                "revision must be a branch of at most 200 characters, in which {generation} may "
                "stand for a number and {generation:05d} for one with leading zeros, found "
                f"{self.revision!r:.80}"
            )

    def revision_of(self, generations: int, *, is_model: bool = False) -> str:
        """The branch for a run of so many recorded generations, or for its model."""
        named = self.revision
        if is_model and not _NUMBER.search(named):
            named += "-step-{generation:09d}"
        return _NUMBER.sub(lambda found: format(generations, found[1] or ""), named)

    @override
    def check(self) -> None:
        """A push that the Hub would refuse is refused now; a Hub that is out of reach is logged.

        A run may have to go on while the Hub or the network is down; its pushes are made good
        later.

        Raises:
            HubError: There is no token, or the Hub refuses.
        """
        from es_cookbook.plugins.hub.client import check_push

        try:
            unknown = check_push(self.repo_id, self.private, min(self.timeout, _CHECK_SECONDS))
        except HubError as error:
            raise HubError(
                f"{error}; a run without trackers.hub pushes nothing, and resume with "
                "trackers.hub=None"
            ) from error
        if unknown is not None:
            logger.warning(
                "%s; the run goes on, and tries it every trackers.hub.every generations", unknown
            )

    def __call__(self, run: RunInfo) -> Tracker:
        if run.learns == "adapter" and self.evaluate:
            raise ConfigError(
                "trackers.hub.evaluate measures whole models, and rank above 0 pushes adapters: "
                "give rank=0, or evaluation.dataset=..., which measures them while they learn"
            )
        from es_cookbook.plugins.hub.background_push import Pushes  # Only runs that push need it.

        return Pushes(self, run)
