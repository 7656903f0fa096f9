"""What is checked before anything is loaded: whether a run may begin, or go on, where it is to be.

All of it takes a second or two, however large the model, but for reading the base's weights once
where a recorded run goes on. A mistake that is found later (the optimizer does not do any more what
it did, say) still leaves the directory as it was.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import chz

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.schedules import Schedule
from es_cookbook.common.terminal import command, plural, say
from es_cookbook.runs.directory import HISTORY, failures_told, locked
from es_cookbook.runs.history.store import check_same_base, header_of
from es_cookbook.runs.opening import Standing, standing_of
from es_cookbook.runs.trusted.scripts import trust_option
from es_cookbook.train.config import MAY_DIFFER, Config


@asynccontextmanager
async def begun(config: Config) -> AsyncGenerator[Standing]:
    """Inside, the run directory is this process's alone, and the run may begin or go on there.

    Raises:
        RunDirectoryError: The directory cannot be used, another process writes it, or it holds a
            run that cannot go on with this Config; says what can be done instead.
        HistoryError: Its history is damaged or missing, or began with another base.
        ModelError: The base of a recorded run cannot be read.
        ESCookbookError: What the run needs outside of this process is not there.
    """
    log_path, config_json = Path(config.log_path), config_to_json(config)
    with locked(log_path), failures_told(log_path):
        standing = standing_of(
            log_path,
            config_json,
            config.num_generations,
            config.behavior_if_log_dir_exists,
            MAY_DIFFER,
        )
        if standing.config_json is not None and not standing.is_complete:
            _check_schedules(standing.config_json, standing, config)
            await asyncio.to_thread(_check_base, standing, config)
        if not standing.is_complete:
            await asyncio.to_thread(_check_outside, config)
        yield standing


def _check_outside(config: Config) -> None:
    """Refuse what would fail outside of this process, before a model is loaded."""
    for builder in (config.hub, config.trackers, config.dataset, config.kl, config.preference):
        if builder is not None:
            builder.check()
    model_directory(config.model_name)  # Fetched last, and before an engine imports torch.


def forking(config: Config, generation: int) -> str:
    """The whole command that goes on with this Config where the recorded run cannot."""
    trust = trust_option(Path(config.log_path), config_to_json(config))
    return (
        f"{command('fork')} log_path={config.log_path} generation={generation} "
        f"output={config.log_path}-longer num_generations={config.num_generations}{trust}"
    )


def _check_schedules(recorded_json: str, standing: Standing, config: Config) -> None:
    """Refuse a longer run of which a schedule would have made other steps from the beginning."""
    try:
        recorded = config_from_json(recorded_json, trust_of(config_to_json(config)))
    except ConfigError:  # Of a class that is not here: the steps will show it.
        return
    then, now = getattr(recorded, "num_generations", None), config.num_generations
    if not isinstance(then, int):
        return
    fork = standing.header and standing.header.fork
    own = range(fork.generation if fork else 0, standing.generations)
    for name, schedule in _schedules(config):
        if any(schedule(t, then) != schedule(t, now) for t in own):
            raise RunDirectoryError(
                f"num_generations was {then}, is {now}, and {name}={type(schedule).__name__} "
                f"depends on it: the recorded {plural(len(own), 'generation')} would have come out "
                "otherwise. To go on from the last of them: "
                f"{forking(config, standing.generations)}"
            )


def _schedules(part: object, path: str = "") -> Iterator[tuple[str, Schedule]]:
    for name, field in chz.chz_fields(part).items():
        value = getattr(part, field.x_name)
        if isinstance(value, Schedule):
            yield f"{path}{name}", value
        elif chz.is_chz(value):
            yield from _schedules(value, f"{path}{name}.")


def _check_base(standing: Standing, config: Config) -> None:
    """Refuse another base before it is loaded; its dtype is the engine's to say."""
    then = standing.header
    if then is not None and then.dtype is not None and standing.generations:
        say(f"{config.log_path}: comparing {config.model_name} with the base that it began with")
        now = header_of(config.model_name, then.dtype)
        check_same_base(Path(config.log_path) / HISTORY, then, now)
