"""The options of a run of GRPO, in addition to those of all runs of gradients."""

from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.schedules import Schedule, schedule_field
from es_cookbook.plugins.gradients.gradient_config import GradientConfig
from es_cookbook.rl.types import SamplingParams

LossType = Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]


@chz.chz
class Config(GradientConfig):
    """Train by GRPO on the problems and rewards of any data set."""

    tokens_per_pass: int | None = chz.field(
        default=None, doc="maximum tokens of a backward pass of whole contexts; 16,384 if unset"
    )
    temperature_schedule: Schedule = schedule_field("factor on sampling.temperature over the run")
    loss_type: LossType = chz.field(default="dapo", doc="how the losses of tokens are summed")
    scale_rewards: Literal["group", "batch", "none"] = chz.field(
        default="group", doc="standard deviation by which rewards minus the group mean are divided"
    )
    epsilon: float = chz.field(default=0.2, doc="a token's ratio is clipped at 1 - epsilon")
    epsilon_high: float | None = chz.field(default=None, doc="and at 1 + this; epsilon if unset")
    beta: float = chz.field(default=0.0, doc="weight of the KL divergence to the initial model")
    importance_sampling_level: Literal["token", "sequence"] = chz.field(
        default="token", doc="ratios of tokens, or of whole answers (GSPO)"
    )
    num_iterations: int = chz.field(default=1, doc="passes over a generation's answers")
    steps: int = chz.field(default=1, doc="optimizer steps per iteration, each on an equal share")

    @chz.validate
    def _grpo_ranges(self) -> None:
        check_range(self, "attempts", at_least=2)
        check_range(self, "num_iterations", "steps", at_least=1)
        check_range(self, "epsilon", "beta", "epsilon_high", at_least=0)
        if not self.sampling.temperature:
            raise ConfigError(
                "sampling.temperature must be above 0, found 0: greedy answers to a problem are "
                "all equal"
            )
        self.check_temperatures(self.temperature_schedule)

    @override
    def sampling_at(self, generation: int) -> SamplingParams:
        return self.sampling.scaled(self.temperature_schedule(generation, self.num_generations))
