"""Exact arithmetic: torch's operations, as they run on a GPU, have the bits of NumPy's."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.evolution import exact
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.noise.part import Part


def values(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    """Of all sizes, zeros of both signs and subnormal numbers too."""
    made = torch.from_numpy(noise(seed, "w", shape)).clone()
    flat = made.view(-1)
    flat[::7] *= 1e-40
    flat[::5] *= 1e30
    flat[::11] = -0.0
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.1, 1e-9, 1 / 3, 1.0])
def test_decay_rounds_as_numpy_does(
    dtype: torch.dtype, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "DEVICE_PIECE", 1000)
    base = values((257, 129), seed=2).clamp(-6e4, 6e4).to(dtype)
    expected, found = values((257, 129)), values((257, 129))
    exact.decay_(expected, base, decay)
    exact.device_decay_(found, base.mT.contiguous().mT, decay)  # In any layout.
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(found, values((257, 129)))


@pytest.mark.parametrize("decay_", [exact.decay_, exact.device_decay_])
def test_decay_of_1_is_the_base_to_the_bit(
    decay_: Callable[[torch.Tensor, torch.Tensor, float], None],
) -> None:
    base = torch.tensor([[0.0, -0.0], [1.0, -3e38]])
    weight = torch.tensor([[-1.0, 1.0], [math.inf, 3e38]])
    decay_(weight, base, 1.0)
    assert torch.equal(weight.view(torch.int32), base.view(torch.int32))


PARTS = [
    *(Part.whole(shape) for shape in [(), (1,), (70_001,), (257, 300), (3, 5, 7), (0, 4), (1, 1)]),
    Part((5, 9), (0, 300), 300),
    Part((3, 260), (17, 18), 300),
    Part((2**31, 2**31 + 40), (2**20, 2**20 + 33), 2**21),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("at_once", [64, 2**24])
def test_fingerprints_are_the_same_number(
    part: Part, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "DEVICE_PIECE", at_once)
    weight = values(part.shape)
    found = exact.device_fingerprint("w", weight, part)
    assert found == exact.fingerprint("w", weight, part)
    assert 0 <= found < 2**64
    assert (found == 0) == (weight.numel() == 0)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50),
    st.tuples(st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 9)),
)
def test_any_bits_at_any_place(patterns: list[int], place: tuple[int, int, int]) -> None:
    row, before, after = place
    weight = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    for rows, columns in [(1, len(patterns)), (len(patterns), 1)]:
        part = Part((row, row + rows), (before, before + columns), before + columns + after)
        found = exact.device_fingerprint("v", weight, part)
        assert found == exact.fingerprint("v", weight, part)


def test_sums_wrap_in_both() -> None:
    # Each pattern nearly 2³²: the products with their places pass 2⁶⁴ many times over.
    weight = torch.full((300, 70_000), -1, dtype=torch.int32).view(torch.float32)
    assert weight.isnan().all()
    part = Part((10**9, 10**9 + 300), (0, 70_000), 70_000)
    assert math.prod(part.shape) * (2**32 - 1) * 10**9 * 70_000 > 2**90
    assert exact.device_fingerprint("w", weight, part) == exact.fingerprint("w", weight, part)
