"""How a torch engine divides a machine's memory.

What a user leaves open follows from what is free once the weights are there: half of it may hold
what is kept of tokens, of which a quarter is for what no request reads (what prompts have in
common, and answers that a next turn goes on from), a quarter of it resident genomes, and a quarter
is for the work itself. These are limits. What is taken follows from the run: genome tables are as
large as the population, and of the cache blocks are taken for as many tokens as requests have,
prompt and `max_tokens`, those that they share once.
"""

import ctypes
import dataclasses
import math
from collections.abc import Collection
from typing import cast

import psutil
import torch
from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import is_linear, named_weights
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.machine.cores import core_share, memory_left, memory_limit
from es_cookbook.common.terminal import GIB, show_bytes
from es_cookbook.engines.torch.forward.cache_size import CacheSize
from es_cookbook.engines.torch.forward.population_layers import ROWS_PER_BLOCK
from es_cookbook.engines.torch.kernels.attention import STEP
from es_cookbook.evolution.spaces.base import SearchSpace

CACHE_SHARE, GENOME_SHARE, WORK_SHARE = 0.5, 0.25, 0.25
_ENDED_SHARE = 0.25
"""Of the caches' share, for what no request reads, if the user leaves that open."""
BYTES_OF_LOGIT = 8
"""Of one number of one row, while a token is chosen: in float32, and before that in bfloat16."""
INT8_BYTES = 1.125
"""Of a weight for products in int8, with its part of a scale (`kernels.int8`)."""
_MULTIPLY_ALONE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of models whose layers want products of their weights and nothing else, but for the head:
packed copies in the same dtype take the weights' memory. Of others they are counted beside them.
"""
_LEAST_CONTEXT = 512
"""Tokens below which a shorter context is no help, and the user is asked."""


def weight_bytes(
    model: PreTrainedModel, space: SearchSpace, size: int, packed: float = 0
) -> tuple[int, int, int]:
    """What the weights of an engine take, with numbers of `size` bytes.

    Args:
        model: may be without its weights.
        space: what genomes perturb of it.
        size: of a number.
        packed: bytes of a number in packed copies of linear weights.

    Returns:
        Bytes of the model as loaded; of what samples beside it, linear and perturbed weights and
        packed copies; and of the centre, in float32.
    """
    linear = {p for module in model.modules() if is_linear(module) for p in module.parameters()}
    copies = math.ceil(packed * sum(p.numel() for p in linear))
    if packed == size:
        copies -= size * _replaced(model, linear)
    tied = {cast("torch.nn.Embedding", model.get_input_embeddings()).weight}
    own = linear - tied | {p for name, p in named_weights(model) if name in space.shapes}
    perturbed = sum(torch.Size(shape).numel() for shape in space.shapes.values())
    elements = sum(p.numel() for p in model.parameters())
    beside = sum(p.numel() for p in own)
    return size * elements, copies + size * beside, 4 * perturbed


def _replaced(model: PreTrainedModel, linear: Collection[torch.nn.Parameter]) -> int:
    """Numbers of linear weights whose memory packed copies take."""
    if model.config.model_type not in _MULTIPLY_ALONE:
        return 0
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    kept = {end.weight for end in cast("list[torch.nn.Linear]", ends)}
    return sum(p.numel() for p in linear if p not in kept and p.dim() > 1)


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
    """What may be taken on a device; of the CPU's memory, the share that its cores are."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = min(psutil.virtual_memory().available, memory_left())
    # Engines of a pool on one machine have a share of its cores each, and leave each other room.
    return int(free * core_share())


def total_bytes(device: torch.device) -> int:
    """All memory of a device, used or not: it is the same for every run there."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(min(psutil.virtual_memory().total, memory_limit()) * core_share())


def trim() -> None:
    """Let the C library give what is free of its heap back to the system, where it can (glibc's).

    Of a gigabyte of activations it keeps most, and what another part needs comes on top.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


@dataclasses.dataclass(frozen=True, slots=True)
class CachePlan:
    """How what is kept of tokens is divided.

    Attributes:
        size: of a request.
        num_lanes: that run batches.
        lane_bytes: for each lane.
        max_rows: requests that one lane decodes together.
        context_length: most tokens of a request.
        idle_bytes: for what requests have in common or left, beside those that run.
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
        blocks = self.idle_bytes // self.size.of(STEP)
        return max(1, blocks) if self.idle_bytes else 0

    @property
    def num_blocks(self) -> int:
        """Blocks of a shared cache: those of requests, of which one of the whole context fits."""
        running = self.num_lanes * self.lane_bytes // self.size.of(STEP)
        least = ROWS_PER_BLOCK * -(-self.context_length // STEP)
        return 1 + max(running, least) + self.num_idle_blocks

    def num_slots(self, length: int) -> int:
        """Requests of so many tokens that a lane has room for, in whole blocks."""
        slots = min(self.max_rows, self.lane_bytes // self.size.of(length))
        return max(ROWS_PER_BLOCK, slots // ROWS_PER_BLOCK * ROWS_PER_BLOCK)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What an engine may take beside its weights.

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
        """For keys and values that no request reads, over all lanes."""
        if self.prefix_gib is None:
            return int(_ENDED_SHARE * CACHE_SHARE * self.free)
        return int(self.prefix_gib * GIB)

    @property
    def cache_bytes(self) -> int:
        """For keys and values of requests that run, over all lanes."""
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
        """Lower how much runs at a time until a request of the whole context fits.

        First the lanes become fewer, then the rows of a lane, then the context shorter if it may.

        Args:
            size: of a request.
            num_lanes: wanted.
            max_rows: wanted, over all lanes.
            vocabulary_size: of the model, whose logits take part of the memory for work.
            context_length: wanted.
            may_shorten: whether the user left the context's length open.

        Raises:
            ConfigError: Not even one block of rows fits; says what would.
        """
        least = ROWS_PER_BLOCK * size.of(context_length)
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
