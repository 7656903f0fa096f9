"""The words are Philox4x64-10, by its published answers and by a second implementation."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution.noise import philox

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
    assert philox.words(seed, name, first_block, num_blocks).tolist() == expected


def test_the_stream_is_numpys_own() -> None:
    key = np.array([11, philox.name_key("model.weight")], np.uint64)
    expected = np.random.Philox(key=key).random_raw(40)
    np.testing.assert_array_equal(philox.words(11, "model.weight", 0, 10), expected)


def test_the_table_is_antisymmetric_ascending_and_of_unit_variance() -> None:
    table = philox.normal_table().astype(np.float64)
    assert table.shape == (65536,)
    np.testing.assert_array_equal(table, -table[::-1])
    assert np.all(np.diff(table) > 0)
    assert np.mean(table**2) == pytest.approx(1, abs=1e-8)
    assert table[-1] == pytest.approx(4.324963, abs=1e-6)


def test_the_table_is_the_normal_distributions_to_its_fourth_moment() -> None:
    # Sixteen bits cut the tails at 4.32, which costs the fourth moment (3) a little.
    assert np.mean(philox.normal_table().astype(np.float64) ** 4) == pytest.approx(3, abs=0.01)


def test_no_quantile_is_near_a_float32_rounding_boundary() -> None:
    # So a libm that is off by a few units in the last place of float64 gives the same table.
    exact = philox.normal_quantiles()
    rounded = exact.astype(np.float32)
    wide = rounded.astype(np.float64)
    above = (wide + np.nextafter(rounded, np.float32(np.inf)).astype(np.float64)) / 2
    below = (wide + np.nextafter(rounded, np.float32(0)).astype(np.float64)) / 2
    distance = np.minimum(abs(exact - above), abs(exact - below)) / np.spacing(exact)
    assert distance.min() > 5000


def test_a_machine_that_computes_another_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    off = philox.normal_quantiles()
    off[100] *= 1 + 1e-6
    monkeypatch.setattr(philox, "normal_quantiles", lambda: off)
    with pytest.raises(RuntimeError, match="checksum"):
        philox.normal_table.__wrapped__()


def test_the_table_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        philox.normal_table()[0] = 0
