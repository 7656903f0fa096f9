"""Which options a sweep tries: all combinations (grid), or what Optuna draws.

A space gives the values that each option may take, as a list or as a range. A trial is one value
for each option.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, not_installed
from es_cookbook.common.seeds import derive_seed

if TYPE_CHECKING:
    import optuna

Value: TypeAlias = str | int | float | bool
_LONGEST = 120
"""Characters of a run directory's name, before its seed."""
JOURNAL = "optuna.jsonl"
_DRAWS = 50
"""Attempts to draw a trial that is new; a small space may have none left."""


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """A list of values.

    Raises:
        ConfigError: The list is empty or has a value twice.
    """

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise ConfigError(f"must be one or more different values, found {self.values}")


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two, both included; integers if both are. `log` draws log-uniformly.

    Raises:
        ConfigError: The ends are not finite or not in order, or `log` and not above 0.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(
                f"must be a lower and a higher number, found {self.low} and {self.high}"
            )
        if self.log and self.low <= 0:
            raise ConfigError(f"must be above 0 to be drawn by ratio (log), found {self.low}")

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Space: TypeAlias = Mapping[str, Values | Range]
"""Option -> its values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One value for each option."""

    number: int
    options: Mapping[str, Value]

    @property
    def name(self) -> str:
        """A directory's name, unique for these options.

        >>> Trial(3, {"optimizer.sigma": 0.01, "attempts": 2}).name
        'sigma0.01-attempts2'
        """
        lasts = [path.rpartition(".")[2] for path in self.options]
        short = lasts if len(set(lasts)) == len(lasts) else list(self.options)
        values = list(self.options.values())
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
        is_exact = all(
            not isinstance(v, float) or float(s) == v for s, v in zip(shown, values, strict=True)
        )
        text = "-".join(name + value for name, value in zip(short, shown, strict=True)) or "run"
        name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text)[:_LONGEST]
        if name == text and is_exact:
            return name
        exact = json.dumps(dict(self.options), sort_keys=True)
        return f"{name}-{hashlib.blake2b(exact.encode(), digest_size=4).hexdigest()}"


def grid(space: Space) -> list[Trial]:
    """Every combination of values; the last option changes fastest.

    Raises:
        ConfigError: An option is a range, or two trials would have one name.
    """
    lists: list[tuple[Value, ...]] = []
    for name, choice in space.items():
        if isinstance(choice, Range):
            raise ConfigError(
                f"{name} is given as a range, and a grid tries all values: list them, or draw from "
                "the range by sampler=random or sampler=optuna"
            )
        lists.append(choice.values)
    combinations = itertools.product(*lists)
    options_T = [dict(zip(space, values, strict=True)) for values in combinations]
    trials = [Trial(number, options) for number, options in enumerate(options_T)]
    if len({trial.name for trial in trials}) < len(trials):
        raise ConfigError(f"values that are written alike make the same run: {dict(space)}")
    return trials


def corners(space: Space) -> Iterator[Trial]:
    """Trials in which every value of a list and both ends of every range occur, for checks."""
    ends = {
        name: choice.values if isinstance(choice, Values) else (choice.low, choice.high)
        for name, choice in space.items()
    }
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        for value in values:
            yield Trial(0, {**first, name: value})


class Study:
    """Trials drawn by Optuna: at random, or by its tree-structured Parzen estimator (TPE).

    TPE (Bergstra et al. 2011) learns from the trials that have ended. Optuna's journal,
    `optuna.jsonl` in the sweep's directory, records trials and their values, so a continued sweep
    begins with all of them. Other options or another metric are another study in the same file.

    Args:
        space: the options.
        sampler: "random", or "optuna" for TPE.
        count: total number of trials, including those of earlier processes.
        seed: seed of the draws.
        metric: the metric to maximise.
        log_path: directory of the journal.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(
        self,
        space: Space,
        sampler: Literal["random", "optuna"],
        count: int,
        seed: int,
        metric: str,
        log_path: Path,
    ) -> None:
        self._space, self._count = space, count
        self._study = _study(space, sampler, seed, metric, log_path)
        self._over = {trial.number for trial in self._study.trials if trial.state.is_finished()}

    def trials(self) -> Iterator[Trial]:
        """Recorded trials first, then new ones, each drawn when it is asked for."""
        from optuna.trial import TrialState

        seen: set[str] = set()
        for trial in self._study.trials:
            if trial.params.keys() == self._space.keys() and trial.state != TrialState.FAIL:
                options = {name: cast(Value, trial.params[name]) for name in self._space}
                recorded = Trial(trial.number, options)
                seen.add(recorded.name)
                yield recorded
        while len(seen) < self._count and (new := self._new(seen)) is not None:
            seen.add(new.name)
            yield new

    def tell(self, trial: Trial, value: float) -> None:
        """Record a trial's value: the mean over its runs, NaN if there is none."""
        from optuna.trial import TrialState

        if trial.number in self._over:
            return
        self._over.add(trial.number)
        if math.isnan(value):
            self._study.tell(trial.number, state=TrialState.FAIL)
        else:
            self._study.tell(trial.number, value)

    def _new(self, seen: set[str]) -> Trial | None:
        for _ in range(_DRAWS):
            drawn = self._study.ask()
            options = {name: _suggested(drawn, name, self._space[name]) for name in self._space}
            trial = Trial(drawn.number, options)
            if trial.name not in seen:
                return trial
            self.tell(trial, math.nan)
        return None


def _study(space: Space, sampler: str, seed: int, metric: str, log_path: Path) -> "optuna.Study":
    try:
        import optuna
    except ImportError as error:
        raise not_installed(f"sampler={sampler}", "optuna", "es-cookbook[sweep]") from error
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(log_path / JOURNAL)))
    text = json.dumps([metric, {name: repr(choice) for name, choice in space.items()}])
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )
    # Each process draws from its own stream, or it would repeat the draws of the one before.
    of_process = derive_seed(seed, "optuna", len(study.trials)) % 2**32
    samplers = optuna.samplers
    is_random = sampler == "random"
    study.sampler = (samplers.RandomSampler if is_random else samplers.TPESampler)(seed=of_process)
    return study


def _suggested(drawn: "optuna.Trial", name: str, choice: Values | Range) -> Value:
    if not isinstance(choice, Range):
        return cast(Value, drawn.suggest_categorical(name, choice.values))
    if choice.is_whole:
        return drawn.suggest_int(name, int(choice.low), int(choice.high), log=choice.log)
    return drawn.suggest_float(name, choice.low, choice.high, log=choice.log)
