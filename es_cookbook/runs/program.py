"""A run as a program: with options on the command line, and one line about its result.

    if __name__ == "__main__":
        main(Config(...))

makes a script whose Config is what it says there, with every option of it on the command line.

A recipe is a task with settings that train, as a Config that has a default for everything:

    @chz.chz
    class CLIConfig(RecipeConfig):
        "Train a model to add numbers with evolution strategies."

        model_name: str = str(Path(__file__).parent / "model")
        dataset: RLDatasetBuilder = built_field(ArithmeticDatasetBuilder)
        optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
        sampling: SamplingParams = built_field(SamplingParams, max_tokens=8)
        num_generations: int = 12


    main, cli = program("arithmetic", CLIConfig)

Registered in the group `es_cookbook.recipes`, it is the command `es-cookbook NAME`, `recipe=NAME`
of other commands, and `dataset=NAME` of a run with another model. The settings of `es` are stated
once; every other optimizer takes from them what it can.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.terminal import BEGAN, as_program
from es_cookbook.common.trust import refuse_while_imported
from es_cookbook.evolution.schedules import Cosine
from es_cookbook.runs.config import Config, RunConfig
from es_cookbook.runs.directory.directory import HISTORY, METRICS, Recorded
from es_cookbook.runs.evolution_run import EvolutionStrategies
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.loop import train_in_turn, train_overlapping
from es_cookbook.runs.setup import opened
from es_cookbook.runs.signals import advice, advise, result_until_signal
from es_cookbook.runs.tracking.jsonl import Result, elapsed, read_metrics, result_of
from es_cookbook.runs.tracking.trackers import TrackersBuilder

_Config = TypeVar("_Config", bound=RunConfig)
_AGAIN = "nothing has changed: run the same command again"
"""Advice if a run has not begun."""
HALF_KNOWN: Mapping[str, object] = {
    "population_size": 256,
    "antithetic": False,
    "sigma": 0.01,
    "learning_rate": 0.04,
    "learning_rate_schedule": Cosine(),
}
"""`es` settings for small models that solve some of the task's problems: no pairs, and a learning
rate of four times sigma.

Picked in trials with sums of digits: more rollouts per generation and a learning rate of four sigma
instead of one or two helped; a sigma of 0.03 did not.
"""
FEWER_GENOMES = {**HALF_KNOWN, "population_size": 128}


async def train(config: Config, recorded: Recorded | None = None) -> None:
    """Train, or go on training; a run that is complete is left as it is.

    Args:
        config: config of the run.
        recorded: contents of the run directory, if the caller has locked it.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    advise(_AGAIN)
    async with opened(EvolutionStrategies(config), recorded) as run:
        if run is not None:
            await (train_overlapping if config.max_staleness else train_in_turn)(run)


@as_program()
def run(config: Config) -> Result:
    """Train with a Config. Ctrl-C and SIGTERM stop the run cleanly; it can be resumed.

    Args:
        config: an empty log_path becomes `runs/<name of the data>-<digest of the options>`.

    Returns:
        The run directory, and the first and last held-out metrics.

    Raises:
        KeyboardInterrupt: The run was stopped; the message says how to continue it.
        ESCookbookError: As `train`.
    """
    refuse_while_imported()
    config = with_log_path(config)
    _train_until_signal(config)
    return result_of(Path(config.log_path))


def _train_until_signal(config: Config, recorded: Recorded | None = None) -> None:
    try:
        result_until_signal(functools.partial(train, config, recorded))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(config)) from None
    except ESCookbookError as error:  # The sentence says it all; how it got here says nothing.
        raise error.with_traceback(None) from None


def _interrupted(config: Config) -> str:
    """Return a message that says when the run was interrupted, with advice."""
    if advice() in ("", _AGAIN):
        return f"interrupted before the run began; {_AGAIN}"
    recorded = sum(1 for _ in read_history(Path(config.log_path) / HISTORY))
    when = f"after generation {recorded}" if recorded else "before the first generation ended"
    return f"interrupted {when}; {advice()}"


def main(config: Config) -> None:
    """Train with a Config that command-line options may override; for scripts.

    Raises:
        SystemExit: The run failed or was stopped; with its exit code.
    """
    run_cli(functools.partial(train_and_tell, began=BEGAN), config)


def train_and_tell(
    config: Config, name: str = "run", began: float | None = None, recorded: Recorded | None = None
) -> None:
    """Train as a command, and print in one line the result and how long it took.

    Args:
        config: an empty log_path is one of this name.
        name: name of what is trained, in that path.
        began: when the command did, by `time.monotonic`; now if None.
        recorded: as for `train`.
    """
    trains = functools.partial(_train_until_signal, recorded=recorded)
    run_and_tell(trains, config, name, time.monotonic() if began is None else began)


def run_and_tell(
    train: Callable[[_Config], object], config: _Config, name: str, began: float
) -> None:
    """Call `train`, and print in one line the result in a run directory since `began`.

    `name` is in that of the directory if `log_path` is empty.
    """
    config, since = with_log_path(config, name), time.time()
    train(config)
    path = Path(config.log_path)
    rows = read_metrics(path / METRICS)
    took = elapsed(time.monotonic() - began, rows, since)
    gain = result_of(path, rows).gain(config.main_metric)
    print(f"{gain} in {took}; everything is in {path}")


def with_log_path(config: _Config, name: str = "") -> _Config:
    """Set a run directory if the config has none: of this name, or that of its data.

    The same options give the same directory, so that the same command finds its run again. Where
    and how a run is kept and shown does not count.
    """
    if config.log_path:
        return config
    own = {"profile": False} if isinstance(config, Config) else {}
    kept = {"behavior_if_log_dir_exists": "ask", "trackers": TrackersBuilder()}
    what = config_to_json(chz.replace(config, **kept, **own))
    digest = hashlib.blake2b(what.encode(), digest_size=4).hexdigest()
    label = name or config.dataset.label
    return chz.replace(config, log_path=f"runs/{label}-seed{config.seed}-{digest}")


@chz.chz
class RecipeConfig(Config):
    """A run of a recipe, whose subclass gives every field that has no default here one.

    A field that is given another default keeps its description.
    """

    log_path: str = chz.field(default="", doc="run directory; empty: runs/<recipe>-<digest>")


def program(
    name: str, config_class: type[Config]
) -> tuple[Callable[[Config], None], Callable[[], None]]:
    """Make the program of a recipe.

    Args:
        name: name of the recipe; names of its run directories begin with it.
        config_class: its Config.

    Returns:
        `main`, which trains and says in one line what that brought, and `cli`, which calls it with
        the options of the command line.
    """
    recipe = functools.partial(train_and_tell, name=name)

    def cli() -> None:
        more_help = f"\nSettings of papers: preset={'|'.join(config_class.presets)}."
        run_cli(functools.partial(recipe, began=BEGAN), config_class, more_help=more_help)

    return recipe, cli
