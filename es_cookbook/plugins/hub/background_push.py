"""Push a run to the Hub while it goes on, without ever standing in its way.

The training process only looks how long the files are. A thread copies that much of them, and
starts `python -m es_cookbook hub` on the copy as a process of its own, at the lowest priority: a
server that hangs, a library that fails or a slow network can then be waited for or killed. A push
that fails is counted and its reason logged, once for each reason; the next push takes everything
again. While one is under way others are put together into one, the latest.

`huggingface_hub`'s own `CommitScheduler` and `run_as_future` push from threads of the run's own
process: a server that hangs holds its end, and what is pushed is what the files have by then.

What was pushed may be measured by `es-cookbook evaluate`, in a process at the lowest priority too.

Of a run of gradients each checkpoint goes to a branch of its own: a checkpoint that the run
replaces before its turn comes is left out, and the last is pushed.

Left out: pushing exports from here. They take a replay each; the commands `export` and `hub` do
that beside the run, on any machine.
"""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import config_from_json, trust_of
from es_cookbook.common.errors import ConfigError, HubError
from es_cookbook.common.fields.reach import needs_trust, trust_option
from es_cookbook.common.files import ANY_SIZE, opened
from es_cookbook.common.machine.scratch import scratch
from es_cookbook.plugins.hub.client import MAIN, RUN_FILES, check_push, check_repo_id
from es_cookbook.runs.directory.directory import PUSHED, TRAINED_ON
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder

_COMMAND = ("-m", "es_cookbook", "hub")
_NUMBER = re.compile(r"\{generation(?::(0?[<>=^]?\d{0,2}[dxXob]?))?\}")
_BRANCH = re.compile(r"[^\s\x00-\x1f\x7f~^:?*\[\\{}]{1,200}")
_LONGEST_REASON = 500
_CHECK_SECONDS = 10.0
"""How long a run's start waits for the Hub."""

logger = logging.getLogger(__name__)


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
        return _Pushes(self, run)


class _Pushes(Tracker):
    """Copies a run's files, or its model, and pushes the copy in a process of its own."""

    takes_models = True

    def __init__(self, config: HubPush, run: RunInfo) -> None:
        self._config = config
        self._run_info = run
        self._run_path = run.path
        self._is_history = run.learns == "history"
        self._changed = threading.Condition()
        self._wanted: tuple[int, Mapping[str, int]] | None = None
        self._recorded = self._last_wanted = 0
        self._process: subprocess.Popen[str] | None = None
        self._busy = False
        self._closed = False
        self._counts = {"hub/pushed": 0.0, "hub/failed": 0.0}
        self._logged: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()

    def recorded(self, generations: int) -> None:
        """Push the run if it is time. Returns at once."""
        every, self._recorded = self._config.every, generations
        if generations // every > self._last_wanted // every and self._is_there(generations):
            self._want(generations)

    def metrics(self) -> Mapping[str, float]:
        """`hub/pushed` and `hub/failed`: pushes since this process started."""
        return {**self._counts}

    def finish(self) -> None:
        """Push the run as it is at its end, and wait until that is done or the time is over."""
        is_pushed = self._last_wanted == self._recorded and not self._is_history
        if not is_pushed and self._is_there(self._recorded):
            self._want(self._recorded)
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed or not (self._busy or self._wanted), self._config.timeout
            )
        if not done:
            self._fail(
                f"cannot push to {self._config.repo_id}: it was not done within "
                f"{self._config.timeout:g} s of the end of the run; the command `python "
                f"{' '.join(_COMMAND)} path={self._run_path} repo_id={self._config.repo_id}` "
                "pushes it again"
            )

    def close(self) -> None:
        """Stop, whatever is under way; closing twice is harmless."""
        with self._changed:
            self._closed = True
            if self._process is not None:
                self._process.kill()
            self._changed.notify_all()
        self._thread.join()

    def _is_there(self, generations: int) -> bool:
        """Whether there is something to push of so many generations: of a model, a checkpoint."""
        return self._is_history or self._run_info.model_path(generations).is_dir()

    def _want(self, generations: int) -> None:
        self._last_wanted = generations
        sizes: dict[str, int] = {}
        for name in RUN_FILES:
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = (self._run_path / name).stat().st_size
        with self._changed:
            self._wanted = generations, sizes
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wanted)
                if self._closed:
                    return
                wanted, self._wanted, self._busy = self._wanted, None, True
            assert wanted is not None
            try:
                reason = self._push(*wanted)
            except OSError as error:  # No room for the copy, no process to be had.
                reason = f"cannot push to {self._config.repo_id}: {error.strerror or error}"
            if self._closed:  # And killed by that: no failure of the Hub's.
                return
            if reason is None:
                self._counts["hub/pushed"] += 1
            else:
                self._fail(reason)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _push(self, generations: int, sizes: Mapping[str, int]) -> str | None:
        """Push a copy of so many bytes of each file. Returns what went wrong, if anything did."""
        with scratch() as directory:
            self._fill(directory, generations, sizes)
            revision = self._config.revision_of(generations, is_model=not self._is_history)
            options = {
                "path": str(directory),
                "repo_id": self._config.repo_id,
                "revision": revision,
                "private": self._config.private,
                "timeout": self._config.timeout,
            }
            reason = self._run_beside([*_COMMAND, *(f"{k}={v}" for k, v in options.items())])
            if reason is None and not self._closed:
                self._follow(directory, generations, revision)
            return reason

    def _fill(self, directory: Path, generations: int, sizes: Mapping[str, int]) -> None:
        """Copy what is to be pushed: a checkpoint, or the beginnings of files that only grow.

        Raises:
            OSError: It cannot be copied.
        """
        if not self._is_history:
            return _copy_model(self._run_info.model_path(generations), directory)
        for name, size in sizes.items():
            source, target = self._run_path / name, directory / name
            with opened(source, ANY_SIZE, self._run_path) as reader, target.open("wb") as writer:
                shutil.copyfileobj(reader, writer)
                writer.truncate(size)

    def _follow(self, directory: Path, generations: int, revision: str) -> None:
        """What a directory holds was pushed to a branch: measure it. Called in a thread."""
        if self._is_history:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self._run_path / TRAINED_ON, directory / TRAINED_ON)
            text = self._run_info.config_json
            trust = trust_option(config_from_json(text, trust_of(text)), text)
            subject = {"log_path": str(directory), **trust}
            self._measure(subject, f"generation-{generations:09d}")
        else:
            self._measure({"model_name": str(directory)}, revision.replace("/", "-"))
        if self._config.then is not None:
            try:
                self._config.then(directory, revision)
            except Exception as error:  # The user's own; the run goes on.
                self._log_once(f"trackers.hub.then: {type(error).__name__}: {error}")

    def _measure(self, subject: Mapping[str, str], name: str) -> None:
        """Evaluate what these options name, as the user said, unless it was before."""
        results = self._run_path / PUSHED
        output = results / f"{name}.json"
        if not self._config.evaluate or output.exists():  # The last is pushed again at the end.
            return
        results.mkdir(exist_ok=True)
        options = {**subject, "output": str(output)}
        typed = [each for each in self._config.evaluate if each.partition("=")[0] not in options]
        options = (*(f"{option}={value}" for option, value in options.items()), *typed)
        if reason := self._run_beside(("-m", "es_cookbook", "evaluate", *options)):
            self._log_once(f"{name} was pushed, but not measured: {reason}")

    def _run_beside(self, arguments: Sequence[str]) -> str | None:
        """Run Python beside the run, and wait for it. Returns what went wrong, if anything did."""
        with self._changed:
            if self._closed:
                return None
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # A Ctrl-C is for the run, which then closes this.
            )
        with contextlib.suppress(AttributeError, OSError):  # Not every system has priorities.
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
        said = self._process.communicate()[1].strip()
        if self._process.returncode == 0:
            return None
        last_line = said.rpartition("\n")[2][:_LONGEST_REASON]
        return last_line or f"the process ended with {self._process.returncode} and said nothing"

    def _fail(self, reason: str) -> None:
        self._log_once(f"{reason}; the run goes on, and the next push takes everything")
        self._counts["hub/failed"] += 1  # Whoever sees this finds the sentence.

    def _log_once(self, sentence: str) -> None:
        """Log a sentence, unless it was logged before."""
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.warning(sentence)


def _copy_model(source: Path, target: Path) -> None:
    try:
        shutil.copytree(
            source,
            target,
            copy_function=_link_or_copy,
            dirs_exist_ok=True,
            symlinks=True,  # Which the push then refuses.
        )
    except (FileNotFoundError, shutil.Error) as error:
        raise OSError("its checkpoint was replaced before it could be copied") from error


def _link_or_copy(source: str, target: str) -> None:
    """Files of a checkpoint are never changed, so a second name will do where there can be one."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
