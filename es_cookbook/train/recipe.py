"""What every recipe's command does around a run: name its directory, train, say what it brought."""

import hashlib
import itertools
import time
from pathlib import Path

import chz

from es_cookbook.common.configs import config_to_json
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.tracking.jsonl import Elapsed, summary, whole_lines
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from es_cookbook.train.config import Config
from es_cookbook.train.loop import run


def run_recipe(name: str, config: Config, began: float | None) -> None:
    """Train, and say in one line what it brought, and how long it took.

    Args:
        name: the recipe's, for the default of `log_path`.
        config: what to train; without a `log_path` it gets the default one.
        began: when the command did, by `time.monotonic`; now if None.
    """
    began = time.monotonic() if began is None else began
    if not config.log_path:
        config = chz.replace(config, log_path=default_log_path(name, config))
    metrics = Path(config.log_path) / METRICS
    before = whole_lines(metrics)
    run(config)
    kept = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(before, whole_lines(metrics), strict=False)
    )
    elapsed = Elapsed(time.monotonic() - began, before=sum(1 for _ in kept))
    print(f"{summary(metrics, elapsed)}; everything is in {config.log_path}")


def default_log_path(name: str, config: Config) -> str:
    """The same for the same options, so that the same command finds its run again.

    Where and how a run is kept and shown does not count.
    """
    what = chz.replace(
        config,
        log_path="",
        trackers=StandardTrackersBuilder(),
        hub=None,
        behavior_if_log_dir_exists="ask",
    )
    digest = hashlib.blake2b(config_to_json(what).encode(), digest_size=4).hexdigest()
    return str(Path("runs") / f"{name}-seed{config.seed}-{digest}")
