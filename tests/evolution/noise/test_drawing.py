"""The compiled loop draws what NumPy's generator and the table say, to the bit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution.noise import philox
from es_cookbook.evolution.noise.loops import draw_gaussians
from es_cookbook.evolution.noise.tensors import lanes_range

SEEDS = st.lists(st.integers(0, 2**63 - 1), max_size=5)


@given(SEEDS, st.text(), st.integers(0, 2**50), st.integers(0, 100))
def test_any_range_of_any_seeds_is_the_table_at_numpys_lanes(
    seeds_S: list[int], name: str, start: int, size: int
) -> None:
    out_S = np.full((len(seeds_S), size), np.nan, np.float32)
    draw_gaussians(seeds_S, name, start, out_S)
    for out, seed in zip(out_S, seeds_S, strict=True):
        lanes = lanes_range(seed, name, start, start + size)
        np.testing.assert_array_equal(out, philox.normal_table()[lanes])
