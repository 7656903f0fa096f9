"""Why momentum must be an average: the sum v <- m v + g diverges where plain es and momentum climb.

    python -m benchmarks.momentum_divergence

The steps of the sum add up to alpha / (1 - m) times a steady gradient, ten times alpha at m = 0.9;
the noise of the gradient estimate goes the same way, so the diffusion of the centre is a hundred
times plain es's, and where the two balance is ten times as far from the optimum.

A sphere in 1,000 dimensions, f = -|x|², z-scored fitness, 64 genomes, 300 generations, five seeds.
alpha is the one of a small grid with which plain es ends nearest to the optimum, and all three have
it. Where they hover in the end momentum's noise is es's, so its goal leaves 5 % to luck. "es" and
"momentum" are this package's; the sum exists in this script alone. Drawn to
`docs/plots/momentum_divergence`, distance from the optimum in units of the start's.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import report, row
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.fitness import ZScore
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.optimizers.momentum import Momentum
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.plugins.report.plots import Line, draw

PLOT = Path(__file__).parents[1] / "docs/plots/momentum_divergence"
NAME, DIMENSIONS, GENOMES, GENERATIONS = "x", 1000, 64, 300
SEEDS = range(5)
SIGMA, MOMENTUM = 0.01, 0.9
LEARNING_RATES = (0.1, 0.2, 0.4, 0.8)
REMEMBERED = 90
"""Generations that the sum holds: what is older counts less than 0.9 ** 90 = 0.00008."""

Change = Callable[[Step], Step]


def distances(builder: OptimizerBuilder, seed: int, change: Change) -> NDArray[np.float64]:
    """Return distances from the optimum at first and after each generation, over the first."""
    space = FullRankSpace({NAME: (DIMENSIONS,)})
    optimizer = builder(run_seed=seed, num_generations=GENERATIONS, space=space)
    centre = Centre({NAME: torch.ones(DIMENSIONS)}, space, num_threads=1)
    x = centre.weights[NAME].numpy()
    found = [float(np.linalg.norm(x))]
    for generation in range(GENERATIONS):
        genomes_G = optimizer.ask(generation)
        points_G = (centre.perturbed(genome, NAME).double() for genome in genomes_G)
        fitness_G = ZScore()(np.array([[-float(point @ point) for point in points_G]]))
        centre.apply(change(optimizer.tell(generation, genomes_G, None, fitness_G)))
        found.append(float(np.linalg.norm(x)))
    return np.array(found) / found[0]


def summed() -> Change:
    """Return the steps of plain es, alpha · g, as v <- m v + alpha · g."""
    steps = deque[Step](maxlen=REMEMBERED)

    def change(step: Step) -> Step:
        steps.append(step)
        ages = reversed(range(len(steps)))
        return Step(
            tuple(
                Term(term.seed, MOMENTUM**age * term.coefficient)
                for age, old in zip(ages, steps, strict=True)
                for term in old.terms
            )
        )

    return change


def as_it_is() -> Change:
    return lambda step: step


def curves(builder: OptimizerBuilder, make_change: Callable[[], Change]) -> NDArray[np.float64]:
    """Return curves of seeds x generations."""
    return np.array([distances(builder, seed, make_change()) for seed in SEEDS])


def main() -> None:
    """Run the three, draw them, and report how far each ends from the optimum."""
    settings = {"population_size": GENOMES, "sigma": SIGMA}
    plain = {rate: curves(ES(**settings, learning_rate=rate), as_it_is) for rate in LEARNING_RATES}
    rate = min(plain, key=lambda rate: plain[rate][:, -1].mean())
    found = {
        "es": plain[rate],
        "momentum 0.9, an average": curves(
            Momentum(**settings, learning_rate=rate, momentum=MOMENTUM), as_it_is
        ),
        "momentum 0.9, a sum: v ← m v + g": curves(ES(**settings, learning_rate=rate), summed),
    }
    generations = np.arange(GENERATIONS + 1)
    draw(
        PLOT,
        {name: Line(generations, curve) for name, curve in found.items()},
        title=f"Sphere in {DIMENSIONS:,} dimensions, the same α = {rate:g} for all",
        x_label=f"generations of {GENOMES} genomes",
        y_label="distance from the optimum (1: the start)",
        log_y=True,
    )
    es, average, added = (curve[:, -1] for curve in found.values())
    ends = "distance at the end"
    report(
        "momentum_divergence",
        [
            row("es's best learning rate", [rate], ""),
            row(f"es: {ends}", es.tolist(), "of the start's"),
            row(f"momentum, an average: {ends} / es's", (average / es).tolist(), "x", at_most=1.05),
            row(f"momentum, a sum: {ends} / es's", (added / es).tolist(), "x"),
            row(
                "momentum, a sum: largest distance",
                found["momentum 0.9, a sum: v ← m v + g"].max(axis=1).tolist(),
                "of the start's",
            ),
        ],
    )


if __name__ == "__main__":
    main()
