"""Trackers that log to Weights & Biases, TensorBoard and Trackio, imported only when used.

    es-cookbook countdown trackers.wandb.wandb_project=mine
    es-cookbook countdown trackers.tensorboard=True                  tensorboard --logdir runs
    es-cookbook countdown trackers.trackio.project=mine              trackio show

Metrics have the names of `metrics.jsonl`; W&B also gets a table of rollouts every few generations.
If such a library fails, the tracker warns once and is not used again, and the run continues. All
metrics are in `metrics.jsonl` in any case.
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
from collections.abc import Callable, Mapping, Sequence
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
"""Columns of a table of rollouts."""
_MAX_CHARS = 2_000
"""Maximum characters of a prompt or answer in such a table; longer ones are truncated."""
_PATIENCE = 5.0
"""Time-out in seconds for W&B's server at the start of a run."""
_LAST_UPLOAD = 60.0
"""Time-out in seconds for the last upload to W&B; the rest stays on the disk."""

logger = logging.getLogger(__name__)


_Opened: TypeAlias = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]
"""What a library does with the metrics of a generation, and at the end."""


class _LibraryTracker(Tracker):
    """Passes metrics to a library that may fail.

    Args:
        name: the library's name in warnings.
        open_run: starts the run in the library, or continues it.
    """

    def __init__(self, name: str, open_run: Callable[[], _Opened]) -> None:
        self._name = name
        self._open_run = open_run
        self.is_on = True
        self._try(self._open)

    def _open(self) -> None:
        self._log, self._close = self._open_run()

    @override
    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._log(generation, metrics))

    @override
    def close(self) -> None:
        self._try(lambda: self._close())
        self.is_on = False

    def _try(self, do: Callable[[], None]) -> None:
        if not self.is_on:
            return
        try:
            do()
        # Libraries raise their own errors, and those of sockets, disks and processes; none may stop
        # a run.
        except Exception as error:
            self.is_on = False
            name = type(error).__name__
            logger.warning("%s is off for the rest of this run: %s: %s", self._name, name, error)


def _require(name: str, extra: str) -> None:
    """Check at the start of a run that a library is installed."""
    found = find_spec(name)
    if found is None or found.origin is None:  # A folder with W&B's files is not a package.
        raise not_installed(f"trackers.{name}", name, extra)


@chz.chz
class WandbTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Weights & Biases.

    Its files are in the run directory, and a resumed run keeps its W&B id, so both parts are one
    run there (`wandb sync <run directory>/wandb/offline-run-*` uploads offline ones). W&B drops
    steps that it already has, so a rewound run continues as a new run. If W&B cannot be reached,
    the tracker warns once and the run is kept offline.
    """

    wandb_project: str | None = chz.field(
        default=None,
        doc="W&B project; without one, or when not logged in, W&B stays offline",
        metadata=needs_trust(
            lambda it: None if it.wandb_project is None else f"wandb:{it.wandb_project}",
            "is a project that the run would be logged to, as you",
        ),
    )
    wandb_name: str | None = chz.field(
        default=None, doc="name of the run in W&B; the run directory's name if not given"
    )
    wandb_group: str | None = chz.field(
        default=None, doc="group of the run in W&B: one name for the seeds of an experiment"
    )
    rollouts_every: int = chz.field(
        default=20, doc="generations between tables of rollouts; 0: no tables"
    )
    rollouts_per_table: int = chz.field(default=16, doc="rollouts per table, chosen at random")

    @chz.validate
    def _ranges(self) -> None:
        prefix = "trackers.wandb."
        check_range(self, "rollouts_every", "rollouts_per_table", at_least=0, prefix=prefix)

    @override
    def check(self) -> None:
        _require("wandb", "wandb")

    def __call__(self, run: RunInfo) -> Tracker:
        return _WandbTracker(self, run)


class _WandbTracker(_LibraryTracker):
    def __init__(self, builder: WandbTrackerBuilder, run: RunInfo) -> None:
        self._builder = builder
        self._run = run
        self._rows: list[list[str | int | float]] = []
        super().__init__("W&B", self._opened)

    def _opened(self) -> _Opened:
        started = _start_wandb(self._builder, self._run)

        def log(generation: int, metrics: Mapping[str, float]) -> None:
            logged: dict[str, object] = {**metrics, GENERATION: generation}
            if self._rows:
                import wandb

                logged["rollouts"] = wandb.Table(columns=list(_COLUMNS), data=[*self._rows])
                self._rows = []
            started.log(logged, step=generation)

        return log, started.finish

    @override
    def log_rollouts(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], decode: Decode
    ) -> None:
        every, count = self._builder.rollouts_every, self._builder.rollouts_per_table
        if self.is_on and every and generation % every == 0:
            chosen = choose_rollouts(self._run.run_seed, generation, groups_P, count)
            self._rows = [_row(generation, sampled, decode) for sampled in chosen]


def _row(generation: int, sampled: SampledRollout, decode: Decode) -> list[str | int | float]:
    """Return a row of a table, without control characters and HTML."""
    rollout, prompt = sampled.rollout, ""
    if isinstance(rollout, LostRollout):
        answer = f"lost: {rollout.reason}"
    else:
        seen = [decode(tokens) for _, tokens in rollout.seen]
        prompt = seen[0] if seen else ""
        actions = [transition.action.text for transition in rollout.transitions]
        later = [f"[{text}]\n{action}" for text, action in zip(seen[1:], actions[1:], strict=True)]
        answer = "\n".join([*actions[:1], *later])
    tags = _text(", ".join(sampled.tags))
    place = [generation, sampled.problem, sampled.genome, sampled.attempt]
    return [*place, tags, sampled.reward, _text(prompt), _text(answer)]


def _text(text: str) -> str:
    more = len(text) - _MAX_CHARS
    shown = text if more <= 0 else f"{text[:_MAX_CHARS]} [{more} more characters]"
    return html.escape(printable(shown), quote=False)


def _is_logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):  # Without a network `login` would take seconds.
        return True
    import wandb

    return wandb.login(prompt=False, verify=False)


def _is_reachable() -> bool:
    """Return whether W&B's server answers, with any status."""
    import httpx2
    import wandb

    url = wandb.setup().settings.base_url  # From the environment, or W&B's own files.
    try:
        httpx2.head(url, timeout=_PATIENCE)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        logger.warning(
            "W&B at %s is not reachable (%s): the run goes on, and is kept offline; `wandb sync` "
            "uploads it later",
            url,
            error,
        )
        return False
    return True


def _mode(project: str | None) -> Literal["online", "offline", "disabled"]:
    """Return online with a project, a login and a server, unless WANDB_MODE differs."""
    wanted = os.environ.get("WANDB_MODE", "online")
    if wanted == "disabled":
        return "disabled"
    if wanted != "online" or project is None:
        return "offline"
    if not _is_logged_in():
        logger.warning(
            "trackers.wandb.wandb_project=%s: not logged in to W&B, so the run stays offline; set "
            "WANDB_API_KEY or run `wandb login` before it, or upload it with `wandb sync` later",
            project,
        )
        return "offline"
    return "online" if _is_reachable() else "offline"


def _start_wandb(builder: WandbTrackerBuilder, run: RunInfo) -> "wandb.Run":
    import wandb

    id_path = run.path / WANDB_ID
    if not id_path.exists():
        replace_file(id_path, [uuid.uuid4().hex[:8].encode()])
    project = builder.wandb_project
    mode = _mode(project)
    if mode == "offline":
        # W&B's service would resolve the address of its error reporting even when offline.
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

    A resumed run starts another file; TensorBoard drops the same and later generations of earlier
    files.
    """

    @override
    def check(self) -> None:
        _require("tensorboard", "es-cookbook[tensorboard]")

    def __call__(self, run: RunInfo) -> Tracker:
        return _LibraryTracker("TensorBoard", partial(_open_tensorboard, run))


def _open_tensorboard(run: RunInfo) -> _Opened:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(run.path / TENSORBOARD, purge_step=run.start_generation)

    def log(generation: int, metrics: Mapping[str, float]) -> None:
        for key, value in _finite(metrics).items():
            writer.add_scalar(key, value, generation)
        writer.flush()

    return log, writer.close


@chz.chz
class TrackioTrackerBuilder(TrackerBuilder):
    """Builds the tracker that logs to Trackio.

    Trackio keeps all projects in one directory (`TRACKIO_DIR`), outside run directories, and is
    used without a Space, so nothing leaves this machine. A resumed run keeps its name there and
    stays one run; generations that are repeated after a crash are in it twice. A rewound run
    continues as a new run. Trackio takes seconds to import.
    """

    project: str = chz.field(
        doc="project in Trackio",
        metadata=needs_trust(
            lambda tracker: f"trackio:{tracker.project}",
            "is a project that the run would be logged to",
        ),
    )
    name: str | None = chz.field(
        default=None, doc="name of the run there; the run directory's name if not given"
    )

    @override
    def check(self) -> None:
        _require("trackio", "es-cookbook[trackio]")

    def __call__(self, run: RunInfo) -> Tracker:
        return _LibraryTracker("Trackio", partial(_open_trackio, self, run))


def _open_trackio(builder: TrackioTrackerBuilder, run: RunInfo) -> _Opened:
    with contextlib.redirect_stdout(io.StringIO()):  # The live view owns the terminal.
        # Trackio's current run stays in this context; otherwise it would be ended twice.
        started = contextvars.copy_context().run(_start_trackio, builder, run)

    def log(generation: int, metrics: Mapping[str, float]) -> None:
        started.log(dict(_finite(metrics)), step=generation)

    def close() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            started.finish()

    return log, close


def _start_trackio(builder: TrackioTrackerBuilder, run: RunInfo) -> "trackio.run.Run":
    import trackio

    return trackio.init(
        project=builder.project,
        name=_name(builder.name, run),
        config=json.loads(run.config_json),
        # Another run may have the same name; only a resumed run continues it.
        resume="allow" if run.start_generation else "never",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _name(given: str | None, run: RunInfo) -> str:
    """Return a run's name in a library; a rewound run gets another one."""
    name, rewinds = given or run.path.resolve().name, num_rewinds(run.path)
    return f"{name}-rewound-{rewinds}" if rewinds else name


def _finite(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return {key: value for key, value in metrics.items() if math.isfinite(value)}
