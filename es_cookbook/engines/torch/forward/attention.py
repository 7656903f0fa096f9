"""Attention over a slot cache: what the rows of a batch see.

A lane keeps one key-value cache of fixed slots, a slot a request. A prefill batch holds whole
prompts, ragged, and fills slots; a decode batch holds one row a slot and reads what the slots hold.
Shapes follow the request alone, never its neighbours: prompts are padded to a multiple of
`LENGTH_STEP` and grouped by padded length, and decoding masks what lies beyond a row's own position
(a longer cache view gives the same bits; a test holds it to account).
"""

import dataclasses
from typing import Protocol

import torch
from typing_extensions import override

LENGTH_STEP = 8
"""Prompts are padded to a multiple of this many tokens, and cache views are as long."""
_MIN_LENGTH = 16
"""Shortest cache view: below a vector register's width, the softmax adds in another order."""
_MIN_PRODUCTS = 400
"""torch hands members of a batched matmul that take fewer multiplications than this to a plain
loop, which adds in another order; cache views are long enough to stay above."""
_MOST_WIDTH = 64
"""The BLAS adds up scores in another order where there are fewer of them than a head is wide, so
cache views are as long as that. Slots have at least this many tokens; of wider heads a view may be
shorter than the head, and a row's bits then depend on the longest row beside it."""
_MAX_SCORES = 1 << 24
"""Most attention scores held at once while prefilling prompts of one padded length."""


def round_up(number: int, step: int) -> int:
    """Smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends.

    Attributes:
        index: which layer, for the cache.
        scale: factor on scores.
        window: most positions seen, the token's own included; None for all before it.
        softcap: scores are squashed to ± this (Gemma 2); None for not.
    """

    index: int
    scale: float
    window: int | None = None
    softcap: float | None = None


class AttentionRows(Protocol):
    """How the rows of a batch attend: prefill, decode and scoring batches each in their way."""

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        """Attention for flat rows: q (T, heads, d), k and v (T, kv heads, d) -> (T, heads, d)."""
        ...


class SlotCache:
    """Keys and values of `num_slots` requests of at most `slot_length` tokens, for every layer.

    Layers are allocated when attention first writes them, so that the cache needs to know nothing
    of the architecture. Memory starts as zeros and is always finite: a masked position contributes
    exactly nothing.
    """

    def __init__(self, num_slots: int, slot_length: int) -> None:
        self.num_slots = num_slots
        self.slot_length = slot_length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, (num_slots · kv heads · slot_length, d) each."""
        if index not in self._layers:
            self._layers[index] = (self._allocate(k_T), self._allocate(v_T))
        return self._layers[index]

    def _allocate(self, rows_T: torch.Tensor) -> torch.Tensor:
        kv_heads, width = rows_T.shape[1:]
        return rows_T.new_zeros(self.num_slots * kv_heads * self.slot_length, width)

    def rows(self, slots_T: torch.Tensor, positions_T: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Cache rows of each (slot, position), all heads: (T · kv heads,)."""
        heads = torch.arange(kv_heads, device=slots_T.device)
        first_T = slots_T * (kv_heads * self.slot_length) + positions_T
        return (first_T[:, None] + heads * self.slot_length).flatten()

    def keep(self, slots: torch.Tensor) -> None:
        """Move these slots to the front, in this order."""
        for pair in self._layers.values():
            for cache in pair:
                by_slot = cache.view(self.num_slots, -1)
                by_slot[: len(slots)] = by_slot[slots]


def _attend(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Softmax of scaled, capped and masked scores, times v; the mask is float32.

    Capped scores are rare (Gemma 2); the others take one pass. A single member is given a twin:
    alone, a batched matmul takes another code path, so bits would depend on the batch's size.
    """
    if q.shape[0] == 1:
        q, k, v = (member.expand(2, -1, -1) for member in (q, k, v))
        return _attend(layer, q, k, v, mask)[:1]
    mask, k_t = mask.to(q.dtype), k.transpose(1, 2)
    softcap = layer.softcap
    if softcap is None:
        scores = torch.baddbmm(mask, q, k_t, alpha=layer.scale)
    else:
        scores = torch.bmm(q, k_t).mul_(layer.scale / softcap).tanh_().mul_(softcap).add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


class DecodeRows(AttentionRows):
    """One row a slot: row i is slot i's newest token, at its own position."""

    def __init__(self, cache: SlotCache, positions_S: torch.Tensor) -> None:
        self.cache = cache
        self._positions_S = positions_S
        self._longest = round_up(int(positions_S.max()) + 1, LENGTH_STEP)
        self._rows: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int | None, int, int, int], torch.Tensor] = {}

    @override
    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        num_rows, heads, width = q_T.shape
        kv_heads, value_width = v_T.shape[1:]
        keys, values = self.cache.layer(layer.index, k_T, v_T)
        if kv_heads not in self._rows:
            slots = torch.arange(num_rows, device=q_T.device)
            self._rows[kv_heads] = self.cache.rows(slots, self._positions_S, kv_heads)
        keys.index_copy_(0, self._rows[kv_heads], k_T.reshape(-1, width))
        values.index_copy_(0, self._rows[kv_heads], v_T.reshape(-1, value_width))
        members = num_rows * kv_heads
        mask = self._mask(layer.window, kv_heads, heads, min(width, value_width))
        length = mask.shape[-1]
        k_view = keys.view(-1, self.cache.slot_length, width)[:members, :length]
        v_view = values.view(-1, self.cache.slot_length, value_width)[:members, :length]
        q = q_T.reshape(members, heads // kv_heads, width)
        return _attend(layer, q, k_view, v_view, mask).view(num_rows, heads, value_width)

    def _mask(self, window: int | None, kv_heads: int, heads: int, width: int) -> torch.Tensor:
        """(rows * kv heads, heads a kv head, length): 0 where the row sees the position."""
        kind = (window, kv_heads, heads, width)
        if kind not in self._masks:
            least = -(-_MIN_PRODUCTS // (heads // kv_heads * width))
            least = max(_MIN_LENGTH, least, min(width, _MOST_WIDTH))
            length = max(round_up(least, LENGTH_STEP), self._longest)
            at = torch.arange(length, device=self._positions_S.device)
            last = self._positions_S[:, None]
            hidden = at > last if window is None else (at > last) | (at <= last - window)
            of_heads = _additive(hidden)[:, None].expand(-1, heads, -1)
            self._masks[kind] = of_heads.reshape(-1, heads // kv_heads, length)
        return self._masks[kind]


def _additive(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


class PrefillRows(AttentionRows):
    """Whole prompts, ragged, one after the other; a token sees its own prompt up to itself.

    Args:
        starts: first flat row of each prompt.
        lengths: tokens of each prompt.
        cache: where keys and values go, or None where nothing is decoded afterwards.
        slots: the slot of each prompt, with a cache.
    """

    def __init__(
        self,
        starts: list[int],
        lengths: list[int],
        device: torch.device,
        cache: SlotCache | None = None,
        slots: list[int] | None = None,
    ) -> None:
        self._cache = cache
        # Prompts of one padded length: flat row of each token, (N, L), beyond a prompt's end of its
        # last one; which of these N · L are tokens; flat rows of those.
        self._groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        by_length: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            by_length.setdefault(round_up(length, LENGTH_STEP), []).append(i)
        for padded, members in by_length.items():
            at = torch.arange(padded)
            first = torch.tensor([starts[i] for i in members])[:, None]
            length = torch.tensor([lengths[i] for i in members])[:, None]
            rows = first + torch.minimum(at, length - 1)
            valid = (at < length).flatten()
            tokens, token_rows = valid.nonzero().flatten(), rows.flatten()[valid]
            self._groups.append((rows.to(device), tokens.to(device), token_rows.to(device)))
        self._cached_rows: dict[int, torch.Tensor] = {}
        if cache is not None and slots is not None:
            spans = [torch.arange(n) for n in lengths]
            flat = [start + span for start, span in zip(starts, spans, strict=True)]
            self._flat = torch.cat(flat).to(device)
            self._positions = torch.cat(spans).to(device)
            self._slots = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device)

    @override
    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        heads, (kv_heads, value_width) = q_T.shape[1], v_T.shape[1:]
        if self._cache is not None:
            self._write(self._cache, layer.index, k_T, v_T)
        out_T = q_T.new_zeros(q_T.shape[0], heads, value_width)
        for rows_N_L, tokens, token_rows in self._groups:
            padded = rows_N_L.shape[1]
            mask = _causal(padded, layer.window, q_T.device).repeat(heads // kv_heads, 1)
            at_once = max(1, _MAX_SCORES // (heads * padded * padded))
            parts = [
                self._attend_same_length(layer, rows, q_T, k_T, v_T, mask)
                for rows in rows_N_L.split(at_once)
            ]
            out_T[token_rows] = torch.cat(parts).flatten(0, 1)[tokens]
        return out_T

    @staticmethod
    def _attend_same_length(
        layer: AttentionLayer,
        rows_N_L: torch.Tensor,
        q_T: torch.Tensor,
        k_T: torch.Tensor,
        v_T: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """(N, L, heads, d) from the prompts' own rows; heads that share keys are stacked."""
        num, padded = rows_N_L.shape
        kv_heads = k_T.shape[1]
        q = q_T[rows_N_L].view(num, padded, kv_heads, -1, q_T.shape[2]).permute(0, 2, 3, 1, 4)
        repeats = q.shape[2]
        k = k_T[rows_N_L].transpose(1, 2).flatten(0, 1)
        v = v_T[rows_N_L].transpose(1, 2).flatten(0, 1)
        q = q.reshape(num * kv_heads, repeats * padded, -1)
        out = _attend(layer, q, k, v, mask)
        return out.view(num, kv_heads, repeats, padded, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _write(self, cache: SlotCache, layer: int, k_T: torch.Tensor, v_T: torch.Tensor) -> None:
        kv_heads = k_T.shape[1]
        if kv_heads not in self._cached_rows:
            self._cached_rows[kv_heads] = cache.rows(self._slots, self._positions, kv_heads)
        for cached, new in zip(cache.layer(layer, k_T, v_T), (k_T, v_T), strict=True):
            cached.index_copy_(0, self._cached_rows[kv_heads], new[self._flat].flatten(0, 1))


def _causal(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    at = torch.arange(length, device=device)
    hidden = at > at[:, None]
    if window is not None:
        hidden |= at <= at[:, None] - window
    return _additive(hidden)
