"""Attention of a batch's rows over a cache of keys and values.

All lanes share one cache, of places in blocks of `STEP`. A sequence lies in runs of neighbouring
places: those of a prefix that it shares with others, and its own (see `prefix_cache`). A prefill
batch holds what is new of several prompts, ragged, and fills places; a decode batch holds one row a
request and reads what its sequence has.

On the CPU a kernel of our own takes token after token (`kernels.attention`). A token attends with
the same bits whether it is prefilled or decoded, with any neighbours and wherever its sequence
lies, because it reads its own positions alone. So keys and values may be shared, and kept from one
turn to the next; tests with random lengths, runs and numbers of heads check this. On other devices
attention is a few operations of torch, over copies as long as the longest row; what lies beyond a
row's own position is masked, and contributes exactly nothing.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from es_cookbook.engines.torch.kernels.attention import STEP, AttentionSettings, attend
from es_cookbook.engines.torch.kernels.modules import NO_FACTORS, NO_NORMS, LinearOutputs, rows_of

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
"""Keys and values of all places in one layer."""
Run: TypeAlias = tuple[int, int]
"""The first position of a run, and how many places it lies after its positions."""
NO_SEQUENCE = -1
"""The sequence of rows of no request."""
_BEYOND = 1 << 62
"""Beginning of a run that a sequence does not have."""


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention settings of one layer.

    Attributes:
        index: index of the layer, for the cache.
        scale: factor on scores.
        window: most positions seen, the token's own included; None for all before it.
        softcap: scores are squashed to ± this (Gemma 2); None for not.
    """

    index: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def settings(self) -> AttentionSettings:
        """The same as kernels take it."""
        return self.scale, self.softcap or 0.0, self.window or 0


class SequenceTable:
    """The runs in which sequences lie, by sequence, as kernels take them: see `Where`.

    Attributes:
        begins_S_R: first position of each run, and `shifts_S_R`.
    """

    def __init__(self, num_sequences: int) -> None:
        self.begins_S_R = np.full((num_sequences, 1), _BEYOND)
        self.shifts_S_R = np.zeros((num_sequences, 1), np.int64)

    def put(self, sequence: int, runs: Sequence[Run]) -> None:
        """Set the runs in which a sequence lies."""
        more = len(runs) - self.begins_S_R.shape[1]
        if more > 0:
            pad = (0, 0), (0, more)
            self.begins_S_R = np.pad(self.begins_S_R, pad, constant_values=_BEYOND)
            self.shifts_S_R = np.pad(self.shifts_S_R, pad, mode="edge")
        begins, shifts = zip(*runs, strict=True)
        self.begins_S_R[sequence] = _BEYOND
        self.begins_S_R[sequence, : len(runs)] = begins
        self.shifts_S_R[sequence] = shifts[-1]
        self.shifts_S_R[sequence, : len(runs)] = shifts

    def keep(self, order: np.ndarray) -> None:
        """Move these sequences to the front, in this order."""
        for array in (self.begins_S_R, self.shifts_S_R):
            array[: len(order)] = array[order]

    def places(self, sequences: np.ndarray, length: int) -> torch.Tensor:
        """Return places of sequences' first positions, (sequences, length); 0 for no sequence."""
        at = np.arange(length)
        begins, shifts = self.begins_S_R[sequences], self.shifts_S_R[sequences]
        run = (begins[:, :, None] <= at).sum(axis=1) - 1
        places = at + np.take_along_axis(shifts, np.maximum(run, 0), axis=1)
        return torch.from_numpy(np.where(sequences[:, None] < 0, 0, places))


class TokenCache:
    """Keys and values of tokens, for every layer.

    Layers are allocated when they are first written, so that the cache needs to know nothing of the
    architecture, and grow with the blocks in use. Keys and values are (places, kv heads, d). Block
    0 is where rows of no request write.

    Args:
        num_blocks: most blocks, of `STEP` places each.
        dtype: dtype of a `KernelCache`; others have that of what is written.

    Attributes:
        num_reached: blocks that have been in use.
        num_moves: how often a layer has got another place in memory.
    """

    def __init__(self, num_blocks: int, dtype: torch.dtype = torch.float32) -> None:
        self.num_blocks, self.dtype = num_blocks, dtype
        self.num_reached = 1
        self.num_moves = 0
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._lock = threading.Lock()  # lanes share the cache

    def release(self) -> None:
        """Release the memory; the next write takes it again."""
        with self._lock:
            self._layers.clear()

    def write(
        self, index: int, places_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> None:
        """Write a layer's keys and values of tokens, (tokens, kv heads, d) each, to places."""
        with self._lock:
            keys, values = self._grown(index, self._layers.get(index, (k_T[:0], v_T[:0])))
            keys[places_T] = k_T
            # Finite, so that a value with no weight contributes exactly nothing.
            values[places_T] = torch.nan_to_num(v_T)

    def grow(self) -> None:
        """Make room in all layers for the blocks in use: until there are more, none moves."""
        with self._lock:
            for index, states in list(self._layers.items()):
                self._grown(index, states)

    def _grown(self, index: int, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return a layer's memory, another if the blocks in use need more."""
        if len(states[0]) < self.num_reached * STEP:
            blocks = max(self.num_reached, 2 * len(states[0]) // STEP)
            more = min(self.num_blocks, blocks) * STEP - len(states[0])
            new = (each.new_zeros(more, *each.shape[1:]) for each in states)
            states = self._layers[index] = tuple(map(torch.cat, zip(states, new, strict=True)))
            self.num_moves += 1
        return states

    def of_places(self, index: int, places_B_L: torch.Tensor) -> LayerStates:
        """Return a layer's keys and values at places: (sequences, kv heads, length, d) each."""
        keys, values = (each[places_B_L].transpose(1, 2) for each in self._layers[index])
        return keys, values


class KernelCache(TokenCache):
    """A cache on the CPU, in the kernel's layout (`kernels.attention`), in float32 or bfloat16.

    Memory that is never used is not touched, so it has its whole size from the beginning. All that
    a layer has of a block lies together: NumPy asks for pages of 2 MB, and few are touched.
    """

    def layer(self, index: int, size: int) -> torch.Tensor:
        """Return a layer's cache, (blocks, numbers), with `size` numbers per place."""
        with self._lock:
            if index not in self._layers:
                num_bytes = self.num_blocks * STEP * size * self.dtype.itemsize
                memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
                first = -memory.ctypes.data % _ALIGNMENT
                whole = torch.from_numpy(memory[first : first + num_bytes]).view(self.dtype)
                self._layers[index] = (whole.view(self.num_blocks, STEP * size),)
            return self._layers[index][0]


class KernelRows:
    """Tokens of any sequences on the CPU, after those that they see; see `attention_rows`."""

    def __init__(
        self,
        sequences_T: torch.Tensor,
        positions_T: torch.Tensor,
        table: SequenceTable,
        cache: KernelCache,
    ) -> None:
        runs = table.begins_S_R, table.shifts_S_R
        self._where = sequences_T.numpy(), positions_T.numpy(), *runs
        self._cache = cache

    @classmethod
    def of_a_block(cls, num_rows: int, dtype: torch.dtype) -> "KernelRows":
        """Return rows for the first tokens of one sequence, with a cache of one block."""
        table, positions_T = SequenceTable(1), torch.arange(num_rows)
        table.put(0, [(0, 0)])
        return cls(torch.zeros_like(positions_T), positions_T, table, KernelCache(1, dtype))

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        """Attend for flat rows: q (T, heads, d), k and v (T, kv heads, d) -> (T, heads, d)."""
        y_T_N = torch.cat([each.flatten(1) for each in (q_T, k_T, v_T)], dim=1).float()
        linear = y_T_N, y_T_N, NO_FACTORS, None, NO_NORMS
        heads, (kv_heads, width) = q_T.shape[1], v_T.shape[1:]
        out_T_N = torch.empty(len(q_T), heads * width)
        self._attend(layer, linear, (heads, kv_heads, width), k_T.shape[2], out_T_N)
        return out_T_N.view(len(q_T), heads, width).to(q_T.dtype)

    def attend_rotated(
        self, layer: AttentionLayer, linear: LinearOutputs, heads: tuple[int, int]
    ) -> torch.Tensor:
        """Attend for outputs of linear layers; heads are (number of kv heads, d)."""
        y_T_N, (kv_heads, size) = linear[0], heads
        out_T_N = y_T_N.new_empty(len(y_T_N), y_T_N.shape[1] - 2 * kv_heads * size)
        self._attend(layer, linear, (out_T_N.shape[1] // size, kv_heads, size), size, out_T_N)
        return out_T_N

    def _attend(
        self,
        layer: AttentionLayer,
        linear: LinearOutputs,
        heads: tuple[int, int, int],
        depth: int,
        out_T_N: torch.Tensor,
    ) -> None:
        """Run the kernel `attend`; heads as it takes them, with keys of `depth` numbers."""
        y_T_N, x_T_N, factors, rotary, norms = linear
        _, kv_heads, width = heads
        cache = self._cache.layer(layer.index, kv_heads * (depth + round_up(width, STEP)))
        if rotary is None:  # of layers without positions
            rotary = (torch.empty(1, len(y_T_N), 0),) * 2
        cos_T_N, sin_T_N = (each[0].numpy() for each in rotary)
        rows = rows_of(y_T_N), rows_of(x_T_N), factors, (cos_T_N, sin_T_N), norms
        attend(rows, rows_of(cache), self._where, layer.settings, heads, rows_of(out_T_N))


def _attend(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the softmax of scaled, capped and masked scores, times values.

    Args:
        layer: settings of the layer.
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
    """Return which of `length` positions each token does not see: (..., length)."""
    at, own = torch.arange(length, device=positions.device), positions[..., None]
    return at > own if window is None else (at > own) | (at <= own - window)


@dataclasses.dataclass(frozen=True, slots=True)
class RowGroup:
    """Sequences that have as many new rows: B of them, L rows each.

    Attributes:
        rows_B_L: flat rows; beyond a sequence's last one, that one again.
        positions_B_L: their positions.
        places_B_W: places of the whole sequences.
        hidden: what each row does not see, (B, L, W), by window.
    """

    rows_B_L: torch.Tensor
    positions_B_L: torch.Tensor
    places_B_W: torch.Tensor
    hidden: dict[int | None, torch.Tensor] = dataclasses.field(default_factory=dict)


class TorchRows:
    """Tokens of any sequences, by torch; as `KernelRows`, where those of a sequence come together.

    Sequences whose numbers of new tokens differ little are padded to one length and run together.
    """

    def __init__(self, groups: Sequence[RowGroup], cache: TokenCache) -> None:
        self._groups, self._cache = groups, cache
        new = [each.places_B_W.gather(1, each.positions_B_L).flatten() for each in groups]
        self._rows_T = torch.cat([each.rows_B_L.flatten() for each in groups])
        self._places_T = torch.cat(new)

    @classmethod
    def of_sequences(
        cls,
        sequences_T: torch.Tensor,
        positions_T: torch.Tensor,
        table: SequenceTable,
        cache: TokenCache,
    ) -> "TorchRows":
        """Return rows of sequences that lie as a table says."""
        sequences, positions = sequences_T.numpy(), positions_T.cpu().numpy()
        starts = np.flatnonzero(np.diff(sequences, prepend=NO_SEQUENCE - 1))
        lengths = np.diff(starts, append=len(sequences))
        of_requests = sequences[starts] >= 0
        starts, lengths = starts[of_requests], lengths[of_requests]
        # One new token each, as while decoding, is not padded.
        padded = np.where(lengths == 1, 1, -(-lengths // LENGTH_STEP) * LENGTH_STEP)
        groups: list[RowGroup] = []
        for length in np.unique(padded):
            own = padded == length
            at = np.minimum(np.arange(length), lengths[own, None] - 1)
            rows = starts[own, None] + at
            whole = round_up(int(positions[rows].max()) + 1, LENGTH_STEP)
            # Beyond a sequence's end it may be any place that there is.
            places_B_W = table.places(sequences[starts[own]], whole)
            places_B_W = places_B_W.clamp(max=cache.num_reached * STEP - 1)
            parts = torch.from_numpy(rows), torch.from_numpy(positions[rows]), places_B_W
            rows_B_L, positions_B_L, places_B_W = (part.to(positions_T.device) for part in parts)
            groups.append(RowGroup(rows_B_L, positions_B_L, places_B_W))
        return cls(groups, cache)

    def attend(
        self, layer: AttentionLayer, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor
    ) -> torch.Tensor:
        """Attend as `KernelRows.attend` does."""
        (heads, width), (kv_heads, value_width) = q_T.shape[1:], v_T.shape[1:]
        # All at first: a sequence may see what another one writes.
        self._cache.write(layer.index, self._places_T, k_T[self._rows_T], v_T[self._rows_T])
        out_T = q_T.new_zeros(q_T.shape[0], heads, value_width)
        for group in self._groups:
            (num, queries), length = group.rows_B_L.shape, group.places_B_W.shape[1]
            if layer.window not in group.hidden:
                hidden = _hidden(group.positions_B_L, length, layer.window)
                group.hidden[layer.window] = hidden
            of_sequence = max(heads * queries, kv_heads * (width + value_width)) * length
            step = max(1, _MAX_ELEMENTS // of_sequence)
            for part in (slice(first, first + step) for first in range(0, num, step)):
                rows_B_L = group.rows_B_L[part]
                keys, values = self._cache.of_places(layer.index, group.places_B_W[part])
                q = q_T[rows_B_L].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
                out = _attend(layer, q, keys, values, group.hidden[layer.window][part])
                out_T[rows_B_L] = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out_T


AttentionRows: TypeAlias = KernelRows | TorchRows


def attention_rows(
    sequences_T: torch.Tensor, positions_T: torch.Tensor, table: SequenceTable, cache: TokenCache
) -> AttentionRows:
    """Return attention for tokens of any sequences.

    Args:
        sequences_T: sequence of each row, on the CPU; negative for rows of no request.
        positions_T: position of each row in its sequence.
        table: places of sequences.
        cache: receives keys and values.
    """
    if isinstance(cache, KernelCache):
        return KernelRows(sequences_T, positions_T, table, cache)
    return TorchRows.of_sequences(sequences_T, positions_T, table, cache)


def unknown_option(options: Mapping[str, object]) -> str | None:
    """Return the name of an attention input beyond queries, keys, values and the batch, if any."""
    tensors = (name for name, option in options.items() if isinstance(option, torch.Tensor))
    return next((name for name in tensors if name not in _IMPLIED_BY_ROWS), None)


def attention_of(module: PreTrainedModel) -> str:
    """Return the name of the attention function that a model uses, in transformers."""
    name = module.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    return name or "eager"


def set_attention(module: PreTrainedModel, name: str) -> None:
    """Have a model use an attention function of transformers, if the model supports that."""
    if module._can_set_attn_implementation():  # pyright: ignore[reportPrivateUsage]
        module.set_attn_implementation(name)
