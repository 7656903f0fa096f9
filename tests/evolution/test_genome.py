"""Genomes are seeds and coefficients, and refuse what could not be applied."""

import math
import pickle

import numpy as np
import pytest

from es_cookbook.evolution.genome import MAX_SEED, Genome, Step, Term


def test_the_empty_genome_is_the_centre_and_equal_genomes_are_equal() -> None:
    assert Genome() == Genome(terms=())
    assert Genome((Term(1, 0.5),)) == Genome((Term(1, 0.5),))
    assert len({Genome((Term(1, 0.5),)), Genome((Term(1, 0.5),)), Genome((Term(1, -0.5),))}) == 2


def test_steps_cross_process_borders() -> None:
    step = Step(terms=(Term(MAX_SEED, -0.25), Term(0, 1e-30)), decay=0.1)
    assert pickle.loads(pickle.dumps(step)) == step
    assert MAX_SEED == 9_223_372_036_854_775_807, "the largest of 63 bits"


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_does_not_fit_63_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=f"63-bit integer .* found {seed}"):
        Term(seed, 1.0)


@pytest.mark.parametrize("coefficient", [math.nan, math.inf, -math.inf, 3.5e38, -3.5e38])
def test_a_coefficient_that_is_not_finite_is_refused(coefficient: float) -> None:
    with pytest.raises(
        ValueError, match=r"coefficient must be finite as a float32, found .* for seed 7"
    ):
        Term(7, coefficient)


def test_the_largest_float32_is_a_coefficient() -> None:
    largest = float(np.finfo(np.float32).max)
    assert Term(7, -largest).coefficient == -largest


@pytest.mark.parametrize("decay", [-0.1, 1.1, math.nan])
def test_decay_beyond_the_base_or_away_from_it_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
        Step(decay=decay)
