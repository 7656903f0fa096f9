"""Masks: fixed, of the density asked for, and any part of one alone."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution.noise.tensors import Mask

WHOLE = Mask(seed=5, threshold=20_000).range("w", 0, 4000)


def test_the_mask_is_the_low_lanes_of_numpys_own_philox() -> None:
    key = int.from_bytes(hashlib.blake2b(b"w.mask", digest_size=8).digest(), "little")
    words = np.random.Philox(key=np.array([5, key], np.uint64), counter=0).random_raw(1000)
    lanes = [int(word) >> 16 * i & 0xFFFF for word in words for i in range(4)]
    assert [lane < 20_000 for lane in lanes] == WHOLE.tolist()


@given(st.integers(0, 4000), st.integers(0, 4000))
def test_any_range_is_made_alone(start: int, stop: int) -> None:
    start, stop = sorted((start, stop))
    found = Mask(5, 20_000).range("w", start, stop)
    assert np.array_equal(found, WHOLE[start:stop])


@pytest.mark.parametrize("threshold", [1, 655, 32_768, 65_535])
def test_it_holds_its_share_of_the_elements(threshold: int) -> None:
    size, density = 2_000_000, threshold / 65_536
    found = Mask(0, threshold).range("model.weight", 0, size).sum()
    assert abs(found - size * density) < 5 * np.sqrt(size * density * (1 - density))


def test_seeds_and_names_have_masks_of_their_own_and_a_wider_one_holds_a_narrower_one() -> None:
    half = Mask(0, 32_768).range("w", 0, 100_000)
    for other in (Mask(1, 32_768).range("w", 0, 100_000), Mask(0, 32_768).range("v", 0, 100_000)):
        assert (half & other).mean() == pytest.approx(0.25, abs=0.01)
    assert not (Mask(0, 20_000).range("w", 0, 100_000) & ~half).any()
