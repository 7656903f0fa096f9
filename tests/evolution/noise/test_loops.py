"""Rank-1 updates of a weight: every product and every sum is rounded separately, in order."""

import numpy as np
import pytest

from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.noise.loops import add_outer_products_


# More columns than a tile has, more rows than a tile has, and one element.
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 17), (70, 128), (5, 1023), (9, 2500), (0, 4), (4, 0)]
)
@pytest.mark.parametrize("num_updates", [0, 1, 3, 4, 7])
def test_each_product_and_each_sum_is_rounded_by_itself_in_order(
    shape: tuple[int, int], num_updates: int
) -> None:
    weight = noise(1, "start", shape)
    weight.reshape(-1)[::7] = -0.0
    columns_N, rows_N = (
        noise(2, "c", (num_updates, shape[0])),
        noise(3, "r", (num_updates, shape[1])),
    )
    expected = weight.copy()
    for column, row in zip(columns_N, rows_N, strict=True):
        expected = expected + column[:, None] * row[None, :]
    add_outer_products_(weight, columns_N, rows_N)
    np.testing.assert_array_equal(weight.view(np.uint32), expected.view(np.uint32))


def test_numbers_whose_sum_a_fused_product_would_change() -> None:
    # (1 + 2⁻¹²)² = 1 + 2⁻¹¹ + 2⁻²⁴, of which float32 drops the last; a fused sum would keep it.
    side = np.float32(1 + 2.0**-12)
    for num_updates in (1, 4):
        weight = np.full((1, 64), -(side * side), np.float32)
        columns_N, rows_N = (
            np.zeros((num_updates, 1), np.float32),
            np.zeros((num_updates, 64), np.float32),
        )
        columns_N[0], rows_N[0] = side, side
        add_outer_products_(weight, columns_N, rows_N)
        assert not weight.any()
