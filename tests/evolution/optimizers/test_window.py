"""Momentum, Adam, RMSProp, ClipUp and Muon: their formulas on literals, and their traps."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import chz
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.fitness import ZScore
from es_cookbook.evolution.genome import AdamRule, MuonRule, Step, Term
from es_cookbook.evolution.optimizers.adam import Adam, RMSProp
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.evolution.optimizers.es import ES, AdaptiveSigma
from es_cookbook.evolution.optimizers.momentum import ClipUp, Momentum, Muon
from es_cookbook.evolution.optimizers.window import WindowedES, average_weights
from es_cookbook.evolution.schedules import Linear, Table
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from tests.settled import settled

SPACE = FullRankSpace(shapes={"x": (20, 25)})
FITNESS = ((1.0, -1.0), (0.5, 0.0), (0.0, 0.0), (-2.0, 1.0))
"""Of two genomes, a mirrored pair, in four generations; no signal in the third."""

SETTINGS: Any = {"population_size": 2, "sigma": 0.1, "learning_rate": 0.0005, "window": 3}
CONFIGS: tuple[WindowedES, ...] = (
    Momentum(**SETTINGS),
    Adam(**SETTINGS),
    Adam(**SETTINGS, moments="block"),
    RMSProp(**SETTINGS),
    ClipUp(**SETTINGS),
    Muon(**SETTINGS),
)


def build(config: ES, num_generations: int = 4) -> Optimizer:
    return config(run_seed=0, num_generations=num_generations, space=SPACE)


def told(config: ES, fitness: Sequence[tuple[float, ...]] = FITNESS) -> list[Step]:
    optimizer = build(config)
    return [
        optimizer.tell(generation, optimizer.ask(generation), None, np.array(fitness_G))
        for generation, fitness_G in enumerate(fitness)
    ]


def climbed(
    config: ES, generations: int, change: Callable[[Step], Step] = lambda step: step
) -> float:
    """How far from the top of a quadratic it ends, which is 0.1 at first."""
    optimizer = build(config, generations)
    centre = Centre({"x": torch.full((20, 25), 0.1)}, SPACE, num_threads=1)
    for generation in range(generations):
        genomes_G = optimizer.ask(generation)
        values_G = [float(-centre.perturbed(g, "x").double().square().sum()) for g in genomes_G]
        fitness_G = ZScore()(np.array([values_G]))
        centre.apply(change(optimizer.tell(generation, genomes_G, None, fitness_G)))
    return float(centre.weights["x"].double().square().mean().sqrt())


def pairs(step: Step) -> list[tuple[int, float]]:
    return [(term.seed, term.coefficient) for term in step.terms]


def seed(generation: int) -> int:
    return build(CONFIGS[0]).ask(generation)[0].terms[0].seed


@given(st.floats(0, 0.999), st.integers(1, 60))
def test_a_window_forgets_the_older_and_has_all_the_weight(decay: float, count: int) -> None:
    weights = average_weights(decay, count)
    assert sum(weights) == approx(1)
    assert weights == sorted(weights)


def test_momentum_is_the_corrected_average_over_the_window() -> None:
    steps = told(Momentum(population_size=2, sigma=0.1, learning_rate=0.8, momentum=0.5, window=3))
    # Gradients 1/2 · (fitness₊ - fitness₋): 1, 0.25, none, -1.5.
    assert steps[0].terms == (Term(seed(0), 0.8),)
    assert pairs(steps[1]) == [(seed(0), approx(0.8 / 3)), (seed(1), approx(0.4 / 3))]
    assert pairs(steps[2]) == [(seed(0), approx(0.8 / 7)), (seed(1), approx(0.4 / 7))]
    # Generation 0 has left the window.
    assert pairs(steps[3]) == [(seed(1), approx(0.2 / 7)), (seed(3), approx(-4.8 / 7))]


@pytest.mark.slow
def test_the_sum_in_place_of_the_average_diverges_and_the_average_does_not() -> None:
    # v <- m v + g, as it has been written elsewhere: its steady step is α / (1 - m), ten times α.
    velocity: dict[int, float] = {}

    def uncorrected(step: Step) -> Step:
        kept = {s: 0.9 * v for s, v in velocity.items() if abs(v) > 1e-9}
        velocity.clear()
        velocity.update(kept | {term.seed: term.coefficient for term in step.terms})
        return Step(tuple(Term(s, v) for s, v in velocity.items()))

    shared = {"population_size": 10, "sigma": 0.01, "learning_rate": 0.02}
    assert climbed(settled(**shared), 200) < 0.07 and climbed(Momentum(**shared), 200) < 0.07
    assert climbed(settled(**shared), 200, uncorrected) > 0.3, "farther away than where it began"


def test_adam_hands_over_the_window_with_both_weights() -> None:
    config = Adam(
        population_size=2, sigma=0.1, learning_rate=0.8, beta1=0.5, beta2=0.0, window=3, epsilon=0.1
    )
    last = told(config)[-1]
    assert last.terms == (Term(seed(1), 0.25), Term(seed(3), -1.5))
    assert last.rule == AdamRule(
        (1, 0, 1), (1 / 7, 2 / 7, 4 / 7), (0.0, 0.0, 1.0), rate=0.8, epsilon=0.1
    )


def test_adam_by_blocks_divides_by_the_root_of_the_mean_square() -> None:
    shared = {"population_size": 2, "sigma": 0.1, "learning_rate": 0.8, "moments": "block"}
    steps = told(Adam(beta1=0.0, beta2=0.5, window=3, **shared))
    assert steps[0].rms == approx(0.8)
    # v = (1/3 · 1² + 2/3 · 0.25²): the newest gradient alone moves.
    expected = 0.8 * 0.25 / math.sqrt(1 / 3 + 2 / 3 * 0.0625)
    assert pairs(steps[1]) == [(seed(1), approx(expected))]
    assert steps[2] == Step()  # no signal, and nothing remembered that moves


def test_clip_up_normalises_pushes_and_limits_the_speed() -> None:
    config = ClipUp(
        population_size=2, sigma=0.1, learning_rate=0.01, momentum=0.5, max_speed=0.012, window=3
    )
    steps = told(config)
    assert pairs(steps[0]) == [(seed(0), approx(0.01))]
    # 0.5 · 0.01 and 0.01 along independent directions: 0.0112, under the limit.
    assert pairs(steps[1]) == [(seed(0), approx(0.005)), (seed(1), approx(0.01))]
    # Nothing said: only slower.
    assert pairs(steps[2]) == [(seed(0), approx(0.0025)), (seed(1), approx(0.005))]
    assert all(step.rms <= 0.012 * (1 + 1e-9) for step in steps)
    assert told(chz.replace(config, max_speed=0.011))[1].rms == approx(0.011)


@pytest.mark.parametrize("config", [settled(population_size=2, sigma=0.1), *CONFIGS])
def test_a_schedule_and_a_warm_up_scale_every_step(config: ES) -> None:
    falls = Table(generations=(0, 3), factors=(0.5, 0.25))
    plain, falling = told(config), told(chz.replace(config, learning_rate_schedule=falls))
    assert plain[0].rms > 0 and falling[0].rms == approx(0.5 * plain[0].rms)
    if not isinstance(config, ClipUp):  # Its speed remembers earlier factors.
        assert falling[3].rms == approx(0.25 * plain[3].rms)
    assert told(chz.replace(config, warmup_generations=4))[0].rms == approx(0.25 * plain[0].rms)


def test_muon_has_momentums_terms_and_length() -> None:
    shared = {"population_size": 2, "sigma": 0.1, "learning_rate": 0.8, "window": 3}
    for step, momentum in zip(told(Muon(**shared)), told(Momentum(**shared)), strict=True):
        assert step.terms == momentum.terms
        assert step.rule == MuonRule(momentum.rms, 5)
    assert told(Muon(**shared), [(1.0, 1.0)]) == [Step()]


@pytest.mark.daily
@pytest.mark.parametrize("config", [settled(), *CONFIGS])
def test_every_one_of_them_climbs_a_quadratic(config: ES) -> None:
    rates = {ES: 0.05, Momentum: 0.05, Muon: 0.05, Adam: 0.01, RMSProp: 0.01, ClipUp: 0.004}
    config = chz.replace(
        config,
        population_size=20,
        sigma=0.01,
        learning_rate=rates[type(config)],
        learning_rate_schedule=Linear(),
        **({"window": 10} if isinstance(config, WindowedES) else {}),
        **({"max_speed": 0.008} if isinstance(config, ClipUp) else {}),
    )
    assert climbed(config, 150) < 0.05


@pytest.mark.parametrize(
    ("make", "field", "wrong"),
    [
        (ES, "population_size", 0),
        (ES, "sigma", math.nan),
        (ES, "weight_decay", 1.0),
        (AdaptiveSigma, "rate", 0.0),
        (AdaptiveSigma, "largest", 0.5),
        (Momentum, "momentum", 1.0),
        (Momentum, "window", 0),
        (Adam, "beta1", -0.1),
        (Adam, "beta2", 1.0),
        (Adam, "epsilon", 0.0),
        (ClipUp, "max_speed", 0.0),
        (ClipUp, "momentum", math.nan),
        (Muon, "iterations", 0),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, field: str, wrong: float) -> None:
    with pytest.raises(ConfigError, match=rf"\b{field} must be .*, found {wrong}"):
        make(**{field: wrong})
