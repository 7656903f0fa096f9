"""Optimizers with a memory: momentum, Adam, RMSProp, ClipUp and Muon over a window of gradients.

They keep the gradient estimates of the last generations, g_j = 1/N · Σ fitness · ε, as terms and
never as tensors. A step holds the terms of the whole window, so it depends on nothing but itself
and the centre. It costs the noise of `window` generations, where plain ES's costs that of one.

A moving average v <- m v + (1 - m) g is thus Σ_j (1 - m) m^age g_j over the window, divided by the
sum of its weights. That is Adam's bias correction, and corrects for terms outside the window too.
Without (1 - m) the weights add up to 1 / (1 - m), ten at m = 0.9, so a learning rate
tuned for plain ES becomes ten times as large, its diffusion a hundred times, and the run diverges
(shown in the tests and in docs/optimizers.md).

A generation without signal has an empty gradient; the others in the window still move the centre.
"""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.optimizers.es import ES, ESOptimizer
from es_cookbook.evolution.spaces.base import SearchSpace

Gradient = tuple[Term, ...]


@chz.chz
class WindowedES(ES):
    """ES whose step is a function of the last generations' gradients."""

    window: int = chz.field(
        default=10, doc="generations that are remembered; each costs its noise again in every step"
    )

    _window = in_range("window", at_least=1, at_most=2**31)

    @abstractmethod
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        """Return the step without decay.

        Args:
            gradients: gradients of the window, oldest first; the last is this generation's.
            factor: the schedule's factor on the learning rate.
            kept: numbers kept from step to step, changed in place; none at first.
        """

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> ESOptimizer:
        return _WindowOptimizer(self, run_seed, num_generations, space)


class _WindowOptimizer(ESOptimizer):
    """Remembers gradients, and steps as its config says."""

    def __init__(
        self, config: WindowedES, run_seed: int, num_generations: int, space: SearchSpace
    ) -> None:
        super().__init__(config, run_seed, num_generations, space)
        self._step = config.step
        self._gradients = deque[Gradient](maxlen=config.window)
        self._kept: list[float] = []

    @override
    def move(self, generation: int, genomes_G: Sequence[Genome], fitness_G: Floats) -> Step:
        self._gradients.append(self.gradient(genomes_G, fitness_G, 1.0))
        return self._step(self._gradients, self.rate_factor(generation), self._kept)


def average_weights(decay: float, count: int) -> list[float]:
    """Return weights of a moving average over `count` generations, oldest first; they add up to 1.

    >>> average_weights(0.5, 3)
    [0.14285714285714285, 0.2857142857142857, 0.5714285714285714]
    """
    raw = [decay**age for age in reversed(range(count))]
    return [weight / math.fsum(raw) for weight in raw]


def scaled(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """Return Σ weight · gradient as terms, without zero terms."""
    return tuple(
        Term(term.seed, weight * term.coefficient)
        for gradient, weight in zip(gradients, weights, strict=True)
        for term in gradient
        if weight * term.coefficient
    )


def mean_square(gradient: Gradient) -> float:
    """Return the mean square of a gradient's elements.

    Noise has unit variance, and seeds are independent.
    """
    return math.fsum(term.coefficient**2 for term in gradient)
