"""Training: the Config of a run, the loop, what it opens and what it records."""

from es_cookbook.evolution.optimizers.base import OptimizerNames
from es_cookbook.runs.tracking.result import Result
from es_cookbook.train.config import MAY_DIFFER, Config, recorded_config
from es_cookbook.train.program import cli, main, run, train_and_tell
from es_cookbook.train.recorded import RecordedRun, open_run, rebuild
from es_cookbook.train.signals import result_until_signal

__all__ = [
    "MAY_DIFFER",
    "Config",
    "OptimizerNames",
    "RecordedRun",
    "Result",
    "cli",
    "main",
    "open_run",
    "rebuild",
    "recorded_config",
    "result_until_signal",
    "run",
    "train_and_tell",
]
