"""Training: the config of a run, the loop, what it opens and what it writes."""

from es_cookbook.train.loop import MAY_DIFFER, Config, main, recorded_config, run

__all__ = ["MAY_DIFFER", "Config", "main", "recorded_config", "run"]
