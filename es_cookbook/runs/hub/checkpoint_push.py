"""Push each checkpoint of a run of gradients to a branch of its own, and measure what was pushed.

The weights go to `<revision>-step-<generation>`, nine digits, beside the run and as `HubPush` does
it: a checkpoint that the run replaces before its turn comes is left out, and the last is pushed.
After a push, `es-cookbook evaluate` attempts other problems with the very files that were pushed,
and a function of the user's may do anything else with them.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook.common.fields.reach import needs_trust
from es_cookbook.runs.directory import CHECKPOINTS, PUSHED
from es_cookbook.runs.hub.background_push import BackgroundPush, HubPush, Wanted
from es_cookbook.runs.tracking.base import RunInfo

MODEL = "model"


def _command(push: "CheckpointPush") -> str | None:
    return "options:evaluate" if push.evaluate else None


@chz.chz
class CheckpointPush(HubPush):
    """Builds the tracker that pushes the checkpoints of a run."""

    every: int = chz.field(
        default=1, doc="generations between pushes, of those with a checkpoint; the last anyway"
    )
    revision: str = chz.field(
        default="main", doc="beginning of the branches: <revision>-step-<generation, nine digits>"
    )
    evaluate: tuple[str, ...] = chz.field(
        default=(),
        doc="options of the evaluate command, recipe=countdown,attempts=4, by which what was "
        "pushed is measured; it writes pushed/<branch>.json",
        metadata=needs_trust(_command, "would be options of a command"),
    )
    then: Callable[[Path, str], object] | None = chz.field(
        default=None, doc="called with the directory of what was pushed, and the branch"
    )

    @override
    def revision_of(self, generations: int) -> str:
        return f"{self.revision}-step-{generations:09d}"

    @override
    def __call__(self, run: RunInfo) -> "PushedCheckpoints":
        return PushedCheckpoints(self, run.path)


class PushedCheckpoints(BackgroundPush):
    """Pushes checkpoints as they are written."""

    def __init__(self, config: CheckpointPush, run_path: Path) -> None:
        self._checkpoints = run_path / CHECKPOINTS
        self._results = run_path / PUSHED
        super().__init__(config, run_path)
        self._config = config

    @override
    def recorded(self, generations: int) -> None:
        if self._model(generations).is_dir():
            super().recorded(generations)

    @override
    def is_due_at_end(self, generations: int) -> bool:
        return generations % self._config.every != 0

    @override
    def fill(self, directory: Path, wanted: Wanted) -> None:
        try:
            shutil.copytree(
                self._model(wanted.generations),
                directory,
                copy_function=_link_or_copy,
                dirs_exist_ok=True,
                symlinks=True,  # Which the push then refuses.
            )
        except (FileNotFoundError, shutil.Error) as error:
            raise OSError("its checkpoint was replaced before it could be copied") from error

    @override
    def pushed(self, directory: Path, revision: str) -> None:
        if self._config.evaluate:
            self._results.mkdir(exist_ok=True)
            output = self._results / f"{revision.replace('/', '-')}.json"
            own = (f"model_name={directory}", f"output={output}")
            command = ("-m", "es_cookbook", "evaluate", *own, *self._config.evaluate)
            if reason := self.run_beside(command):
                self.log_once(f"{revision} was pushed, but not measured: {reason}")
        if self._config.then is not None:
            try:
                self._config.then(directory, revision)
            except Exception as error:  # The user's own; the run goes on.
                self.log_once(f"hub.then: {type(error).__name__}: {error}")

    def _model(self, generations: int) -> Path:
        return self._checkpoints / str(generations) / MODEL


def _link_or_copy(source: str, target: str) -> None:
    """Files of a checkpoint are never changed, so a second name will do where there can be one."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
