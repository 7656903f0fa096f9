"""Attention over a slot cache against the textbook's, one query at a time."""

import math
import random
import sys

import psutil
import pytest
import torch

from es_cookbook.engines.torch.attention import (
    AttentionLayer,
    AttentionRows,
    KernelCache,
    Run,
    SequenceTable,
    TokenCache,
    attention_rows,
)
from es_cookbook.engines.torch.kernels.attention import STEP
from tests.families import sampled

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def _table(num_sequences: int, length: int) -> SequenceTable:
    """Sequences one after the other, after a block of of no request."""
    table = SequenceTable(num_sequences)
    for sequence in range(num_sequences):
        table.put(sequence, [(0, STEP + sequence * length)])
    return table


def _cache(kind: type[TokenCache], num_sequences: int, length: int) -> TokenCache:
    cache = kind(1 + num_sequences * length // STEP)
    cache.num_reached = cache.num_blocks
    return cache


def _rows(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num, HEADS, WIDTH), (num, KV_HEADS, WIDTH), (num, KV_HEADS, WIDTH))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def _prefilling(
    cache: TokenCache,
    table: SequenceTable,
    sequences: list[int],
    starts: list[int],
    lengths: list[int],
    firsts: list[int] | None = None,
    num_rows: int | None = None,
) -> AttentionRows:
    """Rows after the last prompt are of no request."""
    firsts = firsts or [0] * len(starts)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    sequences_T = torch.full((num_rows or ends[-1],), -1)
    positions_T = torch.zeros_like(sequences_T)
    for i, sequence in enumerate(sequences):
        sequences_T[starts[i] : ends[i]] = sequence
        positions_T[starts[i] : ends[i]] = torch.arange(lengths[i]) + firsts[i]
    return attention_rows(sequences_T, positions_T, table, cache)


def _decoding(cache: TokenCache, table: SequenceTable, positions: torch.Tensor) -> AttentionRows:
    """A row for each of the table's sequences."""
    return attention_rows(torch.arange(len(positions)), positions, table, cache)


def _naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """One sequence, (T, heads, d) each, in float64 and loops."""
    out, (heads, kv_heads) = torch.zeros_like(q), (q.shape[1], k.shape[1])
    for t in range(len(q)):
        first = 0 if window is None else max(0, t - window + 1)
        for h in range(heads):
            keys = k[first : t + 1, h * kv_heads // heads].double()
            values = v[first : t + 1, h * kv_heads // heads].double()
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
    cache, table = _cache(KernelCache if by_kernel else TokenCache, 16, 64), _table(16, 64)

    flat = [
        torch.cat([s[i][:n] for s, n in zip(sequences, prompts, strict=True)]) for i in range(3)
    ]
    padded = [torch.cat([part, torch.zeros(3, *part.shape[1:])]) for part in flat]
    starts = [sum(prompts[:i]) for i in range(len(prompts))]
    prefill = _prefilling(cache, table, slots, starts, prompts, num_rows=len(padded[0]))
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
        decode = _decoding(cache, table, positions)
        out = decode.attend(AttentionLayer(0, **options), q, k, v)
        for i, slot in enumerate(slots):
            torch.testing.assert_close(out[slot], expected[i][at[i]])
            at[i] = min(at[i] + 1, total - 1)


SHAPES = [(1, 1, 8), (4, 2, 8), (2, 2, 40), (3, 1, 32), (4, 2, 32), (4, 1, 64), (8, 1, 128)]
"""Heads, heads of keys, and their width."""


def _randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _fill(
    cache: TokenCache, table: SequenceTable, k_S_T: torch.Tensor, v_S_T: torch.Tensor
) -> None:
    """Write whole sequences: (sequences, tokens, kv heads, d) each."""
    num, length = k_S_T.shape[:2]
    starts = [i * length for i in range(num)]
    rows = _prefilling(cache, table, list(range(num)), starts, [length] * num)
    q = torch.zeros(num * length, *k_S_T.shape[2:])
    rows.attend(AttentionLayer(0, 1.0), q, k_S_T.flatten(0, 1), v_S_T.flatten(0, 1))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_earlier_contents_of_a_slot_make_no_difference(broken: float, by_kernel: bool) -> None:
    # A genome whose numbers overflow left NaN, and 0 x NaN is NaN in whoever came next.
    layer = AttentionLayer(0, 0.3)
    prompt, newest = _rows(5, seed=1), _rows(16, seed=2)
    outs: list[list[torch.Tensor]] = []
    for left in (0.0, broken):
        cache, table = _cache(KernelCache if by_kernel else TokenCache, 16, 64), _table(16, 64)
        _fill(cache, table, *(torch.full((16, 64, KV_HEADS, WIDTH), left) for _ in range(2)))
        positions = torch.zeros(16, dtype=torch.int64)
        positions[3] = 5
        prefill = _prefilling(cache, table, [3], [0], [5])
        decode = _decoding(cache, table, positions)
        outs.append([prefill.attend(layer, *prompt), decode.attend(layer, *newest)[3]])
    assert all(map(torch.equal, *outs))
    assert all(out.isfinite().all() for out in outs[0])


@pytest.mark.daily
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), sampled(SHAPES, 3))
@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_sequence_attends_with_the_same_bits_wherever_it_lies_and_in_any_parts(
    by_kernel: bool, heads: int, kv_heads: int, width: int, window: int | None
) -> None:
    total = 100
    layer = AttentionLayer(0, 0.3, window)
    states = [_randn(i, total, n, width) for i, n in enumerate((heads, kv_heads, kv_heads))]
    rng = random.Random(width)
    outs: list[torch.Tensor] = []
    for attempt in range(12):
        # Runs of any lengths in any order.
        begins = sorted({0, *rng.choices(range(1, total), k=attempt)})
        blocks = list(range(1, 1 + 9 * len(begins), 9))
        rng.shuffle(blocks)
        runs: list[Run] = [
            (begin, block * STEP - begin) for begin, block in zip(begins, blocks, strict=True)
        ]
        table, cache = SequenceTable(2), (KernelCache if by_kernel else TokenCache)(200)
        cache.num_reached = cache.num_blocks
        table.put(1, runs)
        at, parts = 0, list[torch.Tensor]()
        while at < total:  # in parts of several lengths
            end = min(total, at + rng.choice((1, 7, 30, 60)))
            rows = _prefilling(cache, table, [1], [0], [end - at], [at])
            parts.append(rows.attend(layer, *(each[at:end] for each in states)))
            at = end
        outs.append(torch.cat(parts))
    if by_kernel:
        assert all(torch.equal(out, outs[0]) for out in outs)
    for out in outs:
        torch.testing.assert_close(out, _naive(*states, window, None))


@pytest.mark.skipif(sys.platform != "linux", reason="the sizes of others' pages differ")
def test_a_cache_takes_memory_for_few_large_pages() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    cache, before = KernelCache(1 << 14), resident()
    for layer in range(4):
        blocks = cache.layer(layer, 8 * 2 * 64)
        assert blocks.nbytes == 1 << 30
        blocks[:10] = 1.0
        assert not blocks[10:20].any()
    assert resident() - before < 40 << 20, "128 MB if each of 8 heads had its own large pages"
