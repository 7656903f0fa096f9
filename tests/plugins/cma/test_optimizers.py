"""CMA-ES, full and separable: they climb, resume to the bit, and leave nothing global behind."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.evolution.genome import Genome, OffsetsRule, Step, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.optimizers.base import Optimizer, OptimizerBuilder
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.evolution.spaces.full_rank import FullRank, FullRankSpace
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.cma.optimizers import CMA, SepCMA
from tests.tiny_models import TinyModel

BUILDERS = (CMA(population_size=12, sigma=0.5), SepCMA(population_size=12, sigma=0.5))
both = pytest.mark.parametrize("builder", BUILDERS, ids=["cma", "sep_cma"])
Landscape = Callable[[NDArray[np.float64]], float]


def space(dimension: int) -> SearchSpace:
    """Two parameters, of which one is a matrix where that is possible."""
    return FullRankSpace({"a": (2, dimension // 4), "b": (dimension - 2 * (dimension // 4),)})


def build(builder: OptimizerBuilder, dimension: int, seed: int = 0) -> Optimizer:
    return builder(run_seed=seed, num_generations=10, space=space(dimension))


def points(genomes_G: list[Genome]) -> NDArray[np.float64]:
    assert all(genome.offsets is not None and not genome.terms for genome in genomes_G)
    return np.array([g.offsets.array for g in genomes_G if g.offsets is not None], np.float64)


def run(
    optimizer: Optimizer, landscape: Landscape, generations: range
) -> list[tuple[NDArray[np.float64], Step]]:
    """What was told and done: fitness and step of each generation."""
    done: list[tuple[NDArray[np.float64], Step]] = []
    for generation in generations:
        genomes_G = optimizer.ask(generation)
        fitness_G = np.array([landscape(point) for point in points(genomes_G)])
        done.append((fitness_G, optimizer.tell(generation, genomes_G, None, fitness_G)))
    return done


def mean_of(step: Step) -> NDArray[np.float64]:
    assert isinstance(step.rule, OffsetsRule) and not step.terms and not step.decay
    return step.rule.offsets.array.astype(np.float64)


def last_mean(done: list[tuple[NDArray[np.float64], Step]]) -> NDArray[np.float64]:
    """Where it got; once all of a population are equal in float32, steps are empty."""
    return mean_of([step for _, step in done if step.rule is not None][-1])


def sphere(point: NDArray[np.float64]) -> float:
    return -float(np.sum((point - 1) ** 2))


def ellipsoid(point: NDArray[np.float64]) -> float:
    """Scales from 1 to 1000."""
    scales = 1000.0 ** np.linspace(0, 1, len(point))
    return -float(np.sum(scales * (point - 1) ** 2))


@both
def test_they_climb(builder: OptimizerBuilder) -> None:
    optimizer = build(builder, 10)
    assert ellipsoid(last_mean(run(optimizer, ellipsoid, range(250)))) > -1e-5
    assert optimizer.sigma(249) < 0.01


@both
def test_a_population_is_made_of_the_noise_of_its_generations_seed(
    builder: OptimizerBuilder,
) -> None:
    """In each generation afresh, so that a resumed run asks for the same."""
    optimizer = build(builder, 8, seed=2**40)
    for generation in (0, 3):  # Nothing is told: it stays round.
        seed = derive_seed(2**40, "population", generation)
        rng = np.random.RandomState(seed % 2**32)
        drawn = noise(seed, "cma.1", (12, 8)) if isinstance(builder, CMA) else rng.randn(12, 8)
        assert points(optimizer.ask(generation)) == pytest.approx(0.5 * drawn, rel=1e-3)


@both
def test_a_rebuilt_optimizer_told_the_same_asks_the_same_bits(builder: OptimizerBuilder) -> None:
    def landscape(point: NDArray[np.float64]) -> float:
        value = ellipsoid(point)  # lost and tied ones too
        return float("nan") if point[0] > 0.5 else round(value, -1)

    lived = build(builder, 30)
    recorded = run(lived, landscape, range(40))
    fitness_G = np.full(12, np.nan)
    recorded += [(fitness_G, lived.tell(40, lived.ask(40), None, fitness_G))]
    recorded += run(lived, landscape, range(41, 60))
    assert any(np.isnan(fitness_G).any() for fitness_G, _ in recorded[:40])
    rebuilt = build(builder, 30)
    np.random.seed(5)  # what is global must not matter
    for generation, (fitness_G, step) in enumerate(recorded):
        assert rebuilt.tell(generation, rebuilt.ask(generation), None, fitness_G) == step
    assert rebuilt.ask(60) == lived.ask(60) == lived.ask(60)
    onwards = range(60, 70)
    rebuilt_steps, steps = (
        [step for _, step in run(optimizer, landscape, onwards)] for optimizer in (rebuilt, lived)
    )
    assert rebuilt_steps == steps


@both
def test_a_fork_goes_on_from_the_mean_that_was_reached(builder: OptimizerBuilder) -> None:
    steps = [step for _, step in run(build(builder, 400), sphere, range(20))]
    reached = mean_of(steps[-1])
    optimizer = build(builder, 400)
    optimizer.begin_after([*steps, Step()])
    population = points(optimizer.ask(21))
    assert np.sqrt(np.mean((population - reached) ** 2)) == pytest.approx(0.5, rel=0.05)
    (_, step) = run(optimizer, sphere, range(21, 22))[0]
    assert step.rms == pytest.approx(np.sqrt(np.mean((mean_of(step) - reached) ** 2)), rel=1e-5)
    fresh, unmoved = build(builder, 400), build(builder, 400)
    unmoved.begin_after([Step()])
    assert unmoved.ask(0) == fresh.ask(0)
    for other in (Step((Term(1, 0.1),)), Step(decay=0.5)):
        with pytest.raises(ConfigError, match="steps of their own kind only"):
            build(builder, 400).begin_after([*steps, other])


@both
def test_nothing_is_told_where_nobody_is_better(builder: OptimizerBuilder) -> None:
    optimizer = build(builder, 10)
    for generation, fitness in enumerate([0.5, float("nan")]):
        genomes_G = optimizer.ask(generation)
        assert optimizer.tell(generation, genomes_G, None, np.full(12, fitness)) == Step()
    one_left = np.array([1.0] + [float("nan")] * 11)
    assert optimizer.tell(2, optimizer.ask(2), None, one_left) == Step()
    assert points(optimizer.ask(3)).tolist() != points(optimizer.ask(2)).tolist()


@both
def test_a_lost_genome_counts_as_the_worst(builder: OptimizerBuilder) -> None:
    steps: list[Step] = []
    for lost in (float("nan"), -1e6):
        optimizer = build(builder, 10)
        fitness_G = np.array([lost, *range(11)])
        steps.append(optimizer.tell(0, optimizer.ask(0), None, fitness_G))
    assert steps[0] == steps[1]


@both
def test_nothing_global_is_touched(
    builder: OptimizerBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    state = np.random.get_state()[1].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(build(builder, 400), sphere, range(5))
        flat = build(builder, 8)
        for generation in range(60):
            genomes_G = flat.ask(generation)
            flat.tell(generation, genomes_G, None, np.array([1.0] + 11 * [0.0]))
    assert np.random.get_state()[1].tolist() == state
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_bad_input(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"optimizer=cma.*LowRank cannot.*=adapter or"):
        CMA().check_run(LowRank(), 1)
    with pytest.raises(ConfigError, match=r"at least 4 .* found 3; 24 to 96"):
        SepCMA(population_size=3)
    with pytest.raises(ConfigError, match=r"1 to 4,096 parameters, .* 20,000: .*=sep_cma"):
        build(CMA(), 20_000)
    with pytest.raises(ConfigError, match=r"takes 2 to .* has 1: .*optimizer=cma"):
        build(SepCMA(), 1)
    with pytest.raises(ConfigError, match="sigma_factors and partitions have no meaning"):
        SepCMA().check_run(Adapter(rank=2, partitions=2), 1)
    model = str(tiny_model("qwen2"))
    with pytest.raises(ConfigError, match=r"1 to 4,096 parameters"):
        CMA().check(model, FullRank())
    CMA().check(model, FullRank(include=("*norm*",)))
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ConfigError, match=r"package cmaes, .*'es-cookbook\[cma\]'"):
        build(SepCMA(), 4)
