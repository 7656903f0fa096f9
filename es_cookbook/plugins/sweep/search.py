"""Which options a sweep tries: all of them (grid), some at random, or what Optuna suggests.

A space says for each option which values it may take, as a list or as a range. A trial is one value
for each. Those of a grid and random ones are known before the first run: the latter derive from a
seed, the option's name and the trial's number, so a sweep that goes on makes the same ones.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, not_installed
from es_cookbook.common.seeds import derive_seed

if TYPE_CHECKING:
    import optuna

Value: TypeAlias = str | int | float | bool
_LONGEST = 120
"""Characters of a run directory's name, before its seed."""
JOURNAL = "optuna.jsonl"
_DRAWS = 50
"""For a trial that has not been tried; a small space may have none left."""


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """One of some values.

    Raises:
        ConfigError: None, or one twice.
    """

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise ConfigError(f"must be one or more different values, found {self.values}")

    def at(self, share: float) -> Value:
        """The value at a share of the way through, in [0, 1)."""
        return self.values[int(share * len(self.values))]


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """A number between two, both included; a whole one where both are.

    `log`: small ones are as likely as large ones, by ratio.

    Raises:
        ConfigError: Not finite, not in order, or `log` and not above 0.
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

    def at(self, share: float) -> Value:
        """The number at a share of the way from the lower to the higher, in [0, 1)."""
        whole = int(self.is_whole)
        low, high = (self.low, self.high + whole)
        if self.log:
            found = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            found = low + share * (high - low)
        return min(int(found), int(self.high)) if whole else float(f"{found:.4g}")


Space: TypeAlias = Mapping[str, Values | Range]
"""Option -> what it may be."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One value for each option."""

    number: int
    options: Mapping[str, Value]

    @property
    def name(self) -> str:
        """A directory's name, the same for the same options and for no others.

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
        ConfigError: A range, which has no end of values.
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


def at_random(space: Space, count: int, seed: int) -> list[Trial]:
    """Different trials, up to `count`: fewer where the space has no more."""
    found: dict[str, Trial] = {}
    for draw in range(10 * count):
        if len(found) == count:
            break
        options = {
            name: choice.at(random.Random(derive_seed(seed, f"sweep {name}", draw)).random())
            for name, choice in space.items()
        }
        trial = Trial(len(found), options)
        found.setdefault(trial.name, trial)
    return list(found.values())


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


class OptunaSampler:
    """Trials by Optuna: a tree-structured Parzen estimator learns from those that are over.

    Bergstra et al. 2011 (TPE). What was tried and what came of it is kept in `optuna.jsonl` in the
    sweep's directory, so a sweep that goes on begins with all of it, those trials that were not
    over included. Other options, or another metric, are another study in the same file. Left out:
    its pruners, since runs are compared in one place for all samplers (`loop.falls_behind`).

    Args:
        space: of the options.
        count: trials in all, of this process and those before it.
        seed: of what it draws.
        metric: what is maximised.
        log_path: directory of the study's file.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, space: Space, count: int, seed: int, metric: str, log_path: Path) -> None:
        self._space = space
        self._count = count
        self._study = _study(space, seed, metric, log_path)
        recorded = self._study.trials
        self._recorded = iter(_whole(recorded, space))
        self._over = {trial.number for trial in recorded if trial.state.is_finished()}
        self._asked: dict[str, int] = {}

    def ask(self) -> Trial | None:
        """The next trial, those of before first, and no options twice; None: no more."""
        trial = next(self._recorded, None) or self._new()
        if trial is not None:
            self._asked[trial.name] = trial.number
        return trial

    def tell(self, trial: Trial, value: float, is_pruned: bool = False) -> None:
        """A trial is over: the mean of its runs' metric, NaN where there is none."""
        from optuna.trial import TrialState

        if trial.number in self._over:
            return
        self._over.add(trial.number)
        if is_pruned or math.isnan(value):
            state = TrialState.PRUNED if is_pruned else TrialState.FAIL
            self._study.tell(trial.number, state=state)
        else:
            self._study.tell(trial.number, value)

    def _new(self) -> Trial | None:
        if len(self._asked) >= self._count:
            return None
        for _ in range(_DRAWS):
            drawn = self._study.ask()
            options = {name: _suggested(drawn, name, self._space) for name in self._space}
            trial = Trial(drawn.number, options)
            if trial.name not in self._asked:
                return trial
            self.tell(trial, math.nan)
        return None


def _study(space: Space, seed: int, metric: str, log_path: Path) -> "optuna.Study":
    try:
        import optuna
    except ImportError as error:
        raise not_installed("sampler=optuna", "optuna", "es-cookbook[sweep]") from error
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(log_path / JOURNAL)))
    text = json.dumps([metric, {name: repr(choice) for name, choice in space.items()}])
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", load_if_exists=True
    )
    # Its generator begins anew with every process: not at the draws of the one before.
    of_process = derive_seed(seed, "optuna", len(study.trials)) % 2**32
    study.sampler = optuna.samplers.TPESampler(seed=of_process)
    return study


def _suggested(drawn: "optuna.Trial", name: str, space: Space) -> Value:
    choice = space[name]
    if not isinstance(choice, Range):
        return cast(Value, drawn.suggest_categorical(name, choice.values))
    if choice.is_whole:
        return drawn.suggest_int(name, int(choice.low), int(choice.high), log=choice.log)
    return drawn.suggest_float(name, choice.low, choice.high, log=choice.log)


def _whole(recorded: "Sequence[optuna.trial.FrozenTrial]", space: Space) -> list[Trial]:
    """Trials with all their options, of which the runs are to be had."""
    from optuna.trial import TrialState

    return [
        Trial(trial.number, {name: cast(Value, trial.params[name]) for name in space})
        for trial in recorded
        if trial.params.keys() == space.keys() and trial.state != TrialState.FAIL
    ]
