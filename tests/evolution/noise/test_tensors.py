"""Noise tensors: what each element is, random access, and their statistics at fixed seeds."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution.noise import (
    NoiseKind,
    noise,
    noise_of_seeds,
    noise_range,
    philox,
)
from es_cookbook.evolution.noise.tensors import Part, uniform_range

KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
N = 200_000
"""Elements in a statistical test; a mean of N independent unit-variance numbers is off by 1/√N."""
TOLERANCE = 4 / np.sqrt(N)
PINNED_GAUSSIANS = [
    -1.0318019390106201,
    -0.9853070974349976,
    0.6610404253005981,
    -0.4829494059085846,
]
PINNED_SIGNS = [1, -1, 1, 1, -1, 1, -1, 1]
PINNED_FAR = [-2.1695244312286377, -0.1885090470314026, -0.38677075505256653]


def test_a_gaussian_element_is_the_quantile_of_its_lane() -> None:
    found = noise(3, "w", (5, 10))
    table = philox.normal_table()
    words = [int(word) for word in philox.words(3, "w", 0, 4)]
    for i, value in enumerate(found.reshape(-1)):
        block, lane = divmod(i, 16)
        word = words[4 * block + lane // 4]
        assert value == table[word >> 16 * (lane % 4) & 0xFFFF]


def test_a_rademacher_element_is_its_bit() -> None:
    found = noise(3, "w", (300,), "rademacher")
    words = [int(word) for word in philox.words(3, "w", 0, 2)]
    for i, value in enumerate(found):
        assert value == (1 if words[i // 64] >> i % 64 & 1 else -1)


def test_known_noise() -> None:
    # Pinned: whoever changes these changes every run that was ever recorded.
    assert noise(1, "model.weight", (4,)).tolist() == PINNED_GAUSSIANS
    assert noise(1, "model.weight", (8,), "rademacher").tolist() == PINNED_SIGNS
    beyond_a_piece = noise_range(2**63 - 1, "model.weight", 2**40 + 5, 2**40 + 8)
    assert beyond_a_piece.tolist() == PINNED_FAR


@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**63 - 1),
    st.integers(0, 40_000),
    st.integers(0, 40_000),
)
def test_any_range_equals_the_same_part_of_the_whole(
    kind: NoiseKind, seed: int, start: int, length: int
) -> None:
    whole = noise(seed, "w", (start + length,), kind)
    part = noise_range(seed, "w", start, start + length, kind)
    np.testing.assert_array_equal(part, whole[start:])


@given(st.sampled_from(KINDS), st.integers(0, 2**50), st.lists(st.integers(0, 600), max_size=6))
def test_adjoining_ranges_join(kind: NoiseKind, start: int, lengths: list[int]) -> None:
    ends = [start + sum(lengths[: i + 1]) for i in range(len(lengths))]
    parts = [
        noise_range(5, "w", begin, end, kind)
        for begin, end in zip([start, *ends], ends, strict=False)
    ]
    joined = np.concatenate([np.empty(0, np.float32), *parts])
    np.testing.assert_array_equal(joined, noise_range(5, "w", start, start + sum(lengths), kind))


def test_signs_of_any_range_are_those_of_the_whole() -> None:
    """Wherever a byte begins, and whether or not the range is of whole bytes."""
    whole = noise(7, "w", (64,), "rademacher")
    for start in range(17):
        for length in range(25):
            found = noise_range(7, "w", start, start + length, "rademacher")
            assert found.tolist() == whole[start : start + length].tolist()


def test_uniform_numbers_are_in_the_middle_of_65536_steps() -> None:
    found = uniform_range(3, "w", 0, 100_000).astype(np.float64) * 65536
    assert np.array_equal(found % 1, np.full(100_000, 0.5))
    assert 0 < found.min() < 10 and 65526 < found.max() < 65536


def test_a_shape_without_axes_or_elements_is_fine() -> None:
    assert noise(1, "w", ()).shape == ()
    assert noise(1, "w", (0, 3)).shape == (0, 3)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_beyond_63_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="63-bit"):
        noise(seed, "w", (1,))
    with pytest.raises(ValueError, match="63-bit"):
        noise_of_seeds([7, seed, 8], "w", (1,))


def test_out_that_does_not_fit_is_refused() -> None:
    for out in (np.empty(3, np.float32), np.empty(8, np.float32)[::2], np.empty(4, np.float64)):
        with pytest.raises(ValueError, match="out must be"):
            noise_range(1, "w", 0, 4, out=out)  # pyright: ignore[reportArgumentType]


def test_threads_do_not_disturb_each_other() -> None:
    expected = {seed: noise(seed, "w", (1000,)) for seed in range(40)}
    wrong: list[int] = []

    def check(order: range) -> None:
        for seed in order:
            for _ in range(5):
                if not np.array_equal(noise(seed, "w", (1000,)), expected[seed]):
                    wrong.append(seed)

    threads = [threading.Thread(target=check, args=(range(40)[:: 1 - 2 * i],)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gaussian_moments() -> None:
    values = noise(17, "w", (N,)).astype(np.float64)
    assert abs(values.mean()) < TOLERANCE
    # The variance of x² is 2, of x³ 15 and of x⁴ 96: so far are their means off, times 1/√N.
    assert abs((values**2).mean() - 1) < TOLERANCE * np.sqrt(2)
    assert abs((values**3).mean()) < TOLERANCE * np.sqrt(15)
    assert abs((values**4).mean() - 3) < TOLERANCE * np.sqrt(96)


def test_gaussian_fills_every_part_of_the_distribution() -> None:
    # 256 equally likely bins: chi-squared has mean 255 and standard deviation √510.
    bins = np.searchsorted(philox.normal_table()[256::256], noise(18, "w", (N,)), side="right")
    counts = np.bincount(bins, minlength=256)
    chi_squared = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert abs(chi_squared - 255) < 4 * np.sqrt(510)


def test_rademacher_is_balanced_and_nothing_but_signs() -> None:
    values = noise(19, "w", (N,), "rademacher")
    assert set(values.tolist()) == {-1.0, 1.0}
    assert abs(values.mean()) < TOLERANCE


NEIGHBOURS = {
    "adjacent seeds": ((20, "layers.0.w"), (21, "layers.0.w")),
    "seeds that differ in their highest bit": ((20, "layers.0.w"), (20 + 2**62, "layers.0.w")),
    "neighbouring layers": ((20, "layers.0.w"), (20, "layers.1.w")),
    "the two factors of one weight": ((20, "layers.0.w.A"), (20, "layers.0.w.B")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_neighbours_are_uncorrelated(kind: NoiseKind, neighbours: str) -> None:
    one, other = (noise(seed, name, (N,), kind) for seed, name in NEIGHBOURS[neighbours])
    for lag in (0, 1, 4, 16, 256):
        correlation = float(np.mean(one[lag:] * other[: N - lag], dtype=np.float64))
        assert abs(correlation) < TOLERANCE, lag
    assert abs(np.mean(one**2 * other**2, dtype=np.float64) - 1) < 3 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_elements_of_one_tensor_are_uncorrelated(kind: NoiseKind) -> None:
    values = noise(22, "w", (N,), kind)
    for lag in (1, 2, 4, 8, 15, 16, 64, 256, 1024):
        correlation = float(np.mean(values[lag:] * values[:-lag], dtype=np.float64))
        assert abs(correlation) < TOLERANCE, lag


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (16, 1), (17, 3), (450, 8), (9_000, 4)])
def test_many_seeds_at_once_are_each_ones_own_noise(
    shape: tuple[int, ...], kind: NoiseKind
) -> None:
    # More than are made in one go of the small shapes, and of all one that is made alone.
    seeds_S = [0, 2**63 - 1, *range(5, 18)] if math.prod(shape) > 100 else list(range(2100))
    found_S = noise_of_seeds(seeds_S, "layers.0.weight.A", shape, kind)
    assert found_S.shape == (len(seeds_S), *shape)
    for found, seed in zip(found_S, seeds_S, strict=True):
        assert np.array_equal(found, noise(seed, "layers.0.weight.A", shape, kind))
    assert noise_of_seeds([], "layers.0.weight.A", shape, kind).shape == (0, *shape)
    with pytest.raises(ValueError, match="a seed must be a 63-bit integer"):
        noise_of_seeds([1, 2**63], "layers.0.weight.A", (3,), kind)


def test_rows_and_columns_make_a_part() -> None:
    assert Part.within((4, 6), slice(1, 3), slice(2, None)) == Part((1, 3), (2, 6), 6)
    assert Part((1, 1), (0, 6), 6).num_elements == Part((0, 4), (3, 3), 6).num_elements == 0


def test_places_in_the_whole() -> None:
    part = Part((1, 3), (2, 4), width=5)
    assert (part.shape, part.num_elements) == ((2, 2), 4)
    assert [*part.spans()] == [range(7, 9), range(12, 14)]
    assert [*Part((1, 3), (0, 5), 5).spans()] == [range(5, 15)]
    assert Part.whole((4, 2, 3)) == Part((0, 4), (0, 6), 6)
    assert Part.whole(()).num_elements == 1


@pytest.mark.parametrize(
    ("rows", "columns"), [((2, 1), (0, 5)), ((-1, 1), (0, 5)), ((0, 1), (3, 2)), ((0, 1), (0, 6))]
)
def test_a_part_is_within_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="part"):
        Part(rows, columns, width=5)
