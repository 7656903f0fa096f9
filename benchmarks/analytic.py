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
  evosax divides its gradient by sigma and we do not, so its learning rate is ours times sigma;
- sep_cma beside `Sep_CMA_ES`: the first sigma. The constants that follow from population and
  dimension are each library's own: `cmaes`, which ours drives, learns its diagonal (n + 2) / 3
  times as fast, as Ros and Hansen say; evosax has full CMA-ES's rates;
- genetic beside `SimpleGA`: all parents in the better half equally likely, no elites, no crossover,
  sigma. So ours runs with tournament_size=1, truncation=0.5, num_elites=0, and max_terms out of the
  way, although it does better with its defaults.

Cannot be equal: the noise. Each library has its own, so two correct implementations differ by luck,
and in half of all cases ours would need more. Hence two kinds of rows:

- *same noise*: evosax's own `tell` is given the population that our noise makes around its own
  mean. Then luck is the same on both sides, and a seed is drawn for both when luck is asked about;
- *own noise*: a seed is another luck on each side.

Each row is the ratio of the medians of 10 seeds, ours to evosax's, above its goal of 1 only where
luck does not explain it: where the 90 % bootstrap interval of the ratio lies wholly above 1. Luck
is left in *same noise* too where ranks hang by roundings: on the plateau of Ackley in 1e4
dimensions the curves agree to 1e-8 for some ten generations, then a near-tie falls the other way.

Targets come from evosax alone: the median over seeds of its curve (own noise), each in units of f
at its own start, goes from 1 to some lowest value in the first three quarters of the budget, and
the targets are a half and nine tenths of that way in log f. The last quarter is for those who are
late; a run that still does not reach a target counts as having needed twice the budget. What is
watched is f at the centre and at evosax's mean after each generation, which costs neither side an
evaluation; for genetic, the best of all genomes so far.

Left out, for time: all functions but the sphere in more than 1e4 dimensions (1e3 for genetic), and
more than the first few steps in 1e6, since a population of 64 needs hours to go far; and Rastrigin
in 1e4 for sep_cma, whose first sixty generations are lost in its ripples.
"""

import dataclasses
import functools
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import Row, report, table
from benchmarks.problems import NAME, Points, Problem, ackley, rastrigin, rosenbrock, sphere
from es_cookbook.common.trust import resolve
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.fitness import CentredRank, Fitness
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.evolution.optimizers.es import ES

if TYPE_CHECKING:
    from evosax.algorithms.distribution_based.base import DistributionBasedAlgorithm, Params
    from evosax.algorithms.population_based.base import PopulationBasedAlgorithm

Curve: TypeAlias = NDArray[np.float64]
"""The watched value before the first generation and after each."""

SEEDS = range(10)
POPULATION = 64
WAYS = {"half": 0.5, "nine tenths": 0.9}
WATCHED = 0.75


def ours(
    builder: OptimizerBuilder, fitness: Fitness, problem: Problem, seed: int, best: bool = False
) -> Curve:
    """Return the curve of an optimizer of this package.

    Args:
        builder: settings of the optimizer.
        fitness: turns rewards into fitness.
        problem: the function.
        seed: seed of the start and of the run.
        best: watch the best genome so far, in place of the centre.
    """
    space = problem.space
    optimizer = builder(run_seed=seed, num_generations=problem.generations, space=space)
    centre = Centre({NAME: torch.from_numpy(problem.start(seed))}, space, num_threads=1)
    watched = [problem.at(centre.weights[NAME].numpy())]
    x_G_N = np.empty((builder.population_size, problem.n), np.float32)
    for generation in range(problem.generations):
        genomes_G = optimizer.ask(generation)
        for x_N, genome in zip(x_G_N, genomes_G, strict=True):
            x_N[:] = centre.perturbed(genome, NAME).numpy()
        values_G = problem.told(x_G_N).astype(np.float64)
        fitness_G = fitness(-values_G[None])
        centre.apply(optimizer.tell(generation, genomes_G, None, fitness_G))
        at_centre = problem.at(centre.weights[NAME].numpy())
        watched.append(min(watched[-1], float(values_G.min())) if best else at_centre)
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
    """Return the curve of one of evosax's algorithms with a mean.

    Args:
        algorithm: algorithm of evosax.
        params: the algorithm's parameters.
        problem: the function.
        seed: seed of the start, and of its noise unless that is given.
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
    """Return the standard-normal noise of our genomes, which does not depend on fitness."""
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


def named(name: str, **settings: float) -> OptimizerBuilder:
    """Return an optimizer with the population of all contests."""
    made = resolve(OPTIMIZER_NAMES[name])(population_size=POPULATION, **settings)
    return cast(OptimizerBuilder, made)


def sep_cma(problem: Problem, seed: int) -> Curve:
    return ours(named("sep_cma", sigma=problem.sigma), CentredRank(), problem, seed)


@functools.cache
def sep_cma_es_algorithm(num_dimensions: int) -> "DistributionBasedAlgorithm":
    import jax.numpy as jnp
    from evosax.algorithms import Sep_CMA_ES

    return Sep_CMA_ES(population_size=POPULATION, solution=jnp.zeros(num_dimensions))


def sep_cma_es(problem: Problem, seed: int) -> Curve:
    import jax.numpy as jnp

    algorithm = sep_cma_es_algorithm(problem.n)
    params = algorithm.default_params.replace(std_init=jnp.asarray(problem.sigma))
    return theirs(algorithm, params, problem, seed)


def genetic(problem: Problem, seed: int) -> Curve:
    builder = named(
        "genetic",
        sigma=problem.sigma,
        truncation=0.5,
        tournament_size=1,
        num_elites=0,
        crossover_rate=0.0,
        max_terms=10**6,
    )
    return ours(builder, CentredRank(), problem, seed, best=True)


@functools.cache
def simple_ga_algorithm(num_dimensions: int, sigma: float) -> "PopulationBasedAlgorithm":
    import jax.numpy as jnp
    import optax
    from evosax.algorithms import SimpleGA

    return SimpleGA(
        population_size=POPULATION,
        solution=jnp.zeros(num_dimensions),
        std_schedule=optax.constant_schedule(sigma),
    )


def simple_ga(problem: Problem, seed: int) -> Curve:
    import jax
    import jax.numpy as jnp

    algorithm = simple_ga_algorithm(problem.n, problem.sigma)
    params = algorithm.default_params
    key = jax.random.key(seed)
    starts_G_N = jnp.tile(jnp.asarray(problem.start(seed)), (POPULATION, 1))
    watched = [problem.at(problem.start(seed))]
    state = algorithm.init(key, starts_G_N, jnp.full(POPULATION, watched[0]), params)
    for _ in range(problem.generations):
        key, asking, telling = jax.random.split(key, 3)
        x_G_N, state = algorithm.ask(asking, state, params)
        loss_G = problem.told(np.asarray(x_G_N))
        state, _ = algorithm.tell(telling, x_G_N, jnp.asarray(loss_G), state, params)
        watched.append(min(watched[-1], float(loss_G.min())))
    return np.array(watched)


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
    "sep_cma": Contest(
        {
            "sphere, 1e2": Problem(sphere, 2.56, 100, 200, 1.0),
            "Rastrigin, 1e2": Problem(rastrigin, 2.56, 100, 200, 2.0),
            "Rosenbrock, 1e2": Problem(rosenbrock, 2.048, 100, 200, 0.5),
            "Ackley, 1e2": Problem(ackley, 16.4, 100, 200, 5.0),
            "Rastrigin, 1e3": Problem(rastrigin, 2.56, 1000, 100, 1.0),
            "sphere, 1e4": Problem(sphere, 2.56, 10_000, 60, 0.2),
            "Rosenbrock, 1e4": Problem(rosenbrock, 2.048, 10_000, 60, 0.1),
            "Ackley, 1e4": Problem(ackley, 16.4, 10_000, 60, 1.0),
        },
        ours=sep_cma,
        theirs=sep_cma_es,
    ),
    "genetic": Contest(
        {
            "sphere, 1e2": Problem(sphere, 2.56, 100, 80, 0.1),
            "Rastrigin, 1e2": Problem(rastrigin, 2.56, 100, 80, 0.1),
            "Rosenbrock, 1e2": Problem(rosenbrock, 2.048, 100, 80, 0.05),
            "Ackley, 1e2": Problem(ackley, 16.4, 100, 80, 0.5),
            "sphere, 1e3": Problem(sphere, 2.56, 1000, 40, 0.05),
            "Ackley, 1e3": Problem(ackley, 16.4, 1000, 40, 0.2),
        },
        ours=genetic,
        theirs=simple_ga,
    ),
}
"""To add an algorithm: a line here, and what is equal in the header."""


def from_start(curve: Curve) -> Curve:
    """Return a curve divided by its first value, since starts differ by more than runs do."""
    return curve / curve[0]


def reached(curve: Curve, target: float, problem: Problem) -> float:
    """Return evaluations until the watched value reaches the target; twice the budget if never."""
    below = np.flatnonzero(curve <= target)
    generations = int(below[0]) if len(below) else 2 * problem.generations
    return float(generations * POPULATION)


def targets(curves: Sequence[Curve]) -> dict[str, float]:
    """Return half and nine tenths of the way of the median curve in `WATCHED` of the budget."""
    median = np.median(curves, axis=0)
    median = median[: math.ceil(WATCHED * len(median))]
    way = math.log(median.min() / median[0])
    return {name: float(median[0] * math.exp(share * way)) for name, share in WAYS.items()}


def ratio_row(name: str, above: Sequence[float], below: Sequence[float], paired: bool) -> Row:
    """Return the ratio of the medians, met unless its 90 % bootstrap interval is above 1.

    Args:
        name: name of the row.
        above: evaluations that ours needed, a seed.
        below: evosax's.
        paired: a seed is the same luck on both sides, and so is drawn for both.
    """
    chooser = np.random.default_rng(0)
    drawn_R_S = chooser.integers(len(above), size=(2000, len(above)))
    others_R_S = drawn_R_S if paired else chooser.integers(len(below), size=(2000, len(below)))
    medians_R = np.median(np.array(above)[drawn_R_S], axis=1)
    ratios_R = medians_R / np.median(np.array(below)[others_R_S], axis=1)
    low, quarter, three_quarters = np.quantile(ratios_R, (0.05, 0.25, 0.75))
    value = statistics.median(above) / statistics.median(below)
    met = bool(min(low, value) <= 1)
    return Row(name, value, "x", "<= 1, luck apart", met, len(above), three_quarters - quarter)


def contest_rows(name: str, contest: Contest) -> list[Row]:
    rows: list[Row] = []
    for what, problem in contest.problems.items():
        curves: dict[str, list[Curve]] = {"ours": [], "theirs": [], "same": []}
        for seed in SEEDS:  # By turns, so that neither has the machine's better minutes.
            curves["ours"].append(from_start(contest.ours(problem, seed)))
            curves["theirs"].append(from_start(contest.theirs(problem, seed)))
            if contest.same_noise is not None:
                curves["same"].append(from_start(contest.same_noise(problem, seed)))
        of_problem: list[Row] = []
        for way, target in targets(curves["theirs"]).items():
            needed = {
                side: [reached(curve, target, problem) for curve in of_side]
                for side, of_side in curves.items()
            }
            evaluations = statistics.median(needed["theirs"])
            title = f"{name}, {what}: {way} of the way (f = {target:.6g} of the start's"
            title += f", evosax {evaluations:.0f} evaluations)"
            for side, noise_of in (("theirs", "own"), ("same", "same")):
                if needed[side]:
                    of_problem.append(
                        ratio_row(
                            f"{title}, {noise_of} noise",
                            needed["ours"],
                            needed[side],
                            paired=side == "same",
                        )
                    )
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
