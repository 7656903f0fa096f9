"""Kernels against the same in torch and float64, at sizes that fill no register."""

import numpy as np
import pytest
import torch

from es_cookbook.engines.torch.kernels.loops import add_low_rank, rms_norm, silu_and_multiply

SIZES = [8, 9, 16, 31, 64, 100]


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int) -> None:
    x, weight = randn(0, 5, size) * 3, randn(1, size)
    out = torch.empty_like(x)
    rms_norm(x.numpy(), weight.numpy(), 1e-6, out.numpy())
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (size,), weight, 1e-6))


@pytest.mark.parametrize("size", SIZES)
def test_silu_and_multiply(size: int) -> None:
    both = randn(0, 5, 2 * size) * 4
    out = torch.empty(5, size)
    silu_and_multiply(both.numpy(), out.numpy())
    gate, up = both.double().chunk(2, dim=-1)
    torch.testing.assert_close(out, (torch.nn.functional.silu(gate) * up).float())


def test_silu_of_numbers_far_out() -> None:
    gate = torch.tensor([-1e30, -200.0, -87.5, -30.0, 0.0, 30.0, 88.5, 1e30]).repeat(2, 1)
    out = torch.empty(2, 8)
    silu_and_multiply(torch.cat([gate, torch.ones(2, 8)], 1).contiguous().numpy(), out.numpy())
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(out[:, 3:], expected[:, 3:])
    # Where SiLU is smaller than any factor of it that can be written, so is what comes out.
    assert out[:, 1:3].abs().max() < 1e-30 and (out[:, 0] <= 0).all()


@pytest.mark.parametrize(("inputs", "sizes", "rank"), [(8, (9,), 1), (33, (16, 8, 3), 2)])
def test_every_row_gets_the_low_rank_part_of_its_genome(
    inputs: int, sizes: tuple[int, ...], rank: int
) -> None:
    outputs, ranks, genomes, height = sum(sizes), rank * len(sizes), 4, 3
    columns = [
        (sum(sizes[:m]), sum(sizes[: m + 1])) for m in range(len(sizes)) for _ in range(rank)
    ]
    a, b = torch.zeros(genomes, ranks + 1, outputs + 5), randn(1, genomes, ranks + 1, inputs)
    for r, (first, end) in enumerate(columns):
        a[:, r, first:end] = randn(2 + r, genomes, end - first)
    who = torch.tensor([2, 0, 3, 2, 1])
    x, y = randn(8, len(who) * height, inputs), randn(9, len(who) * height, outputs)
    of_row = who.repeat_interleave(height)
    factors = torch.einsum("tk,trk->tr", x.double(), b[of_row, :ranks].double())
    expected = y + torch.einsum("tr,trn->tn", factors, a[of_row, :ranks, :outputs].double())
    where = np.array(columns, dtype=np.int64)
    add_low_rank(y.numpy(), x.numpy(), a.numpy(), b.numpy(), where, who.numpy(), height)
    torch.testing.assert_close(y, expected.float())
