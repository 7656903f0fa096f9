"""The trials of a sweep: all combinations of values (a grid), random draws, or Optuna's choices.

A space gives the values that each option may take, as a list or as a range. A trial is one value
for each option.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, importing
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.generated import distinct

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value: TypeAlias = str | int | float | bool
_LONGEST = 120
"""Characters of a run directory's name, without the seed."""
_DRAWS = 50
"""Draws in a row without a new trial that end a search; a small space may have none left."""
JOURNAL = "optuna.jsonl"


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
        pairs = zip(short, self.options.values(), strict=True)
        text = "-".join(f"{name}{value}" for name, value in pairs) or "run"
        name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text)[:_LONGEST]
        if name == text:
            return name
        exact = json.dumps(dict(self.options), sort_keys=True)
        return f"{name}-{hashlib.blake2b(exact.encode(), digest_size=4).hexdigest()}"


def grid(space: Space) -> list[Trial]:
    """Return every combination of values; the last option changes fastest.

    Raises:
        ConfigError: An option is a range, or two trials would have one name.
    """
    lists: list[tuple[Value, ...]] = []
    for name, choice in space.items():
        if isinstance(choice, Range):
            raise ConfigError(
                f"{name} is given as a range, and a grid tries all values: list them, or draw from "
                "the range with sampler=random or sampler=optuna"
            )
        lists.append(choice.values)
    combinations = itertools.product(*lists)
    options_T = [dict(zip(space, values, strict=True)) for values in combinations]
    trials = [Trial(number, options) for number, options in enumerate(options_T)]
    if len({trial.name for trial in trials}) < len(trials):
        raise ConfigError(f"values that are written alike make the same run: {dict(space)}")
    return trials


def draws(space: Space, count: int, seed: int) -> list[Trial]:
    """Draw different random trials; a larger count begins with the same ones.

    There are fewer if the space, which must not be empty, has fewer.
    """
    rng = random.Random(derive_seed(seed, "sweep"))
    drawn = ({name: _drawn(rng, space[name]) for name in space} for _ in itertools.count())
    found = itertools.islice(_different(Trial(0, options) for options in drawn), count)
    return [Trial(number, trial.options) for number, trial in enumerate(found)]


def _different(trials: Iterable[Trial]) -> Iterator[Trial]:
    """Yield the trials with other options than those before; ends after `_DRAWS` without one."""
    drawn = iter(trials)
    return distinct(lambda: next(drawn), key=lambda trial: trial.name, fruitless=_DRAWS)


def _drawn(rng: random.Random, choice: Values | Range) -> Value:
    if isinstance(choice, Values):
        return rng.choice(choice.values)
    low, high = choice.low, choice.high
    if choice.log:
        value = math.exp(rng.uniform(math.log(low), math.log(high)))
        return round(value) if choice.is_whole else float(f"{value:.4g}")
    return rng.randint(int(low), int(high)) if choice.is_whole else rng.uniform(low, high)


def ends(space: Space) -> list[Trial]:
    """Return trials with every listed value and both ends of every range of a space, for checks."""
    values_O = [
        choice.values if isinstance(choice, Values) else (choice.low, choice.high)
        for choice in space.values()
    ]
    return [
        Trial(i, {name: v[i % len(v)] for name, v in zip(space, values_O, strict=True)})
        for i in range(max(map(len, values_O)))
    ]


class Study:
    """Trials proposed by Optuna's tree-structured Parzen estimator (TPE, Bergstra et al. 2011).

    Optuna's journal, `optuna.jsonl` in the sweep's directory, records the trials and their values,
    so a continued sweep begins with all of them. Other options or another metric are another study
    in the same file.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, space: Space, seed: int, metric: str, log_path: Path) -> None:
        with importing("sampler=optuna", "es-cookbook[sweep]", "optuna"):
            import optuna
            from optuna.storages.journal import JournalFileBackend, JournalStorage
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        text = json.dumps([metric, {name: repr(choice) for name, choice in space.items()}])
        self._space = {name: _distribution(choice) for name, choice in space.items()}
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(log_path / JOURNAL))),
            study_name=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
            direction="maximize",
            load_if_exists=True,
        )
        # A process that draws with the seed of an earlier one would repeat its draws.
        seed = derive_seed(seed, "optuna", len(self._study.trials)) % 2**32
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)

    def trials(self) -> Iterator[Trial]:
        """Yield recorded trials, then new ones, each drawn when it is requested."""
        from optuna.trial import TrialState

        recorded = self._study.get_trials(states=(TrialState.RUNNING, TrialState.COMPLETE))
        known = [trial for trial in recorded if trial.params.keys() == self._space.keys()]
        new = (self._study.ask(self._space) for _ in itertools.count())
        return _different(
            Trial(found.number, {name: cast(Value, found.params[name]) for name in self._space})
            for found in itertools.chain(known, new)
        )

    def tell(self, trial: Trial, value: float) -> None:
        """Record the mean over a trial's runs; NaN, if all failed, leaves it to be tried again."""
        if not math.isnan(value):
            self._study.tell(trial.number, value, skip_if_finished=True)


def _distribution(choice: Values | Range) -> "BaseDistribution":
    from optuna import distributions

    if isinstance(choice, Values):
        return distributions.CategoricalDistribution(choice.values)
    if choice.is_whole:
        low, high = int(choice.low), int(choice.high)
        return distributions.IntDistribution(low, high, log=choice.log)
    return distributions.FloatDistribution(choice.low, choice.high, log=choice.log)
