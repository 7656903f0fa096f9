"""Runs Configs one after the other in this process; checks that runs are complete and comparable.

    runs = {"plain": [config_a0, config_a1], "tuned": [config_b0, config_b1]}
    refuse_unequal_rollouts(runs)
    run_all([config for configs in runs.values() for config in configs])

Runs that are compared make the same number of rollouts, however each divides them. Complete runs
are skipped and interrupted ones continue, so the same call is repeated until all are complete. The
results are then read from the run directories (`es_cookbook.runs.tracking.curves`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import chz

from es_cookbook.common.configs import config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.rl.types import RLDatasetBuilder
from es_cookbook.runs.config import MAY_DIFFER, Config, recorded_config
from es_cookbook.runs.directory.directory import HISTORY, METRICS
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import run
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import read_metrics


def run_all(configs: Sequence[Config]) -> None:
    """Run each to its end, in this order; continue recorded runs, skip complete ones.

    Args:
        configs: each with a different log_path; `behavior_if_log_dir_exists` does not matter.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
        ESCookbookError: As `main`.
    """
    paths = [config.log_path for config in configs]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"every run needs a log_path of its own, found {path} more than once")
    for number, config in enumerate(configs, start=1):
        complete = is_complete(config)
        done = ", which is complete" if complete else ""
        print(f"run {number} of {len(configs)}: {config.log_path}{done}", flush=True)
        if not complete:
            try:
                run(chz.replace(config, behavior_if_log_dir_exists="resume"))
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"interrupted in run {number} of {len(configs)}; give the same command again "
                    "to go on"
                ) from None


def is_complete(config: Config) -> bool:
    """Whether this run, and not another one in its place, was recorded to its end."""
    log_path = Path(config.log_path)
    rows = read_metrics(log_path / METRICS)
    if not rows or rows[-1].get(GENERATION) != config.num_generations:
        return False
    recorded = sum(1 for _ in read_history(log_path / HISTORY))
    return recorded == config.num_generations and _is_same(config, log_path)


def _is_same(config: Config, log_path: Path) -> bool:
    """Whether the recorded Config equals this one."""
    try:
        recorded = recorded_config(log_path, trust_of(config_to_json(config)))
    except (ConfigError, RunDirectoryError):  # Of a script's own classes, say; or none.
        return False
    here = {name: getattr(config, name) for name in MAY_DIFFER}
    return chz.replace(recorded, **here) == config


def refuse_unequal_rollouts(runs: Mapping[str, Sequence[Config]]) -> None:
    """Refuse to compare runs with different numbers of rollouts.

    Args:
        runs: name -> its runs. Only `problems_per_generation` of their datasets may differ.

    Raises:
        ConfigError: Runs that differ in problems or in rollouts.
    """
    every = [(name, config) for name, configs in runs.items() for config in configs]
    first_name, first = every[0]
    for name, config in every:
        if _dataset(config, first) != first.dataset:
            raise ConfigError(
                f"{name} and {first_name} must have the same dataset to be compared at equal "
                f"rollouts, found {config.dataset} and {first.dataset}"
            )
        if rollouts_of(config) != rollouts_of(first):
            raise ConfigError(
                "what is compared must make the same number of rollouts; "
                f"{name} makes {_product(config)}, {first_name} {_product(first)}: change "
                "population_size, num_generations, attempts or problems_per_generation of one"
            )


def _dataset(config: Config, like: Config) -> RLDatasetBuilder:
    """Its dataset, with the other's number of problems per batch if both have one."""
    count = batch_of(like.dataset)
    if count is None or batch_of(config.dataset) is None:
        return config.dataset
    return chz.replace(config.dataset, problems_per_generation=count)


def batch_of(dataset: RLDatasetBuilder) -> int | None:
    """Problems per generation, if the dataset builder has that field."""
    return cast("int | None", getattr(dataset, "problems_per_generation", None))


def _batch(config: Config) -> int | None:
    """Problems that a genome attempts in a generation, if known."""
    found = batch_of(config.dataset)
    return None if found is None else found // (config.num_pairs or 1)


def rollouts_of(config: Config) -> int:
    """Rollouts of all generations; per problem of a batch if the size of a batch is not known."""
    return _genomes(config) * config.num_generations * config.attempts * (_batch(config) or 1)


def _genomes(config: Config) -> int:
    if config.surrogate is not None:  # Only the centre answers.
        return config.surrogate.attempts
    optimizer = config.optimizer
    with_centre = isinstance(optimizer, ES) and optimizer.evaluate_centre
    return optimizer.population_size + with_centre


def _product(config: Config) -> str:
    problems = (
        f" x {plural(batch, 'problem')}"
        if (batch := _batch(config))
        else " for each problem of a batch"
    )
    answering = "genome" if config.surrogate is None else "centre answer"
    return (
        f"{plural(_genomes(config), answering)} x {plural(config.num_generations, 'generation')} x "
        f"{plural(config.attempts, 'attempt')}{problems} = {rollouts_of(config)}"
    )
