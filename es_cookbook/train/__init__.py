"""Training: the Config of a run, the loop, what it opens and what it records."""

from es_cookbook.train.config import MAY_DIFFER, Config, recorded_config
from es_cookbook.train.loop import main, run

__all__ = ["MAY_DIFFER", "Config", "main", "recorded_config", "run"]
