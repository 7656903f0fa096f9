"""Trackers of other libraries: Weights & Biases, TensorBoard, Trackio; each is imported when used.

    es-cookbook countdown trackers.wandb.wandb_project=mine
    es-cookbook countdown trackers.tensorboard=True                  tensorboard --logdir runs
    es-cookbook countdown trackers.trackio.project=mine              trackio show

Metrics have the names of `metrics.jsonl`; W&B also gets a table of rollouts every few generations.
A failure in such a library is one warning; it is not used again, and the run goes on. All metrics
are in `metrics.jsonl` in any case.
"""

import contextlib
import contextvars
import html
import io
import json
import logging
import math
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import not_installed
from es_cookbook.common.files import read_file
from es_cookbook.common.terminal import printable
from es_cookbook.common.trust import needs_trust
from es_cookbook.rl.types import LostRollout, TrajectoryGroup
from es_cookbook.runs.directory.directory import TENSORBOARD, WANDB_ID, num_rewinds
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.base import (
    GENERATION,
    Decode,
    RunInfo,
    SampledRollout,
    Tracker,
    TrackerBuilder,
    choose_rollouts,
)

if TYPE_CHECKING:
    import trackio.run
    import wandb

_COLUMNS = ("generation", "problem", "genome", "attempt", "tags", "reward", "prompt", "answer")
"""Of a table of rollouts."""
_MAX_CHARS = 2_000
"""Longer prompts and answers are cut in such a table."""
_PATIENCE = 5.0
"""Seconds in which W&B's server has to answer at the start of a run."""
_LAST_UPLOAD = 60.0
"""Seconds that are waited for W&B in the end; what is left is on the disk."""
_Row: TypeAlias = list[str | int | float]

logger = logging.getLogger(__name__)


class _LibraryTracker(Tracker, ABC):
    """Passes metrics to a library that may fail; `name` is the library's, in the warning."""

    def __init__(self, name: str, run: RunInfo) -> None:
        self._name = name
        self._run = run
        self._is_on = True
        self._try(self._open)

    @abstractmethod
    def _open(self) -> None:
        """Start the run in the library, or continue it."""

    @abstractmethod
    def _log(self, generation: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a generation."""

    @abstractmethod
    def _close(self) -> None:
        """Finish writing."""

    @override
    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._try(partial(self._log, generation, metrics))

    @override
    def close(self) -> None:
        self._try(self._close)
        self._is_on = False

    def _try(self, do: Callable[[], None]) -> None:
        if not self._is_on:
            return
        try:
            do()
        # Libraries raise their own errors, and those of sockets, disks and processes; none of them
        # may stop a run.
        except Exception as error:
            self._is_on = False
            name = type(error).__name__
            logger.warning("%s is off for the rest of this run: %s: %s", self._name, name, error)


def _require(name: str, extra: str) -> None:
    """Refuse, at the start of a run, a tracker whose library is not installed."""
    found = find_spec(name)
    if found is None or found.origin is None:  # A folder of W&B's own files is no package.
        raise not_installed(f"trackers.{name}", name, extra)


def _wandb(tracker: "WandbTrackerBuilder") -> str | None:
    return None if tracker.wandb_project is None else f"wandb:{tracker.wandb_project}"


@chz.chz
class WandbTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Weights & Biases.

    Its files lie under the run directory, and a run that goes on keeps its W&B id, so both parts
    are one run there (`wandb sync <run directory>/wandb/offline-run-*` uploads offline ones). W&B
    drops steps that it has already, so a run that was rewound goes on as a new run there. A W&B
    that is not reachable is told once, and the run is kept offline.
    """

    wandb_project: str | None = chz.field(
        default=None,
        doc="W&B project; without one, or when not logged in, W&B stays offline",
        metadata=needs_trust(_wandb, "is a project that the run would be logged to, as you"),
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
        _require("wandb", "wandb")
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


class _WandbTracker(_LibraryTracker):
    def __init__(self, builder: WandbTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        self._rows: list[_Row] = []
        super().__init__("W&B", run)

    @override
    def _open(self) -> None:
        self._wandb = _start_wandb(self._builder, self._run)

    @override
    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        every, count = self._builder.rollouts_every, self._builder.rollouts_per_table
        if self._is_on and every and generation % every == 0:
            chosen = choose_rollouts(self._run.run_seed, generation, groups_P, count)
            self._rows = [_row(generation, sampled, decode) for sampled in chosen]

    @override
    def _log(self, generation: int, metrics: Mapping[str, float]) -> None:
        logged: dict[str, object] = {**metrics, GENERATION: generation}
        if self._rows:
            import wandb

            logged["rollouts"] = wandb.Table(columns=list(_COLUMNS), data=[*self._rows])
            self._rows = []
        self._wandb.log(logged, step=generation)

    @override
    def _close(self) -> None:
        self._wandb.finish()


def _is_logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):  # Without a network `login` would take seconds to take it.
        return True
    import wandb

    return wandb.login(prompt=False, verify=False)


def _is_reachable() -> bool:
    """Whether W&B's server answers, with any status."""
    import httpx2
    import wandb

    url = wandb.setup().settings.base_url  # From the environment, or W&B's own files.
    try:
        httpx2.head(url, timeout=_PATIENCE)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        logger.warning(
            "W&B at %s is not reachable (%s): the run goes on, and is kept offline; `wandb sync` "
            "uploads it later",
            *(url, error),
        )
        return False
    return True


def _start_wandb(builder: WandbTrackerBuilder, run: RunInfo) -> "wandb.Run":
    import wandb

    id_path = run.path / WANDB_ID
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
        name=_name(builder.wandb_name, run),
        group=builder.wandb_group,
        id=read_file(id_path, 100, run.path).decode("ascii", "replace"),
        resume="allow",
        dir=run.path,
        mode=mode,
        config=json.loads(run.config_json),
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


@chz.chz
class TensorboardTrackerBuilder(TrackerBuilder):
    """Builds the tracker that writes event files for TensorBoard.

    A resumed run begins another file; TensorBoard drops what an earlier file has of the same and
    later generations.
    """

    @override
    def check(self) -> None:
        _require("tensorboard", "es-cookbook[tensorboard]")

    def __call__(self, run: RunInfo) -> Tracker:
        return _TensorboardTracker("TensorBoard", run)


class _TensorboardTracker(_LibraryTracker):
    @override
    def _open(self) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        first = self._run.start_generation
        self._writer: SummaryWriter = SummaryWriter(self._run.path / TENSORBOARD, purge_step=first)

    @override
    def _log(self, generation: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(key, value, generation)
        self._writer.flush()

    @override
    def _close(self) -> None:
        self._writer.close()


def _trackio_project(tracker: "TrackioTrackerBuilder") -> str:
    return f"trackio:{tracker.project}"


@chz.chz
class TrackioTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Trackio.

    Trackio keeps all projects in one directory (`TRACKIO_DIR`), outside of run directories, and is
    used without a Space here, so nothing leaves this machine. A run that goes on keeps its name
    there, and so stays one run; generations that are done again after a crash are in it twice. A
    run that was rewound goes on as a new run there. It takes seconds to import.
    """

    project: str = chz.field(
        doc="project in Trackio",
        metadata=needs_trust(_trackio_project, "is a project that the run would be logged to"),
    )
    name: str | None = chz.field(
        default=None, doc="name of the run there; the run directory's name if not given"
    )

    @override
    def check(self) -> None:
        _require("trackio", "es-cookbook[trackio]")

    def __call__(self, run: RunInfo) -> Tracker:
        return _TrackioTracker(self, run)


class _TrackioTracker(_LibraryTracker):
    def __init__(self, builder: TrackioTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        super().__init__("Trackio", run)

    @override
    def _open(self) -> None:
        with _quiet():
            # Trackio's current run stays in this context; otherwise it would be ended again.
            context = contextvars.copy_context()
            self._trackio = context.run(_start_trackio, self._builder, self._run)

    @override
    def _log(self, generation: int, metrics: Mapping[str, float]) -> None:
        there = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self._trackio.log(there, step=generation)

    @override
    def _close(self) -> None:
        with _quiet():
            self._trackio.finish()


def _start_trackio(builder: TrackioTrackerBuilder, run: RunInfo) -> "trackio.run.Run":
    import trackio

    return trackio.init(
        project=builder.project,
        name=_name(builder.name, run),
        config=json.loads(run.config_json),
        # Another run may have had the name: only what goes on is that run.
        resume="allow" if run.start_generation else "never",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _name(given: str | None, run: RunInfo) -> str:
    """A run's name in a library: one that was rewound goes on under another."""
    name, rewinds = given or run.path.resolve().name, num_rewinds(run.path)
    return f"{name}-rewound-{rewinds}" if rewinds else name


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Inside, what the library prints for people is dropped: the live view has the terminal."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def _row(generation: int, sampled: SampledRollout, decode: Decode) -> _Row:
    """What a model or an Env wrote, without control characters and HTML of its own."""
    rollout, prompt = sampled.rollout, ""
    if isinstance(rollout, LostRollout):
        answer = f"lost: {rollout.reason}"
    else:
        turns: list[str] = []
        for i, transition in enumerate(rollout.transitions):
            said = _cut(decode(rollout.seen[i][1]))
            prompt = prompt or said
            turns += ([f"[{said}]"] if i else []) + [transition.action.text]
        answer = "\n".join(turns)
    return [
        *(generation, sampled.problem, sampled.genome, sampled.attempt),
        *(_text(", ".join(sampled.tags)), sampled.reward, _text(prompt), _text(answer)),
    ]


def _text(text: str) -> str:
    return html.escape(printable(_cut(text)), quote=False)


def _cut(text: str) -> str:
    more = len(text) - _MAX_CHARS
    return text if more <= 0 else f"{text[:_MAX_CHARS]} [{more} more characters]"
