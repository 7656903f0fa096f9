"""What every run has, whatever moves its model: problems, an engine, how it samples and evaluates.

So two runs that share these options differ by what moves the model and by nothing else.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping
from pathlib import Path
from typing import ClassVar

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.parts import plugs_in
from es_cookbook.common.names import Names
from es_cookbook.engines.base import ENGINE_NAMES, Engine, EngineBuilder
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.directory.directory import add_to_log
from es_cookbook.runs.directory.opening import Behavior
from es_cookbook.runs.presets import Preset, whole_options
from es_cookbook.runs.tracking.base import TrackerBuilder
from es_cookbook.runs.tracking.jsonl import CORRECT
from es_cookbook.runs.tracking.trackers import TrackersBuilder

ENGINES = Names(ENGINE_NAMES, default="torch")


@chz.chz
class RunConfig(ABC):
    """A run that moves a model by its answers to the problems of a data set."""

    main_metric: ClassVar[str] = CORRECT
    """The metric that tells what a run brought; a recipe may have one of its own."""
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
    """Options that people set often; `--help` lists them, and `--help all` every option."""

    model_name: str = chz.field(doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)")
    dataset: RLDatasetBuilder = chz.field(doc="problems to train on, and held-out ones")
    log_path: str = chz.field(
        default="", doc="run directory; empty: runs/<name of the data>-<digest of the options>"
    )
    engine: EngineBuilder = ENGINES.field("where genomes run")
    sampling: SamplingParams = chz.field(default_factory=SamplingParams, doc="how tokens are drawn")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    num_generations: int = chz.field(default=100, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=20,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    eval_attempts: int = chz.field(
        default=1, doc="held-out: attempts at each problem; several also measure test/pass@k"
    )
    eval_temperature: float = chz.field(default=0.0, doc="held-out: temperature; 0 is greedy")
    seed: int = chz.field(default=0, doc="everything random derives from it")
    rollout_timeout: float = chz.field(
        default=600.0, doc="seconds for which one rollout's Env may have control"
    )
    turn_timeout: float | None = chz.field(
        default=None,
        doc="seconds for which it may have control in one turn; as long as in all of them if unset",
    )
    max_failed_fraction: float = chz.field(
        default=0.1, doc="stop when more of a generation's rollouts are lost"
    )
    trackers: TrackerBuilder = chz.field(
        default_factory=TrackersBuilder,
        blueprint_unspecified=TrackersBuilder,
        doc="where metrics and rollouts go",
    )
    behavior_if_log_dir_exists: Behavior = chz.field(
        default="ask", doc="what to do where log_path already holds a run"
    )

    @chz.validate
    def _run_ranges(self) -> None:
        check_range(self, "attempts", "num_generations", at_least=1)
        check_range(self, "eval_every", at_least=0)
        check_range(self, "max_failed_fraction", at_least=0, at_most=1)
        check_range(self, "rollout_timeout", "turn_timeout", above=0)
        check_evaluation(self.eval_attempts, self.eval_temperature)
        self.engine.check_temperature("sampling.temperature", self.sampling.temperature)
        self.engine.check_temperature("eval_temperature", self.eval_temperature)

    @classmethod
    def whole_options(cls, given: Mapping[str, str]) -> dict[str, str]:
        """Options as a user types them, with others in place of short ones and of a preset."""
        return whole_options(given, cls.presets)

    @property
    @abstractmethod
    def space(self) -> SearchSpaceBuilder:
        """The parameters that the run moves, as an engine names them."""

    def new_optimizer(self, space: SearchSpace, found: Mapping[str, float]) -> Optimizer:
        """What moves the centre of a population.

        Args:
            space: what its genomes perturb.
            found: numbers for its options that are `auto` (`runs.history.format.Header`).

        Raises:
            ConfigError: The run has no population, or an option that is `auto` was not found.
        """
        raise ConfigError("a run of gradients has no genomes, only its centre and its base")

    def centre_of(self, generation: int) -> int:
        """Around which centre the genomes of a generation stand: after so many generations."""
        return generation

    @property
    def num_pairs(self) -> int:
        """Pairs of genomes to which a batch is dealt out; 0: all attempt all of it."""
        return 0

    def evaluates(self, generation: int) -> bool:
        """Whether the centre is evaluated before a generation, or after the last."""
        last = self.num_generations
        return generation == last or generation % (self.eval_every or last) == 0

    def sampling_at(self, generation: int) -> SamplingParams:
        """How a generation samples."""
        del generation
        return self.sampling

    def sampler(
        self,
        engine: Engine,
        log_path: Path | None = None,
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
    ) -> PopulationSampler:
        """Samples as the run does, unless told otherwise.

        Args:
            engine: where.
            log_path: where lost rollouts are logged; nowhere if None.
            sampling: of every generation, for one attempt of each genome; the run's own if None.
            seed: from which sampling seeds are derived; the run's own if None.
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


plugs_in(RunConfig, "runs", "recipes")


@contextlib.asynccontextmanager
async def closing(engine: Engine) -> AsyncGenerator[Engine]:
    """Inside, the engine, which is closed at the end, also if cancelled."""
    try:
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.close()
