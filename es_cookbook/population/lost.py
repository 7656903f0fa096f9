"""Tells of lost rollouts: one line at the first of each kind, and its traceback in the run's log.

A run goes on without a lost rollout, so its user has to hear of it, on a terminal or not. Rollouts
are lost by one kind of failure where the same class of exception came from the same line of code.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from es_cookbook.common.terminal import one_line, printable
from es_cookbook.population.results import problem_names
from es_cookbook.rl.types import EnvGroupBuilder, LostRollout, TrajectoryGroup
from es_cookbook.runs.directory import LOG, add_to_log

_MOST_KINDS = 20
"""Kinds that are told, and tracebacks that are kept."""
_MOST_CHARS = 8_000
"""Of a traceback: its end says what happened."""

_CAUSE_OF = r"\n\n(?:The above exception|During handling) "
"""Before it in a traceback is where the failure began."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Loss:
    problem: str
    genome: int
    lost: LostRollout

    @property
    def kind(self) -> tuple[str, str]:
        first = re.split(_CAUSE_OF, self.lost.traceback, maxsplit=1)[0].rstrip()
        places = [line for line in first.splitlines() if line.startswith("  File ")]
        error = first.rpartition("\n")[2] or self.lost.reason
        return error.partition(":")[0], places[-1] if places else ""


class LostRollouts:
    """Tells of the lost rollouts of a run.

    `log_path` is its directory, in whose log tracebacks are kept; None keeps none.
    """

    def __init__(self, log_path: Path | None = None) -> None:
        self._log_path = log_path
        self._told: set[tuple[str, str]] = set()

    def tell(
        self,
        what: str,
        env_group_builders_P: Sequence[EnvGroupBuilder],
        groups_P: Sequence[TrajectoryGroup],
    ) -> None:
        """Warn of those kinds that are new; `what` was being attempted, "generation 3" say."""
        losses = list(_losses(env_group_builders_P, groups_P))
        for kind in dict.fromkeys(loss.kind for loss in losses):
            if kind not in self._told and len(self._told) < _MOST_KINDS:
                self._told.add(kind)
                same = [loss for loss in losses if loss.kind == kind]
                self._tell(f"{what}: {len(same)} of {_count(groups_P)}", same[0])

    def _tell(self, counted: str, first: _Loss) -> None:
        sentence = (
            f"{counted} rollouts lost, the first at {one_line(first.problem)} by genome "
            f"{first.genome}: {printable(first.lost.reason):.500}"
        )
        log_path, trace = self._log_path, first.lost.traceback[-_MOST_CHARS:]
        if log_path and trace and add_to_log(log_path, f"{sentence}\n{trace}"):
            sentence += f"; its traceback is in {log_path / LOG}"
        _logger.warning("%s", sentence)


def _losses(
    env_group_builders_P: Sequence[EnvGroupBuilder], groups_P: Sequence[TrajectoryGroup]
) -> Iterator[_Loss]:
    names_P = problem_names(env_group_builders_P)
    for name, group in zip(names_P, groups_P, strict=True):
        for g, trajectories_K in enumerate(group.trajectories_G_K):
            for trajectory in trajectories_K:
                if isinstance(trajectory, LostRollout):
                    yield _Loss(name, g, trajectory)


def _count(groups_P: Sequence[TrajectoryGroup]) -> int:
    return sum(len(ks) for group in groups_P for ks in group.trajectories_G_K)
