"""Attention over a slot cache: what the rows of a batch see.

A lane keeps one key-value cache of fixed slots, a slot a request. A prefill batch holds what is new
of several prompts, ragged, and fills slots; a decode batch holds one row a slot and reads what the
slots hold.

A token attends with the same bits whether it is prefilled or decoded, and whatever its neighbours
are: a row of a batched matmul has the same bits for any number of rows, and of columns, as long as
there are enough of both, keys lie in memory as the product reads them, and sums over positions are
made of pieces with fixed ends. What lies beyond a row's own position is masked, whatever it is, and
contributes exactly nothing. So keys and values may be kept from one turn to the next (see
`prefix_cache`). Tests with random lengths and numbers of heads hold this to account.
"""

import dataclasses
import math
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from es_cookbook.engines.torch.forward.prefix_cache import LayerStates, States

LENGTH_STEP = 8
"""Tokens to which the new part of a prompt is padded, and cache views are lengthened."""
MIN_LENGTH = 64
"""Shortest cache view, and shortest piece of a sum over positions: below it, the softmax or the
BLAS may add in another order."""
_MIN_QUERIES = 4
"""Fewest rows of a member of a batched matmul: the BLAS multiplies fewer by other kernels."""
_PIECE = 192
"""Positions of one piece of the weighted sum of values. The BLAS divides longer ones (from 193 on
with AVX2, which MKL also takes on AMD's processors, from 385 on with AVX-512) in the middle, so
that a row's bits would depend on the longest row beside it."""
_ALIGNMENT = 64
"""Bytes to which torch aligns its own memory."""
_MAX_ELEMENTS = 1 << 24
"""Most attention scores, or keys and values, held at once while prefilling prompts of one padded
length."""


def round_up(number: int, step: int) -> int:
    """Smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def _view_length(longest: int) -> int:
    """Length of a cache view for so many tokens, whose last piece is long enough."""
    length = max(MIN_LENGTH, round_up(longest, LENGTH_STEP))
    return round_up(length, MIN_LENGTH) if 0 < length % _PIECE < MIN_LENGTH else length


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

    Layers are allocated when they are first written, so that the cache needs to know nothing of the
    architecture. Values are always finite, so that one with no weight contributes exactly nothing.

    Args:
        slot_length: a multiple of `MIN_LENGTH`.
    """

    def __init__(self, num_slots: int, slot_length: int) -> None:
        self.num_slots = num_slots
        self.slot_length = slot_length
        self._layers: dict[int, LayerStates] = {}

    def write(
        self,
        index: int,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        k_T: torch.Tensor,
        v_T: torch.Tensor,
    ) -> None:
        """Write a layer's keys and values of these (slot, position)."""
        keys, values = self._layer(index, k_T, v_T.shape[-1])
        keys[slots_T, :, :, positions_T] = k_T
        values[slots_T, :, positions_T] = torch.nan_to_num(v_T)

    def of_slots(self, index: int, slots: torch.Tensor | slice, length: int) -> LayerStates:
        """A layer's first positions: keys (slots, kv heads, d, length), values (…, length, d)."""
        keys, values = self._layers[index]
        return keys[slots, :, :, :length], values[slots, :, :length]

    def _layer(self, index: int, like: torch.Tensor, value_width: int) -> LayerStates:
        if index not in self._layers:
            kv_heads, width = like.shape[1:]
            keys = _zeros(like, self.num_slots, kv_heads, width, self.slot_length)
            values = _zeros(like, self.num_slots, kv_heads, self.slot_length, value_width)
            self._layers[index] = (keys, values)
        return self._layers[index]

    def copy(self, slot: int, length: int) -> States:
        """A copy of a slot's first tokens."""
        return {
            index: (keys[slot, :, :, :length].clone(), values[slot, :, :length].clone())
            for index, (keys, values) in self._layers.items()
        }

    def paste(self, slot: int, length: int, states: States) -> None:
        """Fill a slot's first tokens with those of a copy, which may have more of them."""
        for index, (k, v) in states.items():
            keys, values = self._layer(index, k.permute(2, 0, 1), v.shape[-1])
            keys[slot, :, :, :length] = k[:, :, :length]
            values[slot, :, :length] = v[:, :length]

    def keep(self, slots: torch.Tensor) -> None:
        """Move these slots to the front, in this order."""
        for pair in self._layers.values():
            for by_slot in pair:
                by_slot[: len(slots)] = by_slot[slots]


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """As `like.new_zeros`, but on the CPU memory that is never used is not touched either."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    num_bytes = math.prod(shape) * like.element_size()
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(like.dtype).view(shape)


def _attend(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Softmax of scaled, capped and masked scores, times values.

    Args:
        layer: how.
        q: (sequences, kv heads, heads a kv head, queries, d).
        k: (sequences, kv heads, d, length).
        v: (sequences, kv heads, length, d).
        hidden: (sequences, queries, length), what a query does not see.

    Returns:
        (sequences, kv heads, heads a kv head, queries, d).
    """
    num, kv_heads, repeats, queries, width = q.shape
    rows = repeats * queries
    q = q.reshape(num * kv_heads, rows, width)
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    if len(q) == 1:  # alone, a member of a batched matmul takes another code path
        q, k, v = (member.expand(2, -1, -1) for member in (q, k, v))
    # Also where nothing is added: the copy has strides of its own, on which the code path depends.
    q = torch.nn.functional.pad(q, (0, 0, 0, max(0, _MIN_QUERIES - rows)))
    # Kernels differ in where they would multiply by a factor of the product.
    scale = layer.scale if layer.softcap is None else layer.scale / layer.softcap
    scores = torch.bmm(q * scale, k)
    if layer.softcap is not None:
        scores = scores.tanh_().mul_(layer.softcap)
    # Filled, not added to: what a slot held before may be anything.
    own = scores[: num * kv_heads, :rows].view(num, kv_heads, repeats, queries, -1)
    own.masked_fill_(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.bmm(weights[..., :_PIECE], v[:, :_PIECE])
    for first in range(_PIECE, v.shape[1], _PIECE):
        piece = slice(first, first + _PIECE)
        out.baddbmm_(weights[..., piece], v[:, piece])
    return out[: num * kv_heads, :rows].view(num, kv_heads, repeats, queries, -1)


def _hidden(positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Which of `length` positions a token at its own does not see: (..., length)."""
    at, own = torch.arange(length, device=positions.device), positions[..., None]
    return at > own if window is None else (at > own) | (at <= own - window)


class DecodeRows(AttentionRows):
    """One row a slot: row i is slot i's newest token, at its own position."""

    def __init__(self, cache: SlotCache, positions_S: torch.Tensor) -> None:
        self._cache = cache
        self._positions_S = positions_S
        self._slots_S = torch.arange(len(positions_S), device=positions_S.device)
        self._length = _view_length(int(positions_S.max()) + 1)
        self._hidden: dict[int | None, torch.Tensor] = {}

    @override
    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        num, heads, width = q_T.shape
        self._cache.write(layer.index, self._slots_S, self._positions_S, k_T, v_T)
        keys, values = self._cache.of_slots(layer.index, slice(num), self._length)
        if layer.window not in self._hidden:
            hidden = _hidden(self._positions_S, self._length, layer.window)
            self._hidden[layer.window] = hidden[:, None]
        q = q_T.reshape(num, k_T.shape[1], -1, 1, width)
        out = _attend(layer, q, keys, values, self._hidden[layer.window])
        return out.reshape(num, heads, -1).contiguous()  # some models view it otherwise


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptGroup:
    """Prompts whose new parts, and wholes, have one padded length: N of them, M new rows each.

    Attributes:
        rows_N_M: flat row of each new token, beyond a prompt's end that of its last one.
        positions_N_M: and its position.
        slots_N: of the prompts, where there is a cache.
        tokens_T: which of these N · M are tokens.
        rows_T, positions_T, slots_T: of those alone, the same for all layers.
        length: of a view that holds the whole prompts.
    """

    rows_N_M: torch.Tensor
    positions_N_M: torch.Tensor
    slots_N: torch.Tensor
    tokens_T: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    length: int


class PrefillRows(AttentionRows):
    """New parts of prompts, one after the other; a token sees its own prompt up to itself.

    Args:
        starts: first flat row of each prompt.
        lengths: rows of each prompt.
        cache: where keys and values go, or None where nothing is decoded afterwards.
        slots: the slot of each prompt, with a cache.
        firsts: position of each prompt's first row, whose slot holds what is before it; 0 if not
            given.
    """

    def __init__(
        self,
        starts: list[int],
        lengths: list[int],
        device: torch.device,
        cache: SlotCache | None = None,
        slots: list[int] | None = None,
        firsts: list[int] | None = None,
    ) -> None:
        self._cache = cache
        firsts = firsts or [0] * len(starts)
        slots = slots or [0] * len(starts)
        by_length: dict[tuple[int, int], list[int]] = {}
        for i, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            padded = round_up(length, LENGTH_STEP), _view_length(first + length)
            by_length.setdefault(padded, []).append(i)
        self._groups: list[_PromptGroup] = []
        for (padded, whole), members in by_length.items():
            start, length, first, slot = (
                torch.tensor([numbers[i] for i in members])[:, None]
                for numbers in (starts, lengths, firsts, slots)
            )
            at = torch.minimum(torch.arange(padded), length - 1)
            tokens_T = (torch.arange(padded) < length).flatten().nonzero().flatten()
            rows_N_M, positions_N_M = start + at, first + at
            slots_N_M = slot.expand(-1, padded)
            group = _PromptGroup(
                rows_N_M.to(device),
                positions_N_M.to(device),
                slot[:, 0].to(device),
                tokens_T.to(device),
                rows_N_M.flatten()[tokens_T].to(device),
                positions_N_M.flatten()[tokens_T].to(device),
                slots_N_M.flatten()[tokens_T].to(device),
                whole,
            )
            self._groups.append(group)

    @override
    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        (heads, width), (kv_heads, value_width) = q_T.shape[1:], v_T.shape[1:]
        out_T = q_T.new_zeros(q_T.shape[0], heads, value_width)
        for group in self._groups:
            num, queries = group.rows_N_M.shape
            if self._cache is not None:
                new = group.slots_T, group.positions_T, k_T[group.rows_T], v_T[group.rows_T]
                self._cache.write(layer.index, *new)
            of_prompt = max(heads * queries, kv_heads * (width + value_width)) * group.length
            parts = [
                self._attend_part(layer, group, part, q_T, k_T, v_T)
                for part in torch.arange(num, device=q_T.device).split(
                    max(1, _MAX_ELEMENTS // of_prompt)
                )
            ]
            out_T[group.rows_T] = torch.cat(parts).flatten(0, 1)[group.tokens_T]
        return out_T

    def _attend_part(
        self,
        layer: AttentionLayer,
        group: _PromptGroup,
        part: torch.Tensor,
        q_T: torch.Tensor,
        k_T: torch.Tensor,
        v_T: torch.Tensor,
    ) -> torch.Tensor:
        """(part, M, heads, d) of some prompts of a group."""
        rows = group.rows_N_M[part]
        if self._cache is not None:
            keys, values = self._cache.of_slots(layer.index, group.slots_N[part], group.length)
        else:
            padding = rows[:, -1:].expand(-1, group.length - rows.shape[1])
            whole = torch.cat([rows, padding], dim=1)
            keys = k_T[whole].permute(0, 2, 3, 1).contiguous()
            values = torch.nan_to_num(v_T[whole].transpose(1, 2))
        q = q_T[rows].unflatten(2, (k_T.shape[1], -1)).permute(0, 2, 3, 1, 4)
        hidden = _hidden(group.positions_N_M[part], group.length, layer.window)
        out = _attend(layer, q, keys, values, hidden)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)
