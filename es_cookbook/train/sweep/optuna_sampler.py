"""Trials by Optuna: a tree-structured Parzen estimator learns from those that are over.

Bergstra et al. 2011 (TPE). What was tried and what came of it is kept in `optuna.jsonl` in the
sweep's directory, so a sweep that goes on begins with all of it, those trials that were not over
included. Other options, or another metric, are another study in the same file.

Left out: its pruners, since runs are compared in one place for all samplers (`loop.falls_behind`).
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from es_cookbook.common.errors import not_installed
from es_cookbook.common.seeds import derive_seed
from es_cookbook.train.sweep.search import Range, Space, Trial, Value

if TYPE_CHECKING:
    import optuna

JOURNAL = "optuna.jsonl"
_DRAWS = 50
"""For a trial that has not been tried; a small space may have none left."""


class OptunaSampler:
    """Asks and tells a study.

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
