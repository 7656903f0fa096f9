"""Noise: published words, what each element is, random access, statistics at fixed seeds."""

import hashlib
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution.noise import (
    NoiseKind,
    lanes_range,
    noise,
    noise_of_seeds,
    noise_range,
    normal_quantiles,
    normal_table,
    uniform_range,
    words,
)

MASK = 2**64 - 1


def published_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x64-10 from its definition (Salmon et al. 2011), in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (
            (product1 >> 64) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 64) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


# Random123's kat_vectors for philox4x64-10: counter, key, answer.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (MASK, MASK, MASK, MASK),
        (MASK, MASK),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert published_philox(counter, key) == answer
    # NumPy increments before it generates, so it is started one below the published counter.
    whole = sum(word << 64 * i for i, word in enumerate(counter))
    below = (whole - 1) % 2**256
    generator = np.random.Philox(key=key[0] | key[1] << 64, counter=below)
    assert tuple(generator.random_raw(4).tolist()) == answer


@given(st.integers(0, 2**63 - 1), st.text(), st.integers(0, 2**62), st.integers(0, 5))
def test_block_b_is_the_published_function_at_counter_b_plus_one(
    seed: int, name: str, first_block: int, num_blocks: int
) -> None:
    name_hash = hashlib.blake2b(name.encode(), digest_size=8).digest()
    key = (seed, int.from_bytes(name_hash, "little"))
    expected = [
        word
        for block in range(first_block, first_block + num_blocks)
        for word in published_philox((block + 1, 0, 0, 0), key)
    ]
    assert words(seed, name, first_block, num_blocks).tolist() == expected


def test_the_table_is_antisymmetric_ascending_and_of_unit_variance() -> None:
    table = normal_table().astype(np.float64)
    assert table.shape == (65536,)
    np.testing.assert_array_equal(table, -table[::-1])
    assert np.all(np.diff(table) > 0)
    assert np.mean(table**2) == pytest.approx(1, abs=1e-8)
    assert table[-1] == pytest.approx(4.324963, abs=1e-6)


def test_no_quantile_is_near_a_float32_rounding_boundary() -> None:
    # So a libm that is off by a few units in the last place of float64 gives the same table.
    exact = normal_quantiles()
    rounded = exact.astype(np.float32)
    wide = rounded.astype(np.float64)
    above = (wide + np.nextafter(rounded, np.float32(np.inf)).astype(np.float64)) / 2
    below = (wide + np.nextafter(rounded, np.float32(0)).astype(np.float64)) / 2
    distance = np.minimum(abs(exact - above), abs(exact - below)) / np.spacing(exact)
    assert distance.min() > 5000


def test_a_machine_that_computes_another_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    off = normal_quantiles()
    off[100] *= 1 + 1e-6
    monkeypatch.setattr("es_cookbook.evolution.noise.normal_quantiles", lambda: off)
    with pytest.raises(RuntimeError, match="checksum"):
        normal_table.__wrapped__()


KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")
PINNED_GAUSSIANS = [
    -1.0318019390106201,
    -0.9853070974349976,
    0.6610404253005981,
    -0.4829494059085846,
]
PINNED_SIGNS = [1, -1, 1, 1, -1, 1, -1, 1]
PINNED_FAR = [-2.1695244312286377, -0.1885090470314026, -0.38677075505256653]


def test_a_rademacher_element_is_its_bit() -> None:
    found = noise(3, "w", (300,), "rademacher")
    of_blocks = [int(word) for word in words(3, "w", 0, 2)]
    for i, value in enumerate(found):
        assert value == (1 if of_blocks[i // 64] >> i % 64 & 1 else -1)


@given(
    st.lists(st.integers(0, 2**63 - 1), max_size=5),
    st.text(),
    st.integers(0, 2**50),
    st.integers(0, 100),
)
def test_any_range_of_any_seeds_is_the_table_at_numpys_lanes(
    seeds_S: list[int], name: str, start: int, size: int
) -> None:
    for seed in seeds_S:
        lanes = lanes_range(seed, name, start, start + size)
        found = noise_range(seed, name, start, start + size)
        np.testing.assert_array_equal(found, normal_table()[lanes])


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


def test_uniform_numbers_are_in_the_middle_of_65536_steps() -> None:
    found = uniform_range(3, "w", 0, 100_000).astype(np.float64) * 65536
    assert np.array_equal(found % 1, np.full(100_000, 0.5))
    assert 0 < found.min() < 10 and 65526 < found.max() < 65536


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
