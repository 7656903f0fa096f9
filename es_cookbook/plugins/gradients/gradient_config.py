"""The options of a run of gradients, in addition to those of all runs."""

import functools
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook import FullRank, LowRank, RLDatasetBuilder, SamplingParams
from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.schedules import Schedule, schedule_field
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.rl.data.problem_dataset import DATASETS
from es_cookbook.runs.config import RunConfig

_AT_ONE = functools.partial(SamplingParams, temperature=1.0)
MAY_DIFFER = ("log_path", "behavior_if_log_dir_exists", "trackers", "engine", "checkpoint_every")
"""Fields that a resumed run may change: where it is kept, shown and run."""


@chz.chz
class GradientConfig(RunConfig):
    """A run that trains a model by gradients on the problems of a dataset."""

    dataset: RLDatasetBuilder = chz.field(meta_factory=DATASETS, doc="training and test problems")
    log_path: str = chz.field(default="", doc="run directory; empty: runs/<name>-<digest>")
    trained: Literal["all", "linear"] = chz.field(
        default="all", doc="trained weights; linear: those that an ES run changes by default"
    )
    sampling: SamplingParams = chz.field(
        default_factory=_AT_ONE, blueprint_unspecified=_AT_ONE, doc="how tokens are sampled"
    )
    attempts: int = chz.field(default=16, doc="answers to each problem of a batch, the group size")
    learning_rate: float = chz.field(
        default=3e-4, doc="AdamW's learning rate; 3e-4 suits a million weights, 1e-6 a billion"
    )
    learning_rate_schedule: Schedule = schedule_field("factor on learning_rate", default="linear")
    weight_decay: float = chz.field(default=0.0, doc="weight decay of AdamW, towards zero")
    max_gradient_norm: float = chz.field(default=1.0, doc="gradients are clipped to this norm")
    tokens_per_pass: int | None = chz.field(
        default=None, doc="maximum tokens of a backward pass, padded; from the memory if unset"
    )
    products: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto", doc="dtype of matrix products; auto: bfloat16 where that is faster"
    )
    checkpoint_every: int = chz.field(
        default=20, doc="generations between checkpoints; 0: only after the last"
    )

    @chz.validate
    def _gradient_ranges(self) -> None:
        check_range(self, "attempts", "tokens_per_pass", at_least=1)
        check_range(self, "checkpoint_every", "weight_decay", at_least=0)
        check_range(self, "learning_rate", "max_gradient_norm", above=0)
        try:
            self.engine.check_space(self.space)
        except ConfigError as error:
            raise ConfigError(
                f"engine={self.engine.name} cannot take the weights that gradients move; use "
                "engine=torch or engine=vllm"
            ) from error

    @property
    @override
    def space(self) -> SearchSpaceBuilder:
        return FullRank() if self.trained == "all" else LowRank()
