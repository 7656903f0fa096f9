"""Steps of a promised length, whatever the spread of the fitness.

A learning rate that was found is for fitness of unit variance, which z-scores have. Ranks have a
standard deviation of 0.29, less where many tie, and rewards whatever the task gives them. So the
optimizer is told fitness in units of its RMS over the run so far:

    f / r_t,   r_t² = mean over generations up to t, those without a signal left out, of mean f²

Generations keep their weight among each other: one of which the fitness says little makes a smaller
step. r follows from the recorded fitness, so a resumed run makes the same steps.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import override

from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.base import Optimizer, check_fitness


class UnitSpread(Optimizer):
    """An optimizer that is told fitness in units of its RMS so far."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.records_scores = optimizer.records_scores
        self._rms_T: list[float] = []
        """RMS of the fitness of each generation that had a signal."""

    @property
    def rms(self) -> float:
        """Of the fitness so far; 1 before there was any."""
        return _rms(self._rms_T) if self._rms_T else 1.0

    @property
    @override
    def asks_ahead(self) -> bool:
        return self._optimizer.asks_ahead

    @property
    @override
    def max_terms(self) -> int:
        return self._optimizer.max_terms

    @override
    def ask(self, generation: int) -> list[Genome]:
        return self._optimizer.ask(generation)

    @override
    def tell(
        self,
        generation: int,
        genomes_G: Sequence[Genome],
        scores_P_G: Floats | None,
        fitness_G: Floats,
    ) -> Step:
        check_fitness(fitness_G)
        present = fitness_G[~np.isnan(fitness_G)]
        if present.any():
            self._rms_T.append(_rms(present.tolist()))
        return self._optimizer.tell(generation, genomes_G, scores_P_G, fitness_G / self.rms)

    @override
    def sigma(self, generation: int) -> float:
        return self._optimizer.sigma(generation)

    @override
    def learning_rate(self, generation: int) -> float | None:
        """By which the fitness as it is would be multiplied."""
        rate = self._optimizer.learning_rate(generation)
        return None if rate is None else rate / self.rms

    @override
    def begin_after(self, steps: Sequence[Step]) -> None:
        self._optimizer.begin_after(steps)

    @override
    def metrics(self) -> Mapping[str, float]:
        return {**self._optimizer.metrics(), "fitness/rms": self.rms}


def _rms(values: Sequence[float]) -> float:
    # Exactly rounded, and without squares that overflow.
    return math.hypot(*values) / math.sqrt(len(values))
