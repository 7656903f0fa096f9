"""The Config of a run: nothing that a run does depends on anything else.

So the same Config gives the same history, however often the run is interrupted. `RunConfig` has
the options of every run; `Config` adds those of evolution strategies, and the gradient plug-in
others. So runs that share these options differ only in the method that moves the model.
"""

import contextlib
import functools
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import LEAST, MOST, check_range, check_types
from es_cookbook.common.configs import load_config
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names, with_each
from es_cookbook.common.terminal import say_once
from es_cookbook.engines.base import ENGINE_NAMES, Engine, EngineBuilder
from es_cookbook.evolution.fitness import FITNESS_NAMES, Fitness
from es_cookbook.evolution.optimizers.base import AUTO, Optimizer, OptimizerBuilder, OptimizerNames
from es_cookbook.evolution.schedules import Constant, Schedule, schedule_field
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpace, SearchSpaceBuilder
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.data.problem_dataset import deal
from es_cookbook.rl.objectives import (
    OBJECTIVE_NAMES,
    SURROGATE_NAMES,
    AnswerSource,
    Mean,
    Objective,
)
from es_cookbook.rl.problem_env import told_stop
from es_cookbook.rl.regularisers import REGULARISER_NAMES, Regulariser
from es_cookbook.rl.types import RLDataset, RLDatasetBuilder, SamplingParams
from es_cookbook.runs.directory.directory import CONFIG, Recorded, add_to_log, check_is_run
from es_cookbook.runs.directory.opening import Behavior
from es_cookbook.runs.presets import PRESETS, Preset, whole_options
from es_cookbook.runs.tracking.base import TrackerBuilder
from es_cookbook.runs.tracking.jsonl import CORRECT
from es_cookbook.runs.tracking.trackers import TrackersBuilder

ENGINES = Names(ENGINE_NAMES, default="torch")
MAY_DIFFER = (
    *("log_path", "behavior_if_log_dir_exists", "trackers", "model_name", "engine"),
    *("num_generations", "snapshot_every", "profile", "size", "minutes"),
)
"""Options that a resumed run may change.

`model_name` and `engine` only if the base stays the same, bit for bit.
"""

SIZES = (
    *("optimizer.population_size", "dataset.problems_per_generation", "dataset.num_test"),
    *("sampling.max_tokens", "sampling.stop", "num_generations", "eval_every"),
)
"""Options whose values a run may choose, to fit into `minutes`."""
MINUTES = 10.0
"""Time of a run whose sizes are chosen, if no other is given."""
_MOST_GENERATIONS = 10**6
"""Before the first one, schedules are looked at in all of them."""


@chz.chz
class RunConfig(ABC):
    """A run that trains a model on the problems of a data set, by any method."""

    _types = chz.validate(check_types)

    main_metric: ClassVar[str] = CORRECT
    """The metric that summarises a run; a recipe may set another."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Options that `preset=NAME` stands for."""
    common_options: ClassVar[Collection[str]] = (
        *("model_name", "log_path", "seed", "engine", "num_generations", "eval_every"),
        *("dataset", "dataset.source", "dataset.task", "dataset.prompt", "dataset.reward"),
        *("dataset.num_train", "dataset.num_test", "dataset.problems_per_generation"),
        *("attempts", "sampling.max_tokens", "sampling.temperature", "minutes"),
        *("search_space", "search_space.rank", "objective", "fitness", "method"),
        *("optimizer", "optimizer.population_size", "optimizer.sigma", "optimizer.learning_rate"),
        *("optimizer.learning_rate_schedule", "learning_rate", "learning_rate_schedule"),
    )
    """Common options; `--help` lists them, and `--help all` every option."""

    model_name: str = chz.field(doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)")
    dataset: RLDatasetBuilder = chz.field(doc="problems to train on, and held-out ones")
    log_path: str = chz.field(default="", doc="run directory; empty: runs/<data>-<digest>")
    engine: EngineBuilder = ENGINES.field("where genomes run")
    sampling: SamplingParams = chz.field(default_factory=SamplingParams, doc="how tokens are drawn")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    num_generations: int = chz.field(default=100, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=20,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    eval_attempts: int = chz.field(
        default=1,
        doc="held-out: attempts at each problem; several also measure test/pass@k, where Envs "
        "report what is correct or rewards are 0 or 1",
    )
    eval_temperature: float = chz.field(default=0.0, doc="held-out: temperature; 0 is greedy")
    seed: int = chz.field(default=0, doc="everything random derives from it")
    rollout_timeout: float = chz.field(default=600.0, doc="seconds that an Env may use per rollout")
    turn_timeout: float | None = chz.field(
        default=None, doc="seconds that the Env may use in one turn; rollout_timeout if unset"
    )
    max_failed_fraction: float = chz.field(default=0.1, doc="stop if more of a generation is lost")
    trackers: TrackerBuilder = chz.field(
        default_factory=TrackersBuilder,
        blueprint_unspecified=TrackersBuilder,
        doc="destinations of metrics and rollouts",
    )
    behavior_if_log_dir_exists: Behavior = chz.field(default="ask", doc="if log_path holds a run")

    @chz.validate
    def _run_ranges(self) -> None:
        check_range(self, "attempts", at_least=1)
        check_range(self, "num_generations", at_least=1, at_most=_MOST_GENERATIONS)
        check_range(self, "eval_every", at_least=0)
        check_range(self, "max_failed_fraction", at_least=0, at_most=1)
        check_range(self, "rollout_timeout", "turn_timeout", above=0)
        check_evaluation(self.eval_attempts, self.eval_temperature)
        least = self.engine.least_temperature
        for name, found in (
            ("sampling.temperature", self.sampling.temperature),
            ("eval_temperature", self.eval_temperature),
        ):
            if 0 < found < least:
                raise ConfigError(
                    f"{name}={found:g}: engine={self.engine.name} samples at 0 (greedy), or from "
                    f"{least:g} on"
                )

    @classmethod
    def whole_options(cls, given: Mapping[str, str]) -> dict[str, str]:
        """Return the options with short names and presets expanded."""
        return whole_options(given, cls.presets)

    @property
    @abstractmethod
    def space(self) -> SearchSpaceBuilder:
        """The search space that the engine is built for."""

    def new_optimizer(self, space: SearchSpace, found: Mapping[str, float]) -> Optimizer:
        """Build the optimizer of a run.

        Args:
            space: the parameters that genomes perturb.
            found: values for options that are `auto` (`runs.history.format.Header`).

        Raises:
            ConfigError: The run has no population, or an option that is `auto` was not found.
        """
        raise ConfigError("a run of gradients has no genomes, only its centre and its base")

    def centre_of(self, generation: int) -> int:
        """Return which centre the genomes of a generation perturb, as the generations before it."""
        return generation

    def check_problems(self, dataset: RLDataset) -> None:  # noqa: B027 - most methods take any
        """Check, before the model is loaded, that the method can train on these problems.

        Raises:
            DataError: It cannot; names the problem.
        """

    @property
    def num_pairs(self) -> int:
        """Pairs of genomes that share a batch; 0: all genomes attempt the whole batch."""
        return 0

    def evaluates(self, generation: int) -> bool:
        """Return whether the centre is evaluated before this generation, or after the last one."""
        last = self.num_generations
        return generation == last or generation % (self.eval_every or last) == 0

    def sampling_at(self, generation: int) -> SamplingParams:
        """Return the sampling parameters of a generation."""
        return self.sampling

    def check_temperatures(self, schedule: Schedule) -> None:
        """Check that no generation becomes greedy by a schedule of `sampling.temperature`.

        Raises:
            ConfigError: The temperature is 0, or is too low or high in some generation.
        """
        if isinstance(schedule, Constant):
            return
        if not self.sampling.temperature:
            raise ConfigError(
                "temperature_schedule is a factor on sampling.temperature, which is 0 (greedy): "
                "set that above 0"
            )
        least = max(LEAST, self.engine.least_temperature)
        for generation in range(self.num_generations):
            found = self.sampling.temperature * schedule(generation, self.num_generations)
            if not least <= found <= MOST:
                raise ConfigError(
                    "temperature_schedule must stay above 0 (which would be greedy), from "
                    f"{least:g} to {MOST:g}, found {found:g} in generation {generation}"
                )

    def sampler(
        self,
        engine: Engine,
        log_path: Path | None = None,
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
    ) -> PopulationSampler:
        """Build a sampler with the settings of the run.

        Args:
            engine: samples.
            log_path: run directory in which lost rollouts are logged; not logged if None.
            sampling: sampling of every generation, one attempt per genome; the run's own if None.
            seed: for the sampling seeds; the run's own if None.
        """
        return PopulationSampler(
            engine,
            sampling=sampling or self.sampling,
            sampling_at=None if sampling else self.sampling_at,
            attempts=1 if sampling else self.attempts,
            rollout_timeout=self.rollout_timeout,
            turn_timeout=self.turn_timeout,
            max_failed_fraction=self.max_failed_fraction,
            run_seed=self.seed if seed is None else seed,
            log=None if log_path is None else functools.partial(add_to_log, log_path),
        )


@chz.chz
@with_each(REGULARISER_NAMES, Regulariser, "regulariser")
class Config(RunConfig):
    """Configuration of a training run with evolution strategies."""

    presets: ClassVar[Mapping[str, Preset]] = PRESETS

    search_space: SearchSpaceBuilder = Names(SEARCH_SPACE_NAMES, default="low_rank").field(
        "parameters that genomes perturb, and how"
    )
    optimizer: OptimizerBuilder = OptimizerNames(
        {"es": {"sigma": AUTO, "learning_rate": AUTO}}
    ).field("makes the population and moves the centre")
    objective: Objective = Names(OBJECTIVE_NAMES, default="mean").field(
        "turns a genome's attempts at a problem into one score"
    )
    fitness: Fitness = Names(FITNESS_NAMES, default="zscore").field("turns scores into fitness")
    surrogate: AnswerSource | None = Names(SURROGATE_NAMES, default="centre").field(
        "genomes score answers instead of giving their own: those of the centre "
        "(surrogate.attempts=16), the best of them, or the gold answers",
        optional=True,
    )
    temperature_schedule: Schedule = schedule_field("factor on sampling.temperature over the run")
    batch_per_pair: bool = chz.field(
        default=False,
        doc="each mirrored pair of genomes attempts its own share of the problems of a "
        "generation instead of all of them",
    )
    snapshot_every: int = chz.field(
        default=0,
        doc="generations between snapshots of the centre, which shorten a resume; 0: none",
    )
    max_staleness: int = chz.field(
        default=0, doc="1: idle engines start the next generation from the previous centre"
    )
    size: tuple[str, ...] = chz.field(
        default=(),
        doc="options that are chosen to fit into `minutes` on this machine; in `train` also auto, "
        "its default (all that are not given), and none",
    )
    minutes: float = chz.field(default=MINUTES, doc="time of a run whose sizes are chosen")
    profile: bool = chz.field(default=False, doc="trace the first generations in profile.json")

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
        if self.max_staleness and not self.optimizer.asks_ahead:
            raise ConfigError(
                f"max_staleness={self.max_staleness}: {type(self.optimizer).__name__} asks for "
                "genomes by what it was told of the generation before, which is not known yet; "
                "use es or an optimizer built on it, without adaptive_sigma and sharpness"
            )
        self.optimizer.check_run(self.search_space, self.num_generations)
        self.engine.check_space(self.search_space, getattr(self.optimizer, "max_terms", 1))
        self.check_temperatures(self.temperature_schedule)
        self._check_pairs()
        if self.surrogate is not None:
            self._check_surrogate(self.surrogate)

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
        if self.batch_per_pair and self.objective.compares_genomes:
            raise ConfigError(
                "batch_per_pair gives each pair of genomes other problems, and this objective "
                "compares all genomes at a problem: leave one of them out"
            )

    def _check_surrogate(self, surrogate: AnswerSource) -> None:
        if self.attempts != 1:
            raise ConfigError(
                f"attempts={self.attempts} are a genome's own, and with surrogate genomes only "
                "score answers: set surrogate.attempts"
            )
        surrogate.sampling(self.sampling)
        # Said with the value that is needed, since a recipe's default may be another.
        needed = {
            "objective=mean": isinstance(self.objective, Mean),
            "batch_per_pair=False": not self.batch_per_pair,
            "temperature_schedule=none": isinstance(self.temperature_schedule, Constant),
            "max_staleness=0": not self.max_staleness,
        }
        for option, is_set in needed.items():
            if not is_set:
                raise ConfigError(f"with surrogate genomes only score answers: it needs {option}")

    @property
    def regularisers(self) -> Sequence[Regulariser]:
        """The regularisers of the run, in the order of their names."""
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
        is_found = "learning_rate" in self.optimizer.unsettled
        optimizer.divides_fitness = is_found and not self.fitness.has_unit_variance
        return optimizer

    @override
    def check_problems(self, dataset: RLDataset) -> None:
        """Refuse problems that the run cannot use, and say where answers end by default."""
        batch_P = dataset.get_batch(0)
        if self.surrogate is not None:
            self.surrogate.check([*dataset.training_problems, *batch_P])
            dataset.check_rollouts(self.surrogate.attempts)
        if self.num_pairs and "dataset.problems_per_generation" not in self.size:
            deal(batch_P, self.num_pairs)
        if self.max_staleness and dataset.depends_on_results:
            raise ConfigError(
                f"max_staleness={self.max_staleness}: batches of {type(self.dataset).__name__} "
                "depend on the results of the generation before (a curriculum, a filter or "
                "replay), which are not known yet"
            )
        if stop := told_stop(self.sampling, batch_P):
            say_once(stop)

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
    """Read the Config of the run in a directory.

    It may name parts of es_cookbook and of installed plug-ins, and classes and functions of the
    packages and scripts in `trust`, which must also list the addresses that it reaches.

    Args:
        log_path: the directory.
        trust: packages, scripts and addresses (`es_cookbook.common.trust`).
        typed: options that the user replaces, and unused ones: they may reach anything.

    Raises:
        RunDirectoryError: There is no run.
        ConfigError: Its Config cannot be rebuilt here, or reaches what is not trusted.
    """
    return config_of_kind(Config, check_is_run(log_path), trust, typed)


_Kind = TypeVar("_Kind", bound=RunConfig)


def config_of_kind(
    kind: type[_Kind], recorded: Recorded, trust: Collection[str], typed: Collection[str]
) -> _Kind:
    """Read the Config of a run of any kind, as `recorded_config` does."""
    log_path, text = recorded.log_path, recorded.config_json
    path = log_path / CONFIG
    if '"__main__:' in text:
        raise ConfigError(
            f"{path} names classes of the program that wrote it, as __main__, and only that has "
            f"them: run it again with log_path={shlex.quote(str(log_path))} "
            "behavior_if_log_dir_exists=resume"
        )
    return load_config(path, kind, trust, typed, text)


@contextlib.asynccontextmanager
async def closing(engine: Engine) -> AsyncGenerator[Engine]:
    """Yield the engine, and close it with the block, also if the task is cancelled."""
    try:
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.close()
