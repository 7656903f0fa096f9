"""What runs of gradients have in common with those of evolution strategies, and with each other.

The names are those of `es_cookbook.train.Config`: data set, engine, sampling and evaluation are the
same parts, so that two runs differ by what moves the model and by nothing else.
"""

import functools
from typing import Literal

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.fields.parts import parts
from es_cookbook.common.schedules import SCHEDULE_NAMES, Linear, Schedule
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.hub.checkpoint_push import CheckpointPush
from es_cookbook.runs.opening import Behavior
from es_cookbook.runs.tracking.base import TrackerBuilder
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder

_ENGINES = Names(ENGINE_NAMES, default="torch")
_AT_ONE = functools.partial(SamplingParams, temperature=1.0)
MAY_DIFFER = (
    *("log_path", "behavior_if_log_dir_exists", "trackers", "hub"),
    *("engine", "checkpoint_every"),
)
"""What a resumed run may change: where it is kept, shown and run."""


@chz.chz
class GradientConfig:
    """A run that moves a model by gradients on the problems of a data set."""

    model_name: str = chz.field(doc="Hugging Face model directory or Hub name")
    dataset: RLDatasetBuilder = chz.field(doc="problems to train on, and held-out ones")
    log_path: str = chz.field(doc="run directory")
    engine: EngineBuilder = chz.field(
        meta_factory=_ENGINES, default_factory=_ENGINES.build_default, doc="what samples"
    )
    trained: Literal["all", "linear"] = chz.field(
        default="all", doc="which weights; linear: those that an ES run moves by default"
    )
    sampling: SamplingParams = chz.field(
        default_factory=_AT_ONE, blueprint_unspecified=_AT_ONE, doc="how tokens are drawn"
    )
    num_generations: int = chz.field(default=100, doc="batches of the whole run")
    learning_rate: float = chz.field(
        default=3e-4, doc="of AdamW; 3e-4 suits models of a million weights, 1e-6 of a billion"
    )
    learning_rate_schedule: Schedule = chz.field(
        default=Linear(),
        meta_factory=Names(SCHEDULE_NAMES, default="linear"),
        doc="factor on learning_rate over the run",
    )
    weight_decay: float = chz.field(default=0.0, doc="of AdamW, towards zero")
    max_gradient_norm: float = chz.field(default=1.0, doc="longer gradients are cut to this length")
    tokens_per_pass: int = chz.field(
        default=16_384, doc="most tokens, padding included, of one backward pass; bounds memory"
    )
    eval_every: int = chz.field(
        default=20,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    eval_attempts: int = chz.field(
        default=1, doc="held-out: attempts at each problem; several also measure test/pass@k"
    )
    eval_temperature: float = chz.field(default=0.0, doc="held-out: temperature; 0 is greedy")
    checkpoint_every: int = chz.field(
        default=20,
        doc="generations between checkpoints, from which a run is resumed; 0: after the last only",
    )
    seed: int = chz.field(default=0, doc="everything random derives from it")
    rollout_timeout: float = chz.field(
        default=600.0, doc="seconds for which one rollout's Env may have control"
    )
    turn_timeout: float | None = chz.field(
        default=None, doc="seconds for which it may have control in one turn; all if unset"
    )
    max_failed_fraction: float = chz.field(
        default=0.1, doc="stop when more of a generation's rollouts are lost"
    )
    trackers: TrackerBuilder = chz.field(
        default_factory=StandardTrackersBuilder,
        blueprint_unspecified=StandardTrackersBuilder,
        doc="where metrics and rollouts go",
    )
    hub: CheckpointPush | None = chz.field(
        default=None, doc="pushes checkpoints to the Hugging Face Hub: hub.repo_id=..."
    )
    behavior_if_log_dir_exists: Behavior = chz.field(
        default="ask", doc="what to do where log_path already holds a run"
    )

    @chz.validate
    def _gradient_ranges(self) -> None:
        check_range(self, "num_generations", "tokens_per_pass", at_least=1)
        check_range(self, "eval_every", "checkpoint_every", "weight_decay", at_least=0)
        check_range(self, "learning_rate", "max_gradient_norm", above=0)
        check_range(self, "max_failed_fraction", at_least=0, at_most=1)
        check_range(self, "rollout_timeout", "turn_timeout", above=0)
        check_evaluation(self.eval_attempts, self.eval_temperature)

    def sampling_at(self, generation: int) -> SamplingParams:
        """How a generation samples."""
        del generation
        return self.sampling

    @property
    def search_space(self) -> SearchSpaceBuilder:
        """The trained weights, as an engine names them."""
        return FullRank() if self.trained == "all" else LowRank()


parts(
    GradientConfig,
    "es_cookbook.baselines.grpo.config:Config",
    "es_cookbook.baselines.policy_gradient:Config",
    "es_cookbook.commands.gradients.grpo:GRPOCommand",
    "es_cookbook.commands.gradients.policy_gradient:PolicyGradientConfig",
)
