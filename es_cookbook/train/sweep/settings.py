"""How a sweep goes about it, whatever it tries."""

from typing import Literal, TypeAlias

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.runs.tracking.jsonl import CORRECT

SamplerName: TypeAlias = Literal["grid", "random", "optuna"]
Prune: TypeAlias = Literal["none", "median", "halving"]


@chz.chz
class SweepSettings:
    """Seeds, sampler, workers and pruning of a sweep."""

    log_path: str = chz.field(default="runs/sweep", doc="directory of all runs")
    seeds: tuple[int, ...] = chz.field(
        default=(0,), doc="of each trial's runs; the table has their mean and spread"
    )
    metric: str = chz.field(
        default=CORRECT, doc="a key of metrics.jsonl; more is better, and its last value counts"
    )
    sampler: SamplerName = chz.field(
        default="grid", doc="all combinations of values, or trials at random or by Optuna's TPE"
    )
    trials: int = chz.field(default=20, doc="random, optuna: how many, each with all seeds")
    sampler_seed: int = chz.field(default=0, doc="random, optuna: of what they draw")
    workers: int = chz.field(
        default=1, doc="runs at a time, each with its share of this machine's cores"
    )
    devices: tuple[str, ...] = chz.field(
        default=(), doc="GPUs that the workers get in turn, as in CUDA_VISIBLE_DEVICES"
    )
    prune: Prune = chz.field(
        default="none",
        doc="stop a run that is below the median of the others, or not among their best third",
    )
    prune_after: int = chz.field(
        default=4, doc="prune: other runs that must have come as far before one is stopped"
    )

    @chz.validate
    def _fields(self) -> None:
        check_range(self, "trials", "workers", "prune_after", at_least=1)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds must be one or more different ones, found {self.seeds}")
        if len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"devices must be different ones, found {self.devices}")
        if not self.metric:
            raise ConfigError("metric must be a key of metrics.jsonl, found none")
