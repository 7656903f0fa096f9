"""Run Configs one after another in this process; check that runs are complete and comparable.

    runs = {"plain": [config_a0, config_a1], "tuned": [config_b0, config_b1]}
    refuse_unequal_rollouts(runs)
    run_all([config for configs in runs.values() for config in configs])

Compared runs make the same number of rollouts, however each divides them. Complete runs are skipped
and interrupted ones continue, so repeat the same call until all are complete. Read the results from
the run directories (`es_cookbook.runs.tracking.curves`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import chz

from es_cookbook import Config, RLDatasetBuilder, run
from es_cookbook.common.configs import config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.runs.choosing import as_recorded
from es_cookbook.runs.config import MAY_DIFFER, recorded_config
from es_cookbook.runs.directory.directory import Recorded


def run_all(configs: Sequence[Config]) -> None:
    """Run each to its end, in this order; continue recorded runs, skip complete ones.

    Args:
        configs: each with a different log_path; `behavior_if_log_dir_exists` is ignored.

    Raises:
        KeyboardInterrupt: It was stopped; says how to continue.
        ESCookbookError: As `main`.
    """
    paths = [config.log_path for config in configs]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"every run needs its own log_path, found {path} more than once")
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
    """Return whether this run, and no other one with its log_path, was recorded to its end."""
    found = Recorded(Path(config.log_path))
    config = as_recorded(config, found)
    if not found.history.generations == config.num_generations == found.num_measured - 1:
        return False
    try:
        recorded = recorded_config(found.log_path, trust_of(config_to_json(config)))
    except (ConfigError, RunDirectoryError):  # No Config, or one with a script's own classes.
        return False
    here = {name: getattr(config, name) for name in MAY_DIFFER}
    return chz.replace(recorded, **here) == config


def refuse_unequal_rollouts(runs: Mapping[str, Sequence[Config]]) -> None:
    """Refuse to compare runs with different numbers of rollouts.

    Args:
        runs: name -> its runs. Only `problems_per_generation` of their datasets may differ.

    Raises:
        ConfigError: Runs differ in problems or in rollouts.
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
            each = "" if batch_of(first.dataset) else " per problem of a batch"
            raise ConfigError(
                f"compared runs must make the same number of rollouts; {name} makes "
                f"{rollouts_of(config)}{each}, {first_name} {rollouts_of(first)}: change "
                "population_size, num_generations, attempts or problems_per_generation of one"
            )


def _dataset(config: Config, like: Config) -> RLDatasetBuilder:
    """Return the dataset, with the other's number of problems per batch if both have one."""
    count = batch_of(like.dataset)
    if count is None or batch_of(config.dataset) is None:
        return config.dataset
    return chz.replace(config.dataset, problems_per_generation=count)


def batch_of(dataset: RLDatasetBuilder) -> int | None:
    """Return the problems per generation, if the dataset builder has that field."""
    return cast("int | None", getattr(dataset, "problems_per_generation", None))


def rollouts_of(config: Config) -> int:
    """Count the rollouts of all generations.

    The count is per problem of a batch if the size of a batch is not known.
    """
    batch = (batch_of(config.dataset) or 1) // (config.num_pairs or 1) or 1
    optimizer = config.optimizer
    if config.surrogate is not None:  # Only the centre answers.
        num_genomes = config.surrogate.attempts
    else:
        num_genomes = optimizer.population_size + getattr(optimizer, "evaluate_centre", False)
    return num_genomes * config.num_generations * config.attempts * batch
