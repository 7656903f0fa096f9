"""Products of int8: their bits are what the rounding says, and of a row's own numbers alone."""

import pytest
import torch

from es_cookbook.engines.torch.kernels.int8 import BLOCK, IS_NATIVE, OUTPUTS, Int8Weight

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="the processor has no such instruction")

SHAPES = [(1, OUTPUTS), (31, OUTPUTS + 1), (BLOCK, 95), (33, 100), (300, 129), (577, 2 * OUTPUTS)]
HEIGHTS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, blocks, inputs) of integers, and (rows, blocks) of scales."""
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(-1)
    times = torch.tensor(127.0) / most.clamp(min=1e-30)
    return (blocks.double() * times.double()[..., None]).round(), most / 127


def by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """One chain of fused sums over blocks, of which float64 holds each exactly enough."""
    (x_codes, x_scales), (w_codes, w_scales) = quantised(x), quantised(weight.float())
    total = bias.float().expand(len(x), -1)
    for block in range(x_codes.shape[1]):
        products = x_codes[:, block] @ w_codes[:, block].T
        scales = x_scales[:, None, block] * w_scales[None, :, block]
        total = (total.double() + products * scales.double()).float()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_bits_are_those_of_rounded_blocks_in_any_batch(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    x, weight, bias = numbers(70, inputs), numbers(outputs, inputs).to(dtype), numbers(outputs)
    product = Int8Weight(weight, bias)
    whole = product(x)
    assert torch.equal(whole, by_hand(x, weight, bias))
    for height in HEIGHTS:
        for first in (0, 1, 70 - height):
            part = product(x[first : first + height].contiguous())
            assert torch.equal(part, whole[first : first + height]), (height, first)


def test_nan_and_infinity_stay_in_their_own_row() -> None:
    product, x = Int8Weight(numbers(OUTPUTS, 70).bfloat16(), None), numbers(20, 70)
    x[3, 5], x[17, 69] = torch.nan, -torch.inf
    y = product(x)
    assert y[3].isnan().all() and not y[17].isfinite().any()
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(product(x[others].contiguous()), y[others]) and y[others].isfinite().all()
