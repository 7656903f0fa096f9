"""The division of a machine's memory by a torch engine.

What a user leaves open follows from what is free once the weights are there: half of it may hold
cached tokens, a quarter of them read by no request (common prefixes of prompts, and answers that
a next turn continues), a quarter of it resident genomes, and a quarter is for the work itself.
These are limits. Actual use follows from the run: genome tables are as large as the population,
and requests take cache blocks for their tokens, prompt and `max_tokens`, shared ones once.
"""

import copy
import ctypes
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import psutil
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from es_cookbook.checkpoints.linear_weights import is_linear, named_weights
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.machine.cores import core_share, memory_left, memory_limit
from es_cookbook.common.terminal import GIB, show_bytes
from es_cookbook.engines.torch.attention import round_up, set_attention, unknown_option
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.engines.torch.kernels.modules import Path
from es_cookbook.engines.torch.own import Unfit, bytes_of_cache
from es_cookbook.engines.torch.population_layers import ROWS_PER_BLOCK
from es_cookbook.evolution.spaces.base import SearchSpace

_PROBE = "es_cookbook_probe"
_SHORT, _LONG = 16, 32


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes of one request: `fixed`, and `per_token` for each of its tokens."""

    fixed: int
    per_token: int

    def request(self, num_tokens: int) -> int:
        """Return the bytes of a request of `num_tokens` tokens."""
        return self.fixed + self.per_token * num_tokens


class _Noted(threading.local):
    """Calls of attention layers on this thread: keys, values, window and mask."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, torch.Tensor, torch.Tensor, int | None, object]] = []


_noted = _Noted()


_Mask: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Stands in for a mask: whether positions (batch, head, query, key) see each other."""


def _make_mask(*_: object, mask_function: object = None, **__: object) -> object:
    return mask_function


def _probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Note what a token needs of attention, and attend to nothing."""
    if (name := unknown_option(options)) is not None:
        raise Unfit(f"its attention takes {name}")
    index = cast("int", module.layer_idx)
    like = key.to("meta"), value.to("meta")
    _noted.layers.append((index, *like, sliding_window, attention_mask))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_PROBE, _probe)
AttentionMaskInterface.register(_PROBE, _make_mask)


def flat_cache_size(
    model: PreTrainedModel,
    context_length: int,
    layers: Sequence[int] | None = None,
    *,
    on_cpu: bool = False,
) -> CacheSize:
    """Return the bytes of keys and values over all layers, if attention can be replaced.

    Args:
        model: is not changed.
        context_length: length over which attention has to be causal.
        layers: index of the layer of `model` that each layer is like, if `model` is the beginning
            of a larger one; None if it is the whole model.
        on_cpu: whether the cache will be there, as the kernel wants it.

    Raises:
        Unfit: It cannot: the model has no hook for it, or asks for more than a window.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise Unfit("it has no attention hook in transformers")
    probe = _with_weights(model)
    set_attention(probe, _PROBE)
    _noted.layers = []
    tokens = torch.zeros(1, _SHORT, dtype=torch.int64, device=probe.device)
    # Without a mask, transformers would look at the values of positions.
    probe(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    noted, _noted.layers = _noted.layers, []
    if not noted:
        raise Unfit("it does not use its attention hook")
    for *_, window, mask in noted:
        if isinstance(mask, torch.Tensor):
            raise Unfit("it makes its own mask")
        if callable(mask) and not _is_causal(cast(_Mask, mask), window, context_length):
            raise Unfit("its attention mask is not that of a causal window")
    bytes_of_layer = {i: _bytes_of_token(key, value, on_cpu) for i, key, value, *_ in noted}
    if layers is None:
        return CacheSize(0, sum(bytes_of_layer.values()))
    return CacheSize(0, sum(bytes_of_layer.get(layer, 0) for layer in layers))


def _bytes_of_token(key: torch.Tensor, value: torch.Tensor, on_cpu: bool) -> int:
    """Return the bytes of one token in the cache; key and value are (1, kv heads, tokens, d)."""
    columns = round_up(value.shape[3], STEP) if on_cpu else value.shape[3]
    elements = key[0, :, 0].numel() + value.shape[1] * columns
    return elements * (torch.float32.itemsize if on_cpu else key.element_size())


def own_cache_size(model: PreTrainedModel, path: Path) -> CacheSize:
    """Return the size of the model's own cache, or without one what running a token again takes."""
    if not path.cached:
        hidden = cast("nn.Embedding", model.get_input_embeddings()).weight.shape[1]
        return CacheSize(0, 16 * hidden * model.dtype.itemsize)
    # A mask makes no difference to how much is kept, and has values, which are looked at.
    alone = dataclasses.replace(path, padded=False)
    probe = _with_weights(model)
    short, long = (bytes_of_cache(probe, alone, length) for length in (_SHORT, _LONG))
    per_token = max(1, -(-(long - short) // (_LONG - _SHORT)))
    return CacheSize(max(0, short - per_token * _SHORT), per_token)


def _with_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with separate modules, which may store anything, around the same weights."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def _is_causal(mask: _Mask, window: int | None, context_length: int) -> bool:
    """Return whether a mask is that of a causal window, for queries over the whole context."""
    for at in {context_length - 1, context_length // 2, 0}:
        query, key = torch.tensor(at), torch.arange(context_length)
        seen = (key <= at) & (key > at - window if window else True)
        if not torch.equal(mask(0, 0, query, key).expand_as(seen), seen):
            return False
    return True


CACHE_SHARE, GENOME_SHARE, WORK_SHARE = 0.5, 0.25, 0.25
_ENDED_SHARE = 0.25
"""Share of the caches for blocks that no request reads, if the user leaves that open."""
BYTES_OF_LOGIT = 8
"""Bytes of a logit of a row while a token is chosen: in float32, and before that in bfloat16."""
_INT8_BYTES = 1.125
"""Bytes of a weight for products in int8, with its part of a scale (`kernels.int8`)."""
_LEAST_CONTEXT = 512
"""Tokens below which a shorter context does not help, and the user is asked."""


def weight_bytes(
    model: PreTrainedModel, space: SearchSpace, size: int, *, int8: bool = False
) -> tuple[int, int, int]:
    """Return the memory of an engine's weights, with elements of `size` bytes.

    Copies for products in int8 are kept beside the weights; packed ones in bfloat16 replace them.

    Args:
        model: a model, with or without its weights.
        space: the parameters that genomes perturb.
        size: bytes per element.
        int8: whether products are in int8.

    Returns:
        Bytes of the model as loaded; of what samples beside it, linear and perturbed weights and
        copies in int8; and of the centre, in float32.
    """
    linear = {p for module in model.modules() if is_linear(module) for p in module.parameters()}
    tied = {cast("torch.nn.Embedding", model.get_input_embeddings()).weight}
    own = linear - tied | {p for name, p in named_weights(model) if name in space.shapes}
    perturbed = sum(torch.Size(shape).numel() for shape in space.shapes.values())
    elements = sum(p.numel() for p in model.parameters())
    copies = math.ceil(_INT8_BYTES * sum(p.numel() for p in linear)) if int8 else 0
    return size * elements, size * sum(p.numel() for p in own) + copies, 4 * perturbed


def check_weights_fit(model_name: str, needed: tuple[int, int, int], device: torch.device) -> None:
    """Refuse a model before it is loaded.

    Raises:
        ConfigError: It does not fit; says what needs how much.
    """
    free = free_bytes(device)
    if sum(needed) > free:
        base, own, centre = map(show_bytes, needed)
        raise ConfigError(
            f"model_name: {model_name!r} does not fit into the {show_bytes(free)} of memory that "
            f"are free on {device.type}: it needs {base}, what samples beside it {own}, and the "
            f"centre, in float32, {centre}; use engine.dtype=bfloat16 if it is in float32, "
            "search_space=adapter, whose centre is small, a smaller model or a machine with more "
            "memory"
        )


def free_bytes(device: torch.device) -> int:
    """Return a device's available memory; of the CPU's, a share in proportion to the cores."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = min(psutil.virtual_memory().available, memory_left())
    # Engines of a pool on one machine have a share of its cores each, and leave each other room.
    return int(free * core_share())


def total_bytes(device: torch.device) -> int:
    """Return all memory of a device, used or not: it is the same for every run there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(min(psutil.virtual_memory().total, memory_limit()) * core_share())


def trim() -> None:
    """Have the C library return free heap memory to the system, if it can (glibc).

    It keeps most of a gigabyte of activations, and other memory comes on top.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


@dataclasses.dataclass(frozen=True, slots=True)
class CachePlan:
    """How the memory for tokens is divided.

    Attributes:
        size: cache size of a request.
        num_lanes: number of lanes, which run batches.
        lane_bytes: bytes for each lane.
        max_rows: requests that one lane decodes together.
        context_length: most tokens of a request.
        idle_bytes: bytes for tokens that requests share or left, beside running requests.
    """

    size: CacheSize
    num_lanes: int
    lane_bytes: int
    max_rows: int
    context_length: int
    idle_bytes: int = 0

    @property
    def num_idle_blocks(self) -> int:
        """Blocks of a shared cache that no request reads, at most."""
        blocks = self.idle_bytes // self.size.request(STEP)
        return max(1, blocks) if self.idle_bytes else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of a shared cache, with room for a request of the whole context."""
        running = self.num_lanes * self.lane_bytes // self.size.request(STEP)
        least = ROWS_PER_BLOCK * -(-self.context_length // STEP)
        return 1 + max(running, least) + self.num_idle_blocks

    def num_slots(self, length: int) -> int:
        """Return how many requests of `length` tokens a lane has room for, in whole blocks."""
        slots = min(self.max_rows, self.lane_bytes // self.size.request(length))
        return max(ROWS_PER_BLOCK, slots // ROWS_PER_BLOCK * ROWS_PER_BLOCK)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory available to an engine beside its weights.

    Attributes:
        free: bytes that are free once the weights are there.
        cache_gib: engine.kv_cache_gib, `genome_gib`, engine.memory_gib, and `prefix_gib`,
            engine.prefix_cache_gib, as the user gave them.
    """

    free: int
    cache_gib: float | None
    genome_gib: float | None
    prefix_gib: float | None = None

    @property
    def genome_bytes(self) -> int:
        return int(GENOME_SHARE * self.free if self.genome_gib is None else self.genome_gib * GIB)

    @property
    def prefix_bytes(self) -> int:
        """Bytes for keys and values that no request reads, over all lanes."""
        if self.prefix_gib is None:
            return int(_ENDED_SHARE * CACHE_SHARE * self.free)
        return int(self.prefix_gib * GIB)

    @property
    def cache_bytes(self) -> int:
        """Bytes for keys and values of running requests, over all lanes."""
        if self.cache_gib is not None:
            return int(self.cache_gib * GIB)
        for_ended = self.prefix_bytes if self.prefix_gib is None else 0
        return int(CACHE_SHARE * self.free) - for_ended

    def plan(
        self,
        size: CacheSize,
        *,
        num_lanes: int,
        max_rows: int,
        vocabulary_size: int,
        context_length: int,
        may_shorten: bool,
    ) -> CachePlan:
        """Reduce concurrency until a request of the whole context fits.

        First the lanes become fewer, then the rows of a lane, then the context shorter if it may.

        Args:
            size: cache size of a request.
            num_lanes: wanted number of lanes.
            max_rows: wanted rows over all lanes.
            vocabulary_size: the model's; its logits take part of the memory for work.
            context_length: wanted length.
            may_shorten: whether the user left the context's length open.

        Raises:
            ConfigError: Not even one block of rows fits; says what would.
        """
        least = ROWS_PER_BLOCK * size.request(context_length)
        num_lanes = max(1, min(num_lanes, self.cache_bytes // least))
        if self.cache_bytes < least:
            fits = (self.cache_bytes // ROWS_PER_BLOCK - size.fixed) // size.per_token
            if not may_shorten or fits < min(context_length, _LEAST_CONTEXT):
                given = f"engine.kv_cache_gib={self.cache_gib}"
                if self.cache_gib is None:
                    held = show_bytes(self.cache_bytes)
                    given = f"{held} of the {show_bytes(self.free)} of free memory"
                enough = math.ceil(least / GIB * 1000) / 1000
                raise ConfigError(
                    f"{given} holds {max(0, fits)} tokens a request, fewer than the context of "
                    f"{context_length}; raise engine.kv_cache_gib to at least {enough} or lower "
                    "engine.max_model_len"
                )
            context_length = fits
        for_logits = int(WORK_SHARE * self.free) // (BYTES_OF_LOGIT * vocabulary_size)
        rows = min(max_rows, for_logits) // num_lanes
        lane_bytes = self.cache_bytes // num_lanes
        rows = max(ROWS_PER_BLOCK, rows)
        return CachePlan(size, num_lanes, lane_bytes, rows, context_length, self.prefix_bytes)
