"""A run as a program: from the command line, with a line in the end of what it brought.

    if __name__ == "__main__":
        main(Config(...))

makes a script whose Config is what it says there, with every option of it on the command line.
"""

import functools
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.references import refuse_while_imported
from es_cookbook.common.terminal import BEGAN, as_program
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.directory import HISTORY, METRICS
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.loop import train_in_turn, train_overlapping
from es_cookbook.runs.run_config import RunConfig
from es_cookbook.runs.setup import opened, to_go_on
from es_cookbook.runs.signals import advice, advise, result_until_signal
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.runs.tracking.result import Result, elapsed, result_of

_Config = TypeVar("_Config", bound=RunConfig)
_AGAIN = "nothing has changed: run the same command again"
"""What to do before a run has begun."""


async def train(config: Config) -> None:
    """Train, or go on training; a run that is complete is left as it is.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    advise(_AGAIN)
    async with opened(config) as run:
        if run is not None:
            await (train_overlapping if config.max_staleness else train_in_turn)(run)


@as_program()
def run(config: Config) -> Result:
    """Run `train` as a program: Ctrl-C and SIGTERM stop it cleanly, ready to go on.

    Args:
        config: an empty log_path is `runs/<name of the data>-<digest of the options>`.

    Returns:
        Where the run is, and its first and last held-out metrics.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
        ESCookbookError: As `train`.
    """
    refuse_while_imported()
    config = with_log_path(config)
    try:
        result_until_signal(functools.partial(train, config))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(config)) from None
    except ESCookbookError as error:  # The sentence says it all; how it got here says nothing.
        raise error.with_traceback(None) from None
    return result_of(Path(config.log_path))


def _interrupted(config: Config) -> str:
    """When a run was interrupted, and what to do then."""
    if advice() in ("", _AGAIN):
        return f"interrupted before the run began; {_AGAIN}"
    recorded = sum(1 for _ in read_history(Path(config.log_path) / HISTORY))
    when = f"after generation {recorded}" if recorded else "before the first generation ended"
    return f"interrupted {when}; {to_go_on(config)}"


def main(config: Config) -> None:
    """Train with this Config, as the command line changes it; for a script.

    Raises:
        SystemExit: With the exit code, unless all went well.
    """
    run_cli(functools.partial(train_and_tell, began=BEGAN), config)


def train_and_tell(config: Config, name: str = "run", began: float | None = None) -> None:
    """Train, and say in one line what it brought, and how long it took.

    Args:
        config: its log_path is `default_log_path` where it is empty.
        name: of what is trained, in that path.
        began: when the command did, by `time.monotonic`; now if None.
    """
    run_and_tell(run, config, name, time.monotonic() if began is None else began)


def run_and_tell(
    run: Callable[[_Config], Result], config: _Config, name: str, began: float
) -> None:
    """Run, and say in one line what that brought to a run directory since `began`.

    `name` is in that of the directory, where `log_path` is empty.
    """
    config, since = with_log_path(config, name), time.time()
    result = run(config)
    took = elapsed(time.monotonic() - began, read_metrics(result.path / METRICS), since)
    print(f"{result.gain(config.main_metric)} in {took}; everything is in {result.path}")


def with_log_path(config: _Config, name: str = "") -> _Config:
    """With a run directory, where it has none: of this name, or that of its data."""
    if config.log_path:
        return config
    return chz.replace(config, log_path=default_log_path(config, name or config.dataset.label))


def default_log_path(config: RunConfig, name: str) -> str:
    """The same for the same options, so that the same command finds its run again.

    Where and how a run is kept and shown does not count.
    """
    own = {"profile": False} if isinstance(config, Config) else {}
    what = chz.replace(config, log_path="", behavior_if_log_dir_exists="ask", **own)
    plain = json.loads(config_to_json(what))
    plain.pop("trackers", None)
    digest = hashlib.blake2b(json.dumps(plain).encode(), digest_size=4).hexdigest()
    return str(Path("runs") / f"{name}-seed{config.seed}-{digest}")
