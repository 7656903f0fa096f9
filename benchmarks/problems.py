"""Functions to minimise whose optimum is known, with settings and a start: not a benchmark itself.

The usual four, with their usual domains: the sphere, Rastrigin's (1974), Rosenbrock's (1960) in its
chained form and Ackley's (1987). All are 0 at their optimum, which is all zeros, or all ones for
Rosenbrock's. x_G_N is genomes x dimensions.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from es_cookbook.evolution.spaces.full_rank import FullRankSpace

Points: TypeAlias = NDArray[np.float32]
"""Genomes x dimensions, or one point."""
Values: TypeAlias = NDArray[np.float64]

NAME = "x"
"""Name of the one parameter that is searched."""


def sphere(x_G_N: Points) -> Values:
    return np.einsum("gn,gn->g", x_G_N, x_G_N, dtype=np.float64)


def rastrigin(x_G_N: Points) -> Values:
    terms_G_N = x_G_N**2 - 10 * np.cos(np.float32(2 * math.pi) * x_G_N) + 10
    return terms_G_N.sum(axis=1, dtype=np.float64)


def rosenbrock(x_G_N: Points) -> Values:
    here_G_N, next_G_N = x_G_N[:, :-1], x_G_N[:, 1:]
    terms_G_N = 100 * (next_G_N - here_G_N**2) ** 2 + (1 - here_G_N) ** 2
    return terms_G_N.sum(axis=1, dtype=np.float64)


def ackley(x_G_N: Points) -> Values:
    n = x_G_N.shape[1]
    cosines_G = np.cos(np.float32(2 * math.pi) * x_G_N).sum(axis=1, dtype=np.float64) / n
    return -20 * np.exp(-0.2 * np.sqrt(sphere(x_G_N) / n)) - np.exp(cosines_G) + 20 + math.e


@dataclasses.dataclass(frozen=True)
class Problem:
    """A function in so many dimensions, and settings that both sides share.

    Attributes:
        f: smallest at its optimum, 0.
        reach: every coordinate starts uniformly in -reach ... reach.
        n: dimensions.
        generations: budget, in generations of POPULATION evaluations.
        sigma: sigma of the perturbations; its initial value where the algorithm adapts it.
        learning_rate: learning rate in our units.
    """

    f: Callable[[Points], Values]
    reach: float
    n: int
    generations: int
    sigma: float
    learning_rate: float = 0.0

    @property
    def space(self) -> FullRankSpace:
        return FullRankSpace({NAME: (self.n,)})

    def start(self, seed: int) -> Points:
        uniform = np.random.default_rng((seed, self.n)).uniform(-self.reach, self.reach, self.n)
        return uniform.astype(np.float32)

    def told(self, x_G_N: Points) -> NDArray[np.float32]:
        """Return values with the digits that JAX has, since digits break ties."""
        return self.f(x_G_N).astype(np.float32)

    def at(self, x_N: Points) -> float:
        return float(self.f(x_N[None])[0])
