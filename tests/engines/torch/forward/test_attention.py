"""Attention over a slot cache against the textbook's, one query at a time."""

import math

import pytest
import torch

from es_cookbook.engines.torch.forward.attention import (
    AttentionLayer,
    DecodeRows,
    PrefillRows,
    SlotCache,
)

HEADS, KV_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


def _rows(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num, HEADS, WIDTH), (num, KV_HEADS, WIDTH), (num, KV_HEADS, WIDTH))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def _naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """One sequence, (T, heads, d) each, in float64 and loops."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(HEADS):
            keys = k[first : t + 1, h * KV_HEADS // HEADS].double()
            values = v[first : t + 1, h * KV_HEADS // HEADS].double()
            scores = keys @ q[t, h].double() * 0.3
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            weights = (scores - scores.max()).exp()
            out[t, h] = (weights / weights.sum() @ values).float()
    return out


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_prefill_and_decode_agree_with_the_textbook(
    window: int | None, softcap: float | None
) -> None:
    prompts, total = [1, 7, 8, 9, 8, 20], 24
    sequences = [_rows(total, seed=i) for i in range(len(prompts))]
    expected = [_naive(*sequence, window, softcap) for sequence in sequences]
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    slots = [3, 0, 5, 1, 4, 2]
    cache = SlotCache(16, 64)

    flat = [
        torch.cat([s[i][:n] for s, n in zip(sequences, prompts, strict=True)]) for i in range(3)
    ]
    padded = [torch.cat([part, torch.zeros(3, *part.shape[1:])]) for part in flat]
    starts = [sum(prompts[:i]) for i in range(len(prompts))]
    prefill = PrefillRows(starts, prompts, CPU, cache, slots)
    out = prefill.attend(AttentionLayer(0, **options), *padded)
    for start, n, wanted in zip(starts, prompts, expected, strict=True):
        torch.testing.assert_close(out[start : start + n], wanted[:n])

    at = list(prompts)
    while min(at) < total - 4:
        q, k, v = (torch.zeros(16, *part.shape[1:]) for part in flat)
        positions = torch.zeros(16, dtype=torch.int64)
        for i, slot in enumerate(slots):
            positions[slot] = at[i]
            q[slot], k[slot], v[slot] = (part[at[i]] for part in sequences[i])
        out = DecodeRows(cache, positions).attend(AttentionLayer(0, **options), q, k, v)
        for i, slot in enumerate(slots):
            torch.testing.assert_close(out[slot], expected[i][at[i]])
            at[i] = min(at[i] + 1, total - 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(2, 2, 8), (4, 2, 8), (2, 2, 16), (4, 1, 64)]
)
@pytest.mark.parametrize("length", [1, 5, 16, 30])
def test_a_longer_neighbour_does_not_change_a_rows_bits(
    heads: int, kv_heads: int, width: int, length: int
) -> None:
    # It did: torch runs small batched matmuls by a plain loop, so a longer view rounded otherwise.
    generator = torch.Generator().manual_seed(length)
    outs: list[torch.Tensor] = []
    cached = torch.randn(2, 16 * kv_heads * 128, width, generator=generator)
    new = [torch.randn(16, n, width, generator=generator) for n in (heads, kv_heads, kv_heads)]
    for neighbour in (length, 17, 40, 127):
        cache = SlotCache(16, 128)
        for stored, filled in zip(cache.layer(0, new[1], new[2]), cached, strict=True):
            stored.copy_(filled)
        positions = torch.full((16,), length - 1)
        positions[1:] = max(length, neighbour) - 1
        rows = DecodeRows(cache, positions)
        out = rows.attend(AttentionLayer(0, 1 / math.sqrt(width)), *new)
        outs.append(out[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_kept_slots_move_to_the_front_in_order() -> None:
    cache = SlotCache(4, 8)
    _, k, v = _rows(3, seed=0)
    PrefillRows([0, 1, 2], [1, 1, 1], CPU, cache, [3, 1, 2]).attend(
        AttentionLayer(0, scale=1.0), torch.zeros(3, HEADS, WIDTH), k, v
    )
    cache.keep(torch.tensor([2, 3]))
    keys, values = cache.layer(0, k, v)
    first = cache.rows(torch.tensor([0, 1]), torch.tensor([0, 0]), KV_HEADS)
    assert torch.equal(keys[first].view(2, KV_HEADS, WIDTH), k[[2, 0]])
    assert torch.equal(values[first].view(2, KV_HEADS, WIDTH), v[[2, 0]])
