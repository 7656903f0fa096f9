"""Fitness in units of its own spread: what an optimizer is told, generation by generation."""

import math

import numpy as np
import pytest

from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.es import AdaptiveSigma
from es_cookbook.evolution.optimizers.spread import UnitSpread
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.plugins.genetic.optimizer import Genetic
from tests.settled import settled

NAN = math.nan
SPACE = FullRankSpace({"x": (4,)})
BUILD = {"run_seed": 0, "num_generations": 8, "space": SPACE}


def coefficient(optimizer: UnitSpread, generation: int, *fitness_G: float) -> float:
    """Of the step's only term, where a learning rate of 1 makes (fitness₊ - fitness₋) / 2."""
    step = optimizer.tell(generation, optimizer.ask(generation), None, np.array(fitness_G))
    return step.terms[0].coefficient if step.terms else 0.0


def test_fitness_is_told_in_units_of_its_rms_so_far() -> None:
    optimizer = UnitSpread(settled(population_size=2, sigma=0.1, learning_rate=1.0)(**BUILD))
    assert (optimizer.rms, optimizer.learning_rate(0)) == (1.0, 1.0)
    assert coefficient(optimizer, 0, 0.0, 0.0) == 0, "no signal, which counts for nothing"
    assert coefficient(optimizer, 1, 3.0, -3.0) == pytest.approx(1.0), "RMS 3"
    # √((3² + 1²) / 2) = √5
    assert coefficient(optimizer, 2, 1.0, -1.0) == pytest.approx(1 / math.sqrt(5))
    assert coefficient(optimizer, 3, NAN, NAN) == 0
    assert optimizer.rms == pytest.approx(math.sqrt(5))
    assert optimizer.learning_rate(4) == pytest.approx(1 / math.sqrt(5))
    assert optimizer.metrics() == {"fitness/rms": optimizer.rms}
    assert optimizer.sigma(4) == 0.1 and optimizer.ask(4) == settled(population_size=2, sigma=0.1)(
        **BUILD
    ).ask(4)


def test_lost_genomes_and_zeros_beside_others_count_as_they_do_in_a_mean() -> None:
    optimizer = UnitSpread(settled(population_size=4, sigma=0.1, learning_rate=1.0)(**BUILD))
    coefficient(optimizer, 0, 2.0, -2.0, NAN, 0.0)
    assert optimizer.rms == pytest.approx(math.sqrt(8 / 3))


def test_what_it_does_not_change_is_the_optimizers_own() -> None:
    adaptive = settled(evaluate_centre=True, adaptive_sigma=AdaptiveSigma())
    assert (
        UnitSpread(settled()(**BUILD)).asks_ahead and not UnitSpread(adaptive(**BUILD)).asks_ahead
    )
    genetic = Genetic(max_terms=5, species_by="behaviour", species_distance=0.1)(**BUILD)
    spread = UnitSpread(genetic)
    assert (spread.max_terms, spread.records_scores, spread.learning_rate(0)) == (5, True, None)
    with pytest.raises(ValueError, match="fitness must be finite or NaN"):
        coefficient(UnitSpread(settled(population_size=2)(**BUILD)), 0, math.inf, 1.0)
    with pytest.raises(ValueError, match="even generation"):
        UnitSpread(settled(sharpness=1.0)(**BUILD)).begin_after([Step()])
