"""The Config of a run: nothing that a run does depends on anything else.

So the same Config gives the same history, wherever and however often the run is interrupted.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import load_config
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names, with_each
from es_cookbook.common.schedules import (
    Constant,
    Schedule,
    check_temperatures,
    schedule_field,
)
from es_cookbook.evolution.fitness import FITNESS_NAMES, Fitness
from es_cookbook.evolution.optimizers.base import (
    AUTO,
    Optimizer,
    OptimizerBuilder,
    OptimizerNames,
)
from es_cookbook.evolution.optimizers.spread import UnitSpread
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpace, SearchSpaceBuilder
from es_cookbook.rl.objectives import (
    OBJECTIVE_NAMES,
    SURROGATE_NAMES,
    AnswerSource,
    Mean,
    Objective,
    check_goes_with,
)
from es_cookbook.rl.regularisers import REGULARISER_NAMES, Regulariser
from es_cookbook.rl.types import SamplingParams
from es_cookbook.runs.directory.directory import CONFIG, Recorded, check_is_run
from es_cookbook.runs.presets import PRESETS, Preset
from es_cookbook.runs.run_config import RunConfig

MAY_DIFFER = (
    "log_path",
    "behavior_if_log_dir_exists",
    "trackers",
    "model_name",
    "engine",
    "num_generations",
    "snapshot_every",
    "profile",
    "size",
    "minutes",
)
"""What a resumed run may change: where it is kept, shown and run, and for how long.

`model_name` and `engine` as long as the base is the same, bit for bit; the history tells.
"""

SIZES = (
    "optimizer.population_size",
    "dataset.problems_per_generation",
    "dataset.num_test",
    "sampling.max_tokens",
    "sampling.stop",
    "num_generations",
    "eval_every",
)
"""Options that a run may choose for itself, by what fits into its time."""


@chz.chz
@with_each(REGULARISER_NAMES, Regulariser, "regulariser")
class Config(RunConfig):
    """One training run, whole."""

    presets: ClassVar[Mapping[str, Preset]] = PRESETS

    search_space: SearchSpaceBuilder = Names(SEARCH_SPACE_NAMES, default="low_rank").field(
        "which parameters genomes perturb, and how"
    )
    optimizer: OptimizerBuilder = OptimizerNames(
        {"es": {"sigma": AUTO, "learning_rate": AUTO}}
    ).field("how the population is made and the centre moves")
    objective: Objective = Names(OBJECTIVE_NAMES, default="mean").field(
        "how a genome's attempts at a problem become one score"
    )
    fitness: Fitness = Names(FITNESS_NAMES, default="zscore").field("how scores become fitness")
    surrogate: AnswerSource | None = Names(SURROGATE_NAMES, default="centre").field(
        "genomes score answers in place of giving their own: the centre's, surrogate.attempts=16, "
        "or the gold ones",
        optional=True,
    )
    temperature_schedule: Schedule = schedule_field("factor on sampling.temperature over the run")
    batch_per_pair: bool = chz.field(
        default=False,
        doc="each mirrored pair of genomes attempts its own share of a generation's problems, "
        "instead of all of them",
    )
    snapshot_every: int = chz.field(
        default=0,
        doc="generations between snapshots of the centre, which shorten a replay; 0: none",
    )
    max_staleness: int = chz.field(
        default=0,
        doc="1: engines that are done begin the next generation before the step of this one is "
        "known, around the centre before it",
    )
    size: tuple[str, ...] = chz.field(
        default=(),
        doc="sizes that are chosen to fit into `minutes`, by what the first answers take here: "
        "auto is all that are not given, the default of `train`; none",
    )
    minutes: float = chz.field(default=10.0, doc="that a run may take whose sizes are chosen")
    profile: bool = chz.field(
        default=False, doc="write a trace of the first generations, profile.json, and print a table"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "snapshot_every", at_least=0)
        check_range(self, "max_staleness", at_least=0, at_most=1)
        check_range(self, "minutes", above=0)
        if others := [path for path in self.size if path not in SIZES]:
            raise ConfigError(
                f"size={','.join(others)}: accepted are {', '.join(SIZES)}; auto and none are for "
                "the command `train`"
            )
        self.objective.check(self.attempts, self.sampling.temperature)
        if self.max_staleness and self.objective.follows_results:
            raise ConfigError(
                "max_staleness=1 begins a generation before the results of the one before it are "
                "known, and this objective follows them: leave one of them out"
            )
        self.optimizer.check_space(self.search_space)
        check_temperatures(
            self.temperature_schedule,
            self.sampling.temperature,
            self.num_generations,
            self.engine.least_temperature,
        )
        self._check_pairs()
        check_goes_with(
            self.surrogate,
            self.sampling,
            attempts=self.attempts,
            others={
                "objective": not isinstance(self.objective, Mean),
                "batch_per_pair": self.batch_per_pair,
                "temperature_schedule": not isinstance(self.temperature_schedule, Constant),
                "max_staleness": self.max_staleness > 0,
            },
        )

    def _check_pairs(self) -> None:
        if self.batch_per_pair and not getattr(self.optimizer, "antithetic", False):
            raise ConfigError(
                "batch_per_pair compares the two genomes of a mirrored pair: it needs "
                "optimizer.antithetic=True, of an optimizer that has it"
            )
        if self.batch_per_pair and getattr(self.optimizer, "evaluate_centre", False):
            raise ConfigError(
                "batch_per_pair leaves no problem that all attempt: it does not go with "
                "optimizer.evaluate_centre"
            )

    @property
    def regularisers(self) -> Sequence[Regulariser]:
        """Those that the run has, in the order of their names."""
        found: list[object] = [getattr(self, name, None) for name in sorted(REGULARISER_NAMES)]
        return [each for each in found if isinstance(each, Regulariser)]

    @property
    @override
    def space(self) -> SearchSpaceBuilder:
        return self.search_space

    @override
    def new_optimizer(self, space: SearchSpace, found: Mapping[str, float]) -> Optimizer:
        builder, length = self.optimizer.settled(found), self.num_generations
        optimizer = builder(run_seed=self.seed, num_generations=length, space=space)
        if "learning_rate" in self.optimizer.unsettled and not self.fitness.has_unit_variance:
            return UnitSpread(optimizer)
        return optimizer

    @override
    def centre_of(self, generation: int) -> int:
        may_lag = self.max_staleness and not self.evaluates(generation)
        return generation - 1 if may_lag else generation

    @property
    @override
    def num_pairs(self) -> int:
        return self.optimizer.population_size // 2 if self.batch_per_pair else 0

    @override
    def sampling_at(self, generation: int) -> SamplingParams:
        return self.sampling.scaled(self.temperature_schedule(generation, self.num_generations))


def recorded_config(
    log_path: Path, trust: Collection[str] = (), typed: Collection[str] = ()
) -> Config:
    """The Config of the run in a directory, as it was begun, but for a length that it was given.

    It may name parts of es_cookbook and of installed plug-ins, and classes and functions of the
    packages and scripts in `trust`; what it reaches has to be named there too.

    Args:
        log_path: the directory.
        trust: packages, scripts, and words for what is reached (`es_cookbook.common.fields.reach`).
        typed: options that the user gives in place of the run's own, and those that nobody uses.

    Raises:
        RunDirectoryError: There is no run.
        ConfigError: Its Config cannot be rebuilt here, or reaches what is not trusted.
    """
    return config_of_kind(Config, check_is_run(log_path), trust, typed)


_Kind = TypeVar("_Kind", bound=RunConfig)


def config_of_kind(
    kind: type[_Kind], recorded: Recorded, trust: Collection[str], typed: Collection[str]
) -> _Kind:
    """The same of a run of any kind."""
    log_path, text = recorded.log_path, recorded.config_json
    path = log_path / CONFIG
    if '"__main__:' in text:
        raise ConfigError(
            f"{path} names classes of the program that wrote it, as __main__, and only that has "
            f"them: run it again with log_path={shlex.quote(str(log_path))} "
            "behavior_if_log_dir_exists=resume"
        )
    return load_config(path, kind, trust, typed, text)
