"""Products in float32 with weights of any dtype: right, and of a row's own numbers alone."""

import pytest
import torch

from es_cookbook.engines.torch.kernels.panels import DEPTH, LINE, OUTPUTS, PANEL
from es_cookbook.engines.torch.kernels.products import multiply

SHAPES = [(1, 1), (8, 24), (33, 17), (64, OUTPUTS), (448, 129), (DEPTH, 96), (2 * DEPTH + 5, 101)]
SHAPES += [(0, 3), (100, PANEL - 1), (15, 80), (DEPTH + LINE - 1, 2 * PANEL + 1)]
HEIGHTS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 199)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_is_right_and_a_rows_bits_depend_on_nothing_else(
    dtype: torch.dtype, inputs: int, outputs: int, with_bias: bool
) -> None:
    x, weight = numbers(200, inputs), numbers(outputs, inputs).to(dtype)
    bias = numbers(outputs).to(dtype) if with_bias else None
    whole = multiply(x, weight, bias)
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(whole, exact.float(), rtol=1e-4, atol=1e-4)
    for height in HEIGHTS:
        for first in (0, 1, 200 - height):
            part = multiply(x[first : first + height].contiguous(), weight, bias)
            assert torch.equal(part, whole[first : first + height]), (height, first)


def test_the_bits_are_those_of_one_chain_of_fused_sums_in_the_order_of_inputs() -> None:
    """So they are the same on every processor: float64 holds a fused product's sum here."""
    x, weight = numbers(3, 700), numbers(5, 700).bfloat16()
    total = torch.zeros(3, 5)
    for k in range(700):
        products = x[:, k, None].double() * weight[None, :, k].double()
        total = (total.double() + products).float()
    assert torch.equal(multiply(x, weight), total)


def test_nan_and_infinity_stay_in_their_own_row() -> None:
    x, weight = numbers(20, 40), numbers(30, 40).bfloat16()
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    product = multiply(x, weight)
    assert product[3].isnan().all() and not product[17].isfinite().any()
    others = [row for row in range(20) if row not in (3, 17)]
    assert product[others].isfinite().all()
    assert torch.equal(multiply(x[others].contiguous(), weight), product[others])


@pytest.mark.parametrize("outputs", [5, 70])
def test_rows_of_no_request_change_no_others(outputs: int) -> None:
    x, weight = numbers(16, 40), numbers(outputs, 40).bfloat16()
    x[3:] = torch.nan
    some = multiply(x, weight, live=3)
    assert some.shape == (16, outputs)
    assert torch.equal(some[:3], multiply(x[:3].contiguous(), weight))
