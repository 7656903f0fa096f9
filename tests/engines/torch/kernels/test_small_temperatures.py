"""Towards temperature 0 sampling becomes greedy, whatever the logits are."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from es_cookbook.common.checks import LEAST
from es_cookbook.engines.torch.forward.slots import choose_tokens, draw_on_device

DTYPES = torch.float32, torch.bfloat16, torch.float16
Rows = Callable[[torch.Generator], torch.Tensor]


def ordinary(generator: torch.Generator) -> torch.Tensor:
    return 5 * torch.randn(64, 97, generator=generator, dtype=torch.float64)


def with_gap(gap: float, size: float) -> Rows:
    """One token is above the others by a gap."""

    def made(generator: torch.Generator) -> torch.Tensor:
        rows = size - gap * (1 + torch.rand(64, 97, generator=generator, dtype=torch.float64))
        return rows.scatter(1, torch.randint(97, (64, 1), generator=generator), size)

    return made


def masked(generator: torch.Generator) -> torch.Tensor:
    rows = ordinary(generator)
    return rows.masked_fill(torch.rand(rows.shape, generator=generator) < 0.9, -torch.inf)


def alone(generator: torch.Generator) -> torch.Tensor:
    """All but a token are ruled out."""
    found = torch.full((64, 97), -torch.inf, dtype=torch.float64)
    return found.scatter(1, torch.randint(97, (64, 1), generator=generator), 3.0)


def tied(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, (64, 97), generator=generator).double()


ROWS = {
    "ordinary": ordinary,
    "masked": masked,
    "alone": alone,
    "tied": tied,
    "capped": lambda generator: 30 * torch.tanh(1e6 * ordinary(generator)),
    "huge": lambda generator: 1e30 * ordinary(generator),
    **{
        f"{gap:g} below {size:g}": with_gap(gap, size)
        for gap in (1e-6, 1e-3, 1.0, 1e3, 1e6)
        for size in (0.0, 3.0, -1e4, 6e4, 1e30)
    },
}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_below_a_thousandth_of_the_gap_a_token_is_the_largest(
    rows: Rows, dtype: torch.dtype, on_device: bool
) -> None:
    logits = rows(torch.Generator().manual_seed(3)).to(dtype)
    logits = logits.clamp(torch.finfo(dtype).min).masked_fill(logits == -torch.inf, -torch.inf)
    logits = logits.clamp(max=torch.finfo(dtype).max)
    ordered = logits.double().sort(dim=-1).values
    top = ordered[:, -1:]
    # Tokens that are as large as the largest are drawn from.
    below = ordered.masked_fill(ordered == top, -torch.inf).amax(dim=-1)
    gap = (top[:, 0] - below).clamp(max=1e30).numpy()
    for share in (1.0, 1e-2, 1e-6, 0.0):
        temperature = np.maximum(1e-3 * gap * share, LEAST)
        for top_p in (1.0, 0.9, LEAST):
            for uniform in (0.0, 0.3, 1 - 2.0**-53):
                options = temperature, np.full(64, top_p), np.full(64, uniform)
                if on_device:
                    there = (torch.from_numpy(each)[:, None] for each in options)
                    tokens = draw_on_device(logits.double(), *there)
                else:
                    tokens = torch.from_numpy(choose_tokens(logits, *options, np.arange(64)))
                found = logits.double().gather(1, tokens[:, None])
                assert torch.equal(found, top), (share, top_p, uniform)
