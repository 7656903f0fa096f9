"""Kernels against the same in torch and float64, at sizes that fill no register."""

import numpy as np
import pytest
import torch

from es_cookbook.engines.torch.kernels.attention import STEP, attend
from es_cookbook.engines.torch.kernels.lanes import LANES, Row, kernel, load, read, store
from es_cookbook.engines.torch.kernels.modules import NO_FACTORS, NO_NORMS, rows_of
from es_cookbook.engines.torch.kernels.rows import (
    RankFactors,
    add_low_rank,
    rms_norm,
    silu_and_multiply,
)

SIZES = [16, 17, 31, 64, 100]
DTYPES = [torch.float32, torch.bfloat16]
NO_NORM = np.zeros(0, np.float32)
GENOMES_G = torch.tensor([2, 0, 3, 2, 1])
HEIGHT = 3


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """The same but for float32's rounding, and for one rounding to a dtype with fewer bits."""
    torch.testing.assert_close(found.float(), expected.to(dtype).float(), rtol=1e-5, atol=1e-5) if (
        dtype == torch.float32
    ) else torch.testing.assert_close(found.float(), expected.float(), rtol=4e-3, atol=1e-5)


def low_rank(inputs: int, sizes: tuple[int, ...], rank: int) -> tuple[RankFactors, torch.Tensor]:
    """Factors of genomes, and what each row's adds to the weights: (rows, outputs, inputs)."""
    outputs, ranks, genomes = sum(sizes), rank * len(sizes), 4
    columns = [
        (sum(sizes[:m]), sum(sizes[: m + 1])) for m in range(len(sizes)) for _ in range(rank)
    ]
    a, b = torch.zeros(genomes, ranks + 1, outputs + 5), randn(1, genomes, ranks + 1, inputs)
    for r, (first, end) in enumerate(columns):
        a[:, r, first:end] = randn(2 + r, genomes, end - first)
    of_row = GENOMES_G.repeat_interleave(HEIGHT)
    change = torch.einsum("trn,trk->tnk", a[of_row, :ranks, :outputs], b[of_row, :ranks])
    where = np.array(columns, dtype=np.int64)
    return (a.numpy(), b.numpy(), where, GENOMES_G.numpy(), HEIGHT), change


@pytest.mark.parametrize("size", [8, 9, *SIZES])
def test_rms_norm(size: int) -> None:
    x, weight = randn(0, 5, size) * 3, randn(1, size)
    out = torch.empty_like(x)
    rms_norm(x.numpy(), weight.numpy(), 1e-6, out.numpy())
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (size,), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_multiply(size: int, dtype: torch.dtype) -> None:
    both = (randn(0, 5, 2 * size) * 4).to(dtype)
    out = torch.empty(5, size, dtype=dtype)
    silu_and_multiply(rows_of(both), rows_of(both), NO_FACTORS, rows_of(out))
    gate, up = both.double().chunk(2, dim=-1)
    assert_rounded(out, torch.nn.functional.silu(gate) * up, dtype)


def test_silu_of_numbers_far_out() -> None:
    gate = torch.tensor([-1e30, -200.0, -87.5, -30.0, 0.0, 30.0, 88.5, 1e30] * 2).repeat(2, 1)
    out = torch.empty(2, 16)
    both = torch.cat([gate, torch.ones(2, 16)], 1).contiguous().numpy()
    silu_and_multiply(both, both, NO_FACTORS, out.numpy())
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(out[:, 3:8], expected[:, 3:8])
    # Where SiLU is smaller than any factor of it that can be written, so is what comes out.
    assert out[:, 1:3].abs().max() < 1e-30 and (out[:, 0] <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "size", "rank"), [(8, 16, 1), (33, 41, 2)])
def test_gated_layers_get_the_low_rank_part_of_their_rows_genomes(
    inputs: int, size: int, rank: int, dtype: torch.dtype
) -> None:
    factors, change = low_rank(inputs, (size, size), rank)
    rows = len(change)
    x, both = randn(8, rows, inputs, dtype=dtype), randn(9, rows, 2 * size, dtype=dtype)
    out = torch.empty(rows, size, dtype=dtype)
    silu_and_multiply(rows_of(both), rows_of(x), factors, rows_of(out))
    changed = both.double() + torch.einsum("tnk,tk->tn", change.double(), x.double())
    gate, up = changed.chunk(2, dim=-1)
    assert_rounded(out, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("inputs", "sizes", "rank"), [(8, (9,), 1), (64, (32,), 1), (33, (16, 8, 3), 2)]
)
def test_every_row_gets_the_low_rank_part_of_its_genome(
    inputs: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    factors, change = low_rank(inputs, sizes, rank)
    rows = len(change)
    x, y = randn(8, rows, inputs, dtype=dtype), randn(9, rows, sum(sizes), dtype=dtype)
    expected = y.double() + torch.einsum("tnk,tk->tn", change.double(), x.double())
    out = torch.empty(rows, sum(sizes))
    add_low_rank(rows_of(y), rows_of(x), factors, out.numpy())
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary"), [(4, 2, 16, 16), (3, 1, 24, 8), (2, 2, 40, 40)]
)
def test_attention_of_linear_outputs(
    heads: int, kv_heads: int, size: int, rotary: int, with_norms: bool, dtype: torch.dtype
) -> None:
    outputs = [heads * size, kv_heads * size, kv_heads * size]
    factors, change = low_rank(12, tuple(outputs), 1)
    rows = len(change)
    x, y = randn(8, rows, 12, dtype=dtype), randn(9, rows, sum(outputs), dtype=dtype)
    cos, sin = randn(10, rows, rotary), randn(11, rows, rotary)
    norms = [randn(12, size), randn(13, size)] if with_norms else []
    scale, window = 0.3, 7
    columns = -(-size // STEP) * STEP
    cache = torch.zeros(-(-rows // STEP), kv_heads * (size + columns) * STEP, dtype=dtype)
    one_run = np.zeros((1, 1), np.int64)
    where = np.zeros(rows, np.int64), np.arange(rows), one_run, one_run
    out = torch.empty(rows, heads * size, dtype=dtype)
    weights = [w.numpy() for w in norms] or [NO_NORM] * 2
    norms_of_heads = weights[0], weights[1], 1e-6
    linear = rows_of(y), rows_of(x), factors, (cos.numpy(), sin.numpy()), norms_of_heads
    settings, of_heads = (scale, 0.0, window), (heads, kv_heads, size)
    attend(linear, rows_of(cache), where, settings, of_heads, rows_of(out))

    changed = y.float() + torch.einsum("tnk,tk->tn", change, x.float())
    q, k, v = (part.unflatten(1, (-1, size)) for part in changed.split(outputs, dim=1))
    if norms:
        q, k = (
            torch.nn.functional.rms_norm(part, (size,), weight, 1e-6)
            for part, weight in zip((q, k), norms, strict=True)
        )

    def turned(part: torch.Tensor) -> torch.Tensor:
        turning, rest = part[..., :rotary], part[..., rotary:]
        first, second = turning.chunk(2, dim=-1)
        other = torch.cat([-second, first], dim=-1)
        return torch.cat([turning * cos[:, None] + other * sin[:, None], rest], dim=-1)

    expected = torch.empty(rows, heads * size)
    states = torch.cat([part.flatten(1) for part in (turned(q), turned(k), v)], dim=1).numpy()
    nothing = np.zeros((rows, 0), np.float32)
    plain = states, states, NO_FACTORS, (nothing, nothing), NO_NORMS
    cache = torch.zeros_like(cache)
    attend(plain, rows_of(cache), where, settings, of_heads, expected.numpy())
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=atol)


def test_numbers_are_rounded_to_the_nearest_bfloat16_ties_to_even() -> None:
    up = torch.cat([randn(1, 1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0])])
    gate = torch.full_like(up, 40.0)  # its SiLU is itself
    both = torch.cat([gate, up])[None].to(torch.bfloat16)
    product = 40.0 * both[0, len(up) :].float()
    out = torch.empty(1, len(up), dtype=torch.bfloat16)
    silu_and_multiply(rows_of(both), rows_of(both), NO_FACTORS, rows_of(out))
    assert torch.equal(out[0], product.to(torch.bfloat16))


@kernel()
def _widen(halves: Row, many: Row, one: Row) -> None:
    for i in range(0, len(halves), LANES):
        store(many, i, load(halves, i))
    for i in range(len(halves)):
        one[i] = read(halves, i)


def test_every_float16_is_widened_exactly() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    many, one = np.empty((2, 65536), np.float32)
    _widen(halves.view(np.int16), many, one)
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(many, expected, equal_nan=True)
    assert np.array_equal(one, expected, equal_nan=True)
    assert np.array_equal(np.signbit(many), np.signbit(expected))
