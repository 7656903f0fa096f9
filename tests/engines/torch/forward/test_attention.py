"""Attention over a slot cache against the textbook's, one query at a time."""

import math

import pytest
import torch

from es_cookbook.engines.torch.forward.attention import (
    AttentionLayer,
    AttentionRows,
    DecodeRows,
    KernelCache,
    KernelRows,
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


def _prefilling(
    cache: KernelCache,
    slots: list[int],
    starts: list[int],
    lengths: list[int],
    firsts: list[int] | None = None,
    num_rows: int | None = None,
) -> KernelRows:
    """By the kernel; rows after the last prompt are nobody's."""
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    slots_T = torch.full((num_rows or ends[-1],), -1)
    positions_T = torch.zeros_like(slots_T)
    for i, slot in enumerate(slots):
        slots_T[starts[i] : ends[i]] = slot
        positions_T[starts[i] : ends[i]] = torch.arange(lengths[i]) + (firsts[i] if firsts else 0)
    return KernelRows(slots_T, positions_T, cache)


def _decoding(cache: KernelCache, positions: torch.Tensor) -> KernelRows:
    return KernelRows(torch.arange(len(positions)), positions, cache)


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
@pytest.mark.parametrize("by_kernel", [True, False])
def test_prefill_and_decode_agree_with_the_textbook(
    window: int | None, softcap: float | None, by_kernel: bool
) -> None:
    prompts, total = [1, 7, 8, 9, 8, 20], 24
    sequences = [_rows(total, seed=i) for i in range(len(prompts))]
    expected = [_naive(*sequence, window, softcap) for sequence in sequences]
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    slots = [3, 0, 5, 1, 4, 2]
    cache = (KernelCache if by_kernel else SlotCache)(16, 64)

    flat = [
        torch.cat([s[i][:n] for s, n in zip(sequences, prompts, strict=True)]) for i in range(3)
    ]
    padded = [torch.cat([part, torch.zeros(3, *part.shape[1:])]) for part in flat]
    starts = [sum(prompts[:i]) for i in range(len(prompts))]
    prefill: AttentionRows = PrefillRows(starts, prompts, CPU, cache, slots)
    if isinstance(cache, KernelCache):
        prefill = _prefilling(cache, slots, starts, prompts, num_rows=len(padded[0]))
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
        decode: AttentionRows = DecodeRows(cache, positions)
        if isinstance(cache, KernelCache):
            decode = _decoding(cache, positions)
        out = decode.attend(AttentionLayer(0, **options), q, k, v)
        for i, slot in enumerate(slots):
            torch.testing.assert_close(out[slot], expected[i][at[i]])
            at[i] = min(at[i] + 1, total - 1)


SHAPES = [
    (1, 1, 8),
    (2, 2, 8),
    (4, 2, 8),
    (2, 2, 16),
    (3, 1, 32),
    (4, 2, 32),
    (4, 1, 64),
    (8, 1, 128),
]
"""Heads, heads of keys, and their width."""


def _randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _fill(cache: SlotCache, k_S_T: torch.Tensor, v_S_T: torch.Tensor) -> None:
    """Write whole slots: (slots, tokens, kv heads, d) each."""
    num, length = k_S_T.shape[:2]
    slots, positions = torch.arange(num).repeat_interleave(length), torch.arange(length).repeat(num)
    new = k_S_T.flatten(0, 1), v_S_T.flatten(0, 1)
    if isinstance(cache, KernelCache):
        q = torch.zeros(len(slots), *k_S_T.shape[2:])
        KernelRows(slots, positions, cache).attend(AttentionLayer(0, 1.0), q, *new)
    else:
        cache.write(0, slots, positions, *new)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES)
@pytest.mark.parametrize("length", [1, 30, 150, 200, 300])
def test_a_longer_neighbour_does_not_change_a_rows_bits(
    heads: int, kv_heads: int, width: int, length: int
) -> None:
    cached = [_randn(i, 16, 512, kv_heads, width) for i in range(2)]
    new = [_randn(2, 16, n, width) for n in (heads, kv_heads, kv_heads)]
    layer = AttentionLayer(0, 1 / math.sqrt(width))
    outs: list[torch.Tensor] = []
    for neighbour in (length, 17, 127, 260, 383, 392, 400, 511):
        cache = KernelCache(16, 512)
        _fill(cache, *cached)
        positions = torch.full((16,), max(length, neighbour) - 1)
        positions[0] = length - 1
        outs.append(_decoding(cache, positions).attend(layer, *new)[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_attends_with_the_same_bits_prefilled_whole_in_parts_or_decoded(
    heads: int, kv_heads: int, width: int, window: int | None
) -> None:
    total, num = 300, 3
    layer = AttentionLayer(0, 1 / math.sqrt(width), window)
    q, k, v = (_randn(i, num, total, n, width) for i, n in enumerate((heads, kv_heads, kv_heads)))

    def prefill(cache: KernelCache, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        sizes = [last - first for first, last in spans]
        starts = [sum(sizes[:i]) for i in range(num)]
        flat = [
            torch.cat([each[i, first:last] for i, (first, last) in enumerate(spans)])
            for each in (q, k, v)
        ]
        firsts = [first for first, _ in spans]
        rows = _prefilling(cache, list(range(num)), starts, sizes, firsts)
        return list(rows.attend(layer, *flat).split(sizes))

    whole = torch.stack(prefill(KernelCache(16, 320), [(0, total)] * num))
    cache = KernelCache(16, 320)
    before, at = [(0, 0)] * num, [1, 70, 250]
    while min(at) < total:  # in parts of many lengths, with tokens decoded in between
        spans = [(last, n) for (_, last), n in zip(before, at, strict=True)]
        for i, (out, (first, last)) in enumerate(zip(prefill(cache, spans), spans, strict=True)):
            assert torch.equal(out, whole[i, first:last])
        positions = torch.zeros(16, dtype=torch.int64)
        decoded = [torch.zeros(16, n, width) for n in (heads, kv_heads, kv_heads)]
        for i, n in enumerate(at):
            positions[i] = n
            for rows, each in zip(decoded, (q, k, v), strict=True):
                rows[i] = each[i, n]
        out = _decoding(cache, positions).attend(layer, *decoded)
        assert all(torch.equal(out[i], whole[i, n]) for i, n in enumerate(at))
        before = [(first, n + 1) for (first, _), n in zip(spans, at, strict=True)]
        at = [min(n + 3 + 11 * i, total - 1) for i, n in enumerate(at, 1)]
        if min(at) == total - 1 or any(last >= n for (_, last), n in zip(before, at, strict=True)):
            break


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_what_a_slot_held_before_makes_no_difference(broken: float, by_kernel: bool) -> None:
    # A genome whose numbers overflow left NaN, and 0 x NaN is NaN in whoever came next.
    layer = AttentionLayer(0, 0.3)
    prompt, newest = _rows(5, seed=1), _rows(16, seed=2)
    outs: list[list[torch.Tensor]] = []
    for left in (0.0, broken):
        cache = (KernelCache if by_kernel else SlotCache)(16, 64)
        _fill(cache, *(torch.full((16, 64, KV_HEADS, WIDTH), left) for _ in range(2)))
        positions = torch.zeros(16, dtype=torch.int64)
        positions[3] = 5
        prefill: AttentionRows = PrefillRows([0], [5], CPU, cache, [3])
        decode: AttentionRows = DecodeRows(cache, positions)
        if isinstance(cache, KernelCache):
            prefill, decode = _prefilling(cache, [3], [0], [5]), _decoding(cache, positions)
        outs.append([prefill.attend(layer, *prompt), decode.attend(layer, *newest)[3]])
    assert all(map(torch.equal, *outs))
    assert all(out.isfinite().all() for out in outs[0])


def test_kept_slots_move_to_the_front_in_order() -> None:
    cache = SlotCache(4, 64)
    _, k, v = _rows(3, seed=0)
    PrefillRows([0, 1, 2], [1, 1, 1], CPU, cache, [3, 1, 2]).attend(
        AttentionLayer(0, scale=1.0), torch.zeros(3, HEADS, WIDTH), k, v
    )
    cache.keep(torch.tensor([2, 3]))
    keys, values = cache.of_slots(0, slice(2), 1)
    assert torch.equal(keys[:, :, 0], k[[2, 0]])
    assert torch.equal(values[:, :, 0], v[[2, 0]])
