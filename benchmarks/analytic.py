"""Our optimizers against evosax's, on functions whose optimum is known.

    pip install 'es-cookbook[compare]'
    python -m benchmarks.analytic       # all of it
    python -m benchmarks.analytic es    # some of the algorithms; nothing is written

Each optimizer is the real thing: it asks and tells in seeds and coefficients, a `Centre` over one
parameter x of n elements holds and moves the point in exact arithmetic, and a genome's x is
`Centre.perturbed` in the `FullRank` space. Fitness is a real `Fitness` of the reward -f. evosax
(JAX on the CPU, float32) is told the values of the same NumPy functions.

Equal on both sides: the function, the start of each seed, population, sigma, the budget, and

- es beside `Open_ES`: mirrored pairs, centred ranks, plain gradient steps (SGD; Adam is off).
  evosax divides its gradient by sigma and we do not, so its learning rate is ours times sigma.

Cannot be equal: the noise. Each library has its own, so two correct implementations differ by luck,
and in half of all cases ours would need more. Hence two kinds of rows:

- *same noise*: evosax's own `tell` is given the population that our noise makes around its own
  mean. Then luck is the same, and ours must need no more evaluations (median of 10 seeds);
- *own noise*: ratio of the medians of 10 seeds. Above the goal only where luck does not explain it:
  where the 90 % bootstrap interval of the ratio lies wholly above 1.

Targets come from evosax alone: the median over seeds of its curve (own noise) goes from f at the
start to some lowest value, and the targets are a half and nine tenths of that way in log f. A run
that does not reach one counts as having needed twice the budget. What is watched is f at the centre
and at evosax's mean after each generation; looking costs neither side an evaluation.

Left out, for time: all functions but the sphere in more than 1e4 dimensions, and more than the
first few steps there, since a population of 64 needs hours to go far.
"""

import dataclasses
import functools
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import Row, report, table
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.fitness import CentredRank, Fitness
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    from evosax.algorithms.distribution_based.base import DistributionBasedAlgorithm, Params

Points: TypeAlias = NDArray[np.float32]
"""Genomes x dimensions."""
Values: TypeAlias = NDArray[np.float64]
Curve: TypeAlias = NDArray[np.float64]
"""What is watched, before the first generation and after each."""

SEEDS = range(10)
POPULATION = 64
NAME = "x"
WAYS = {"half": 0.5, "nine tenths": 0.9}


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
        generations: of POPULATION evaluations each: the budget.
        sigma: of the perturbations; of the first ones where the algorithm adapts it.
        learning_rate: in our units.
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
        """The values as both sides are told them: JAX has no more digits, and digits break ties."""
        return self.f(x_G_N).astype(np.float32)

    def at(self, x_N: Points) -> float:
        return float(self.f(x_N[None])[0])


def ours(builder: OptimizerBuilder, fitness: Fitness, problem: Problem, seed: int) -> Curve:
    """An optimizer of this package."""
    space = problem.space
    optimizer = builder(run_seed=seed, num_generations=problem.generations, space=space)
    centre = Centre({NAME: torch.from_numpy(problem.start(seed))}, space, num_threads=1)
    watched = [problem.at(centre.weights[NAME].numpy())]
    x_G_N = np.empty((builder.population_size, problem.n), np.float32)
    for generation in range(problem.generations):
        genomes_G = optimizer.ask(generation)
        for x_N, genome in zip(x_G_N, genomes_G, strict=True):
            x_N[:] = centre.perturbed(genome, NAME).numpy()
        fitness_G = fitness(-problem.told(x_G_N).astype(np.float64)[None])
        centre.apply(optimizer.tell(generation, genomes_G, fitness_G))
        watched.append(problem.at(centre.weights[NAME].numpy()))
    return np.array(watched)


MakeNoise: TypeAlias = Callable[[int], Points]
"""Generation -> standard-normal noise of each member, which takes the place of evosax's own."""


def theirs(
    algorithm: "DistributionBasedAlgorithm",
    params: "Params",
    problem: Problem,
    seed: int,
    given_noise: MakeNoise | None = None,
) -> Curve:
    """One of evosax's algorithms with a mean.

    Args:
        algorithm: of evosax.
        params: its own.
        problem: the function.
        seed: of the start, and of its noise unless that is given.
        given_noise: makes its population, if given.
    """
    import jax
    import jax.numpy as jnp

    key = jax.random.key(seed)
    state = algorithm.init(key, jnp.asarray(problem.start(seed)), params)
    watched = [problem.at(np.asarray(state.mean))]
    for generation in range(problem.generations):
        key, asking, telling = jax.random.split(key, 3)
        if given_noise is None:
            x_G_N, state = algorithm.ask(asking, state, params)
        else:
            x_G_N = state.mean + state.std * jnp.asarray(given_noise(generation))
        loss_G = jnp.asarray(problem.told(np.asarray(x_G_N)))
        state, _ = algorithm.tell(telling, x_G_N, loss_G, state, params)
        watched.append(problem.at(np.asarray(state.mean)))
    return np.array(watched)


@dataclasses.dataclass(frozen=True)
class Contest:
    """One algorithm of both sides, at equal settings.

    Attributes:
        problems: name -> where they meet.
        ours: our run of a seed.
        theirs: evosax's.
        same_noise: evosax's with our noise, or None where its noise cannot be given.
    """

    problems: Mapping[str, Problem]
    ours: Callable[[Problem, int], Curve]
    theirs: Callable[[Problem, int], Curve]
    same_noise: Callable[[Problem, int], Curve] | None = None


def es(problem: Problem) -> ES:
    return ES(population_size=POPULATION, sigma=problem.sigma, learning_rate=problem.learning_rate)


def es_noise(problem: Problem, seed: int) -> MakeNoise:
    """The standard-normal noise of our genomes, which no fitness changes."""
    optimizer = es(problem)(run_seed=seed, num_generations=problem.generations, space=problem.space)

    def of_genome(genome: Genome) -> Points:
        (term,) = genome.terms
        sign = np.float32(math.copysign(1, term.coefficient))
        return sign * noise(term.seed, NAME, (problem.n,))

    return lambda generation: np.stack([of_genome(g) for g in optimizer.ask(generation)])


@functools.cache  # Compiled once.
def open_es_algorithm(problem: Problem) -> "DistributionBasedAlgorithm":
    import jax.numpy as jnp
    import optax
    from evosax.algorithms import Open_ES

    return Open_ES(
        population_size=POPULATION,
        solution=jnp.zeros(problem.n),
        optimizer=optax.sgd(problem.learning_rate * problem.sigma),
        std_schedule=optax.constant_schedule(problem.sigma),
    )


def open_es(problem: Problem, seed: int, same_noise: bool = False) -> Curve:
    algorithm = open_es_algorithm(problem)
    given_noise = es_noise(problem, seed) if same_noise else None
    return theirs(algorithm, algorithm.default_params, problem, seed, given_noise)


CONTESTS = {
    "es": Contest(
        {
            "sphere, 1e2": Problem(sphere, 2.56, 100, 150, 0.1, 0.5),
            "Rastrigin, 1e2": Problem(rastrigin, 2.56, 100, 200, 1.0, 0.7),
            "Rosenbrock, 1e2": Problem(rosenbrock, 2.048, 100, 200, 0.1, 0.3),
            "Ackley, 1e2": Problem(ackley, 16.4, 100, 200, 1.0, 2.0),
            "sphere, 1e4": Problem(sphere, 2.56, 10_000, 100, 0.1, 1.0),
            "Rastrigin, 1e4": Problem(rastrigin, 2.56, 10_000, 100, 1.0, 0.5),
            "Rosenbrock, 1e4": Problem(rosenbrock, 2.048, 10_000, 100, 0.1, 1.0),
            "Ackley, 1e4": Problem(ackley, 16.4, 10_000, 100, 1.0, 5.0),
            "sphere, 1e6": Problem(sphere, 2.56, 1_000_000, 5, 0.1, 0.1),
        },
        ours=lambda problem, seed: ours(es(problem), CentredRank(), problem, seed),
        theirs=open_es,
        same_noise=functools.partial(open_es, same_noise=True),
    ),
}
"""To add an algorithm: a line here, and what is equal in the header."""


def reached(curve: Curve, target: float, problem: Problem) -> float:
    """Evaluations until the watched value is at or below the target; twice the budget if never."""
    below = np.flatnonzero(curve <= target)
    generations = int(below[0]) if len(below) else 2 * problem.generations
    return float(generations * POPULATION)


def targets(curves: Sequence[Curve]) -> dict[str, float]:
    """Half and nine tenths of the way of the median curve, in log f."""
    median = np.median(curves, axis=0)
    way = math.log(median.min() / median[0])
    return {name: float(median[0] * math.exp(share * way)) for name, share in WAYS.items()}


def ratio_row(name: str, above: Sequence[float], below: Sequence[float]) -> Row:
    """Ratio of the medians, met unless its 90 % bootstrap interval lies wholly above 1."""
    chooser = np.random.default_rng(0)
    picks = (chooser.choice(values, (2000, len(values))) for values in (above, below))
    medians = [np.median(picked, axis=1) for picked in picks]
    low, quarter, three_quarters = np.quantile(medians[0] / medians[1], (0.05, 0.25, 0.75))
    value = statistics.median(above) / statistics.median(below)
    met = bool(min(low, value) <= 1)
    return Row(name, value, "x", "<= 1, luck apart", met, len(above), three_quarters - quarter)


def same_row(name: str, above: Sequence[float], below: Sequence[float]) -> Row:
    """Ratio of the medians, where luck is the same on both sides."""
    value = statistics.median(above) / statistics.median(below)
    return Row(name, value, "x", "<= 1", value <= 1, len(above), 0.0)


def contest_rows(name: str, contest: Contest) -> list[Row]:
    rows: list[Row] = []
    for what, problem in contest.problems.items():
        curves: dict[str, list[Curve]] = {"ours": [], "theirs": [], "same": []}
        for seed in SEEDS:  # By turns, so that neither has the machine's better minutes.
            curves["ours"].append(contest.ours(problem, seed))
            curves["theirs"].append(contest.theirs(problem, seed))
            if contest.same_noise is not None:
                curves["same"].append(contest.same_noise(problem, seed))
        of_problem: list[Row] = []
        for way, target in targets(curves["theirs"]).items():
            needed = {
                side: [reached(curve, target, problem) for curve in of_side]
                for side, of_side in curves.items()
            }
            evaluations = statistics.median(needed["theirs"])
            title = f"{name}, {what}: {way} of the way (f = {target:.4g}"
            title += f", evosax {evaluations:.0f} evaluations)"
            of_problem.append(ratio_row(f"{title}, own noise", needed["ours"], needed["theirs"]))
            if contest.same_noise is not None:
                of_problem.append(same_row(f"{title}, same noise", needed["ours"], needed["same"]))
        print(table(of_problem), flush=True)
        rows += of_problem
    return rows


def main(chosen: Sequence[str]) -> None:
    """Measure and report; a part is only printed."""
    if importlib.util.find_spec("evosax") is None:
        sys.exit("benchmarks.analytic needs evosax: pip install 'es-cookbook[compare]'")
    rows = {name: contest_rows(name, CONTESTS[name]) for name in chosen or CONTESTS}
    if not chosen:
        report("analytic", [row for of_contest in rows.values() for row in of_contest])


if __name__ == "__main__":
    main(sys.argv[1:])
