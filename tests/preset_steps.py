"""Steps of a preset on one parameter, with rewards that are made up, for tests of its formula."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from es_cookbook import ES, Config
from es_cookbook.common.options import built
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace
from es_cookbook.recipes.countdown.train_cli import CLIConfig

NAME, SHAPE = "0.q.weight", (160, 120)
"""Five runs of a partition."""
START = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def preset(name: str, **more: str) -> Config:
    return built(CLIConfig, {"preset": name, **more})


def rewards_of(generation: int, num_genomes: int, num_problems: int = 5) -> Floats:
    rng = np.random.default_rng(generation)
    return rng.integers(0, 5, size=(num_problems, num_genomes)) / 4


def z(rewards_P_G: Floats) -> Floats:
    scores_G = rewards_P_G.mean(axis=0)
    return (scores_G - scores_G.mean()) / scores_G.std()


class Stepped:
    """A run of a preset on one parameter, with rewards that are made up."""

    def __init__(self, config: Config, num_generations: int = 2, kind: str = "linear") -> None:
        self.space: SearchSpace = config.search_space([ParameterInfo(NAME, SHAPE, kind)])
        optimizer = config.optimizer
        assert isinstance(optimizer, ES)
        self.optimizer = optimizer(run_seed=1, num_generations=num_generations, space=self.space)
        self._fitness = config.fitness
        base = {NAME: torch.zeros(SHAPE)}
        self._centre = Centre(base, self.space, num_threads=1)
        self._centre.weights[NAME].copy_(torch.from_numpy(START))
        self.rewards: list[Floats] = []
        self.noises: list[list[NDArray[np.float64]]] = []
        self.signs: list[list[float]] = []
        self.seeds: list[list[int]] = []

    def step(self, generation: int) -> NDArray[np.float32]:
        """Return the centre after a generation."""
        genomes_G = self.optimizer.ask(generation)
        terms = [genome.terms[0] for genome in genomes_G if genome.terms]
        self.seeds.append([term.seed for term in terms])
        self.signs.append([math.copysign(1, term.coefficient) for term in terms])
        kind = self.space.noise
        made = (noise(term.seed, NAME, SHAPE, kind) for term in terms)
        self.noises.append([each.astype(np.float64) for each in made])
        rewards_P_G = rewards_of(generation, len(genomes_G))
        self.rewards.append(rewards_P_G)
        fitness_G = self._fitness(rewards_P_G)
        self._centre.apply(self.optimizer.tell(generation, genomes_G, None, fitness_G))
        return self._centre.weights[NAME].numpy().copy()


def summed(weights_G: Floats, noises_G: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return sum((w * e for w, e in zip(weights_G, noises_G, strict=True)), np.zeros(SHAPE))


def close(found: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-7)
    assert not np.allclose(found, START, atol=1e-6)
