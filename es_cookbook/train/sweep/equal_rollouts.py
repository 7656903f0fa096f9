"""What is compared makes the same number of rollouts, however each run divides them.

runs = {"plain": [config_a0, config_a1], "tuned": [config_b0, config_b1]}
refuse_unequal_rollouts(runs)
"""

from collections.abc import Mapping, Sequence
from typing import cast

import chz

from es_cookbook import train
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import plural
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.rl.types import RLDatasetBuilder


def refuse_unequal_rollouts(runs: Mapping[str, Sequence[train.Config]]) -> None:
    """What is compared gets the same number of rollouts, however it divides them.

    Args:
        runs: name -> its runs. Their datasets must be the same but for `problems_per_generation`.

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


def _dataset(config: train.Config, like: train.Config) -> RLDatasetBuilder:
    """Its dataset, with another one's number of problems a batch where both say that."""
    count = batch_of(like.dataset)
    if count is None or batch_of(config.dataset) is None:
        return config.dataset
    return chz.replace(config.dataset, problems_per_generation=count)


def batch_of(dataset: RLDatasetBuilder) -> int | None:
    """Problems of a generation, where the dataset builder says that."""
    return cast("int | None", getattr(dataset, "problems_per_generation", None))


def _batch(config: train.Config) -> int | None:
    """Problems that a genome attempts in a generation."""
    found = batch_of(config.dataset)
    return None if found is None else found // (config.num_pairs or 1)


def rollouts_of(config: train.Config) -> int:
    """Of all its generations; for each problem of a batch where the dataset says not how many."""
    return _genomes(config) * config.num_generations * config.attempts * (_batch(config) or 1)


def _genomes(config: train.Config) -> int:
    if config.surrogate is not None:  # Only the centre answers.
        return config.surrogate.attempts
    optimizer = config.optimizer
    with_centre = isinstance(optimizer, ES) and optimizer.evaluate_centre
    return optimizer.population_size + with_centre


def _product(config: train.Config) -> str:
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
