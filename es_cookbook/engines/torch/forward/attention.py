"""Attention over a slot cache: what the rows of a batch see.

A lane keeps one key-value cache of fixed slots, a slot a request. A prefill batch holds what is new
of several prompts, ragged, and fills slots; a decode batch holds one row a slot and reads what the
slots hold.

On the CPU a kernel of our own takes token after token (`kernels.attention`). A token attends with
the same bits whether it is prefilled or decoded, and whatever its neighbours are, because it reads
its own positions alone. So keys and values may be kept from one turn to the next (see
`flat.PrefixCache`). Tests with random lengths and numbers of heads hold this to account. On other
devices attention is a few operations of torch, over views as long as the longest row; what lies
beyond a row's own position is masked, whatever it is, and contributes exactly nothing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel
from typing_extensions import override

from es_cookbook.engines.torch.kernels.attention import (
    STEP,
    Cache,
    Looks,
    attend,
    attend_rotated,
)
from es_cookbook.engines.torch.kernels.modules import LinearOutputs, rows_of

_IMPLIED_BY_ROWS = ("position_ids", "cache_position")
"""Tensors that transformers hands on to attention and that say no more than the batch does."""
LENGTH_STEP = 8
"""Tokens to which the new part of a prompt is padded, and cache views are lengthened."""
_ALIGNMENT = 64
"""Bytes to which torch aligns its own memory."""
_MAX_ELEMENTS = 1 << 24
"""Most attention scores, or keys and values, held at once while prefilling prompts of one padded
length."""


LayerStates: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys (kv heads, d, tokens) and values (kv heads, tokens, d) of one request in one layer."""
States: TypeAlias = Mapping[int, LayerStates]
"""Of every layer, by its index."""
_Block: TypeAlias = tuple[int, ...]
"""Shape of what is kept of `STEP` tokens in one layer."""


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

    @property
    def looks(self) -> Looks:
        """The same as kernels take it."""
        return self.scale, self.softcap or 0.0, self.window or 0


class SlotCache:
    """Keys and values of `num_slots` requests of at most `slot_length` tokens, for every layer.

    Layers are allocated when they are first written, so that the cache needs to know nothing of the
    architecture. Tokens lie in blocks of `STEP`: keys are (slots, kv heads, blocks, STEP, d), and
    so are values.

    Args:
        slot_length: a multiple of `STEP`.
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
        keys, values = self.layer(index, k_T, v_T)
        where = slots_T, slice(None), positions_T // STEP, positions_T % STEP
        keys[where] = k_T
        # Finite, so that a value with no weight contributes exactly nothing.
        values[where] = torch.nan_to_num(v_T)

    def of_slots(self, index: int, slots: torch.Tensor | slice, length: int) -> LayerStates:
        """A layer's first positions, of both: (slots, kv heads, length, d)."""
        keys, values = self._layers[index]
        blocks = round_up(length, STEP) // STEP
        k, v = (each[slots, :, :blocks].flatten(2, 3) for each in (keys, values))
        return k[:, :, :length], v[:, :, :length]

    def layer(self, index: int, k_T: torch.Tensor, v_T: torch.Tensor) -> LayerStates:
        """All keys and values of a layer, like these of some tokens: (tokens, kv heads, d)."""
        if index not in self._layers:
            self._layers[index] = self._new(*self._blocks(k_T, v_T), k_T)
        return self._layers[index]

    def _blocks(self, k_T: torch.Tensor, v_T: torch.Tensor) -> tuple[_Block, _Block]:
        """Shapes of a block of keys and of values, (kv heads, rows, columns)."""
        kv_heads, width = k_T.shape[1:]
        return (kv_heads, STEP, width), (kv_heads, STEP, v_T.shape[2])

    def _new(self, of_keys: _Block, of_values: _Block, like: torch.Tensor) -> LayerStates:
        keys, values = (
            self._zeros((self.num_slots, heads, self.slot_length // STEP, *block), like)
            for heads, *block in (of_keys, of_values)
        )
        return keys, values

    def _zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(shape)

    def copy(self, slot: int, length: int) -> States:
        """A copy of a slot's first tokens, in whole blocks."""
        blocks = round_up(length, STEP) // STEP
        return {
            index: (keys[slot, :, :blocks].clone(), values[slot, :, :blocks].clone())
            for index, (keys, values) in self._layers.items()
        }

    def paste(self, slot: int, length: int, states: States) -> None:
        """Fill a slot's first tokens with those of a copy, which may have more of them."""
        blocks = round_up(length, STEP) // STEP
        for index, copied in states.items():
            if index not in self._layers:
                k, v = copied
                of_keys, of_values = (len(k), *k.shape[2:]), (len(v), *v.shape[2:])
                self._layers[index] = self._new(of_keys, of_values, k)
            for held, part in zip(self._layers[index], copied, strict=True):
                held[slot, :, :blocks] = part[:, :blocks]

    def keep(self, slots: torch.Tensor) -> None:
        """Move these slots to the front, in this order."""
        for pair in self._layers.values():
            for by_slot in pair:
                by_slot[: len(slots)] = by_slot[slots]


class KernelCache(SlotCache):
    """As the kernel reads it, on the CPU: keys of a block as (d, STEP), in float32 or bfloat16.

    Values have columns for whole steps of the kernel. Memory that is never used is not touched.
    """

    @override
    def _blocks(self, k_T: torch.Tensor, v_T: torch.Tensor) -> tuple[_Block, _Block]:
        kv_heads, width = k_T.shape[1:]
        return (kv_heads, width, STEP), (kv_heads, STEP, round_up(v_T.shape[2], STEP))

    def __init__(
        self, num_slots: int, slot_length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(num_slots, slot_length)
        self.dtype = dtype

    @override
    def _zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        memory = np.zeros(math.prod(shape) * self.dtype.itemsize + _ALIGNMENT, dtype=np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        whole = torch.from_numpy(memory[first : len(memory) - _ALIGNMENT + first])
        return whole.view(self.dtype).view(*shape)


class KernelRows:
    """Tokens of any slots on the CPU, in the order of their positions.

    Args:
        slots_T: of each row; negative for rows that are nobody's.
        positions_T: of each row, in its slot.
        cache: where keys and values go; None where nothing is decoded afterwards.
        dtype: of a cache for the while, in that case.
    """

    def __init__(
        self,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache: KernelCache | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._where = slots_T.numpy(), positions_T.numpy()
        self._cache = cache
        self._dtype = dtype

    def _layer(self, index: int, k_T: torch.Tensor, v_T: torch.Tensor) -> Cache:
        """A layer's keys and values, for these of some tokens."""
        cache = self._cache
        if cache is None:
            num_slots, length = (int(numbers.max()) + 1 for numbers in self._where)
            cache = KernelCache(num_slots, round_up(length, STEP), self._dtype)
        keys, values = cache.layer(index, k_T, v_T)
        return rows_of(keys), rows_of(values)

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        """Attention for flat rows: q (T, heads, d), k and v (T, kv heads, d) -> (T, heads, d)."""
        cache = self._layer(layer.index, k_T, v_T)
        out_T = torch.empty(*q_T.shape[:2], v_T.shape[-1])
        states = (q_T.float().numpy(), k_T.float().numpy(), v_T.float().numpy())
        attend(states, cache, self._where, layer.looks, out_T.numpy())
        return out_T.to(q_T.dtype)

    def attend_rotated(
        self, layer: AttentionLayer, linear: LinearOutputs, heads: tuple[int, int]
    ) -> torch.Tensor:
        """As the kernel `attend_rotated`; heads are (number of kv heads, d)."""
        y_T_N, x_T_N, factors, rotary, norms = linear
        kv_heads, size = heads
        of_kv = y_T_N.view(len(y_T_N), -1, size)[:, :kv_heads]
        cache = self._layer(layer.index, of_kv, of_kv)
        if rotary is None:  # of layers without positions
            rotary = (torch.empty(1, len(y_T_N), 0),) * 2
        cos_T_N, sin_T_N = (each[0].numpy() for each in rotary)
        out_T_N = y_T_N.new_empty(len(y_T_N), y_T_N.shape[1] - 2 * kv_heads * size)
        turned = rows_of(y_T_N), rows_of(x_T_N), factors, (cos_T_N, sin_T_N), norms
        attend_rotated(turned, cache, self._where, layer.looks, rows_of(out_T_N))
        return out_T_N


def _attend(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Softmax of scaled, capped and masked scores, times values.

    Args:
        layer: how.
        q: (sequences, kv heads, heads a kv head, queries, d).
        k: (sequences, kv heads, length, d).
        v: (sequences, kv heads, length, d).
        hidden: (sequences, queries, length), what a query does not see.

    Returns:
        (sequences, kv heads, heads a kv head, queries, d).
    """
    _, _, repeats, queries, _ = q.shape
    scores = q.flatten(2, 3) @ k.mT * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    # Filled, not added to: what a slot held before may be anything.
    scores = scores.unflatten(2, (repeats, queries)).masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights.flatten(2, 3) @ v).unflatten(2, (repeats, queries))


def _hidden(positions: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Which of `length` positions a token at its own does not see: (..., length)."""
    at, own = torch.arange(length, device=positions.device), positions[..., None]
    return at > own if window is None else (at > own) | (at <= own - window)


class DecodeRows:
    """One row a slot, by torch: row i is slot i's newest token, at its own position."""

    def __init__(self, cache: SlotCache, positions_B: torch.Tensor) -> None:
        self._cache = cache
        self._positions_B = positions_B
        self._slots_B = torch.arange(len(positions_B), device=positions_B.device)
        self._length = round_up(int(positions_B.max()) + 1, LENGTH_STEP)
        self._hidden: dict[int | None, torch.Tensor] = {}

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        """As `KernelRows.attend`."""
        num, heads, width = q_T.shape
        self._cache.write(layer.index, self._slots_B, self._positions_B, k_T, v_T)
        keys, values = self._cache.of_slots(layer.index, slice(num), self._length)
        if layer.window not in self._hidden:
            hidden = _hidden(self._positions_B, self._length, layer.window)
            self._hidden[layer.window] = hidden[:, None]
        q = q_T.reshape(num, k_T.shape[1], -1, 1, width)
        out = _attend(layer, q, keys, values, self._hidden[layer.window])
        return out.reshape(num, heads, -1).contiguous()  # some models view it otherwise


@dataclasses.dataclass(frozen=True, slots=True)
class _PromptGroup:
    """Prompts whose new parts, and wholes, have one padded length: B of them, L new rows each.

    Attributes:
        rows_B_L: flat row of each new token, beyond a prompt's end that of its last one.
        positions_B_L: and its position.
        slots_B: of the prompts, where there is a cache.
        tokens_T: which of these B · L are tokens.
        rows_T, positions_T, slots_T: of those alone, the same for all layers.
        length: of a view that holds the whole prompts.
    """

    rows_B_L: torch.Tensor
    positions_B_L: torch.Tensor
    slots_B: torch.Tensor
    tokens_T: torch.Tensor
    rows_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    length: int


class PrefillRows:
    """New parts of prompts, one after the other, by torch; a token sees its own up to itself.

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
            padded = round_up(length, LENGTH_STEP), round_up(first + length, LENGTH_STEP)
            by_length.setdefault(padded, []).append(i)
        self._groups: list[_PromptGroup] = []
        for (padded, whole), members in by_length.items():
            start, length, first, slot = (
                torch.tensor([numbers[i] for i in members])[:, None]
                for numbers in (starts, lengths, firsts, slots)
            )
            at = torch.minimum(torch.arange(padded), length - 1)
            tokens_T = (torch.arange(padded) < length).flatten().nonzero().flatten()
            rows_B_L, positions_B_L = start + at, first + at
            slots_B_L = slot.expand(-1, padded)
            group = _PromptGroup(
                rows_B_L.to(device),
                positions_B_L.to(device),
                slot[:, 0].to(device),
                tokens_T.to(device),
                rows_B_L.flatten()[tokens_T].to(device),
                positions_B_L.flatten()[tokens_T].to(device),
                slots_B_L.flatten()[tokens_T].to(device),
                whole,
            )
            self._groups.append(group)

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        """As `KernelRows.attend`."""
        (heads, width), (kv_heads, value_width) = q_T.shape[1:], v_T.shape[1:]
        out_T = q_T.new_zeros(q_T.shape[0], heads, value_width)
        for group in self._groups:
            num, queries = group.rows_B_L.shape
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
        """(part, L, heads, d) of some prompts of a group."""
        rows = group.rows_B_L[part]
        if self._cache is not None:
            keys, values = self._cache.of_slots(layer.index, group.slots_B[part], group.length)
        else:
            padding = rows[:, -1:].expand(-1, group.length - rows.shape[1])
            whole = torch.cat([rows, padding], dim=1)
            keys = k_T[whole].transpose(1, 2)
            values = torch.nan_to_num(v_T[whole].transpose(1, 2))
        q = q_T[rows].unflatten(2, (k_T.shape[1], -1)).permute(0, 2, 3, 1, 4)
        hidden = _hidden(group.positions_B_L[part], group.length, layer.window)
        out = _attend(layer, q, keys, values, hidden)
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


AttentionRows: TypeAlias = KernelRows | DecodeRows | PrefillRows
"""How the rows of a batch attend: prefill, decode and scoring batches each in their way."""


def unknown_option(options: Mapping[str, object]) -> str | None:
    """What attention is given beyond queries, keys, values and the batch, if anything."""
    tensors = (name for name, option in options.items() if isinstance(option, torch.Tensor))
    return next((name for name in tensors if name not in _IMPLIED_BY_ROWS), None)


def attention_of(module: PreTrainedModel) -> str:
    """The name of the attention function that a model uses, in transformers."""
    name = module.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    return name or "eager"


def set_attention(module: PreTrainedModel, name: str) -> None:
    """Let a model use an attention function by its name in transformers, if it lets one choose."""
    if module._can_set_attn_implementation():  # pyright: ignore[reportPrivateUsage]
        module.set_attn_implementation(name)
