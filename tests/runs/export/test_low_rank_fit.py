"""The nearest matrix of a rank: as near as can be, and the error is the one that is there."""

import math

import pytest
import torch

from es_cookbook.runs.export.low_rank_fit import fit, relative_error


def noise_sum(rows: int, columns: int, terms: int) -> torch.Tensor:
    """What steps add to a weight: a sum of rank-1 noise."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(rows, terms, generator=generator) * 1e-3
    return a @ torch.randn(terms, columns, generator=generator)


@pytest.mark.parametrize(("rows", "columns"), [(40, 70), (70, 40), (600, 900)])
@pytest.mark.parametrize("rank", [1, 5, 12])
def test_it_is_as_near_as_can_be_and_says_how_near(rows: int, columns: int, rank: int) -> None:
    matrix = noise_sum(rows, columns, 30)
    found = fit(matrix, rank)
    assert (found.a.shape, found.b.shape) == ((rank, columns), (rows, rank))
    squares = torch.linalg.svdvals(matrix.double()).square()
    best = math.sqrt(squares[rank:].sum() / squares.sum())
    assert best <= found.relative_error * (1 + 1e-5) <= best * 1.002
    left = (matrix - found.b @ found.a).norm() / matrix.norm()
    assert found.relative_error == pytest.approx(float(left), rel=1e-5)


def test_large_matrices_of_slowly_falling_singular_values_come_within_two_thousandths() -> None:
    matrix = noise_sum(1100, 800, 1500)
    squares = torch.linalg.svdvals(matrix).square()
    for rank in (4, 64):
        best = float((squares[rank:].sum() / squares.sum()).sqrt())
        assert best * 0.9999 <= fit(matrix, rank).relative_error <= best * 1.002


@pytest.mark.parametrize("size", [50, 700])
def test_the_rank_of_the_matrix_leaves_nothing_but_rounding(size: int) -> None:
    matrix = noise_sum(size, size, 6)
    assert fit(matrix, 5).relative_error > 0.1
    assert fit(matrix, 6).relative_error < 1e-5


def test_a_rank_above_the_sides_is_filled_with_zeros() -> None:
    matrix = noise_sum(3, 20, 9)
    found = fit(matrix, 8)
    assert (found.a.shape, found.b.shape) == ((8, 20), (3, 8))
    assert found.relative_error < 1e-5
    assert not found.a[3:].any()


@pytest.mark.parametrize("size", [20, 700])
def test_a_weight_that_did_not_move_is_zeros_without_error(size: int) -> None:
    found = fit(torch.zeros(size, size), 4)
    assert found.relative_error == 0
    assert not (found.b @ found.a).any()


def test_the_same_matrix_gives_the_same_factors() -> None:
    matrix = noise_sum(700, 600, 30)
    before = torch.get_rng_state()
    first, second = fit(matrix, 8), fit(matrix, 8)
    assert torch.equal(first.a, second.a)
    assert torch.equal(first.b, second.b)
    assert torch.equal(torch.get_rng_state(), before)


def test_errors_of_several_weights_add_up_as_squares() -> None:
    assert relative_error(9 + 16, 100) == 0.5
    assert relative_error(0, 0) == 0
