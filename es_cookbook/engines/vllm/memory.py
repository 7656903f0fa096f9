"""Memory that a vLLM engine needs, and vLLM's share of it.

vLLM takes its share of a GPU when it starts: weights, LoRA slots, and all that is left for keys and
values. The centre, in float32, comes to the same GPU later. So vLLM is given the user's share less
the centre, and what cannot fit is refused before it starts. On the CPU all is the machine's memory.

Anything that depends on vLLM's version is left out. **No comparison with a GPU yet.**

The resulting arguments for vLLM are here too: a low-rank genome or an adapter is resident
in a LoRA slot, dense genomes need none, and those of fused experts are not filled here.
"""

import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import linear_weights, split_member
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import GIB, show_bytes
from es_cookbook.engines.torch.attention import round_up
from es_cookbook.engines.torch.memory import flat_cache_size
from es_cookbook.engines.vllm.ranks import slot_rank
from es_cookbook.evolution.centre import on_gpu as centre_on_gpu
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpace

CENTRE_WORK_BYTES = GIB // 2
"""Temporaries while the centre moves on a GPU: pieces of it, and factors of terms."""
_VOCABULARY_STEP = 64
"""vLLM pads vocabularies to a multiple of this."""
_SPLIT_BY_COLUMNS = ("o_proj", "out_proj", "c_proj", "dense", "down_proj", "dense_4h_to_h", "fc2")


class Shards:
    """Elements of a model (on the meta device) on each of the `tp` GPUs that share it.

    Attributes:
        infos: its parameters.
        head: name of the output head's weight, which may be an embedding's too.
        body: its linear weights but the head.
        heads: number of attention heads; `kv_heads`, of keys and values.
    """

    def __init__(self, model: PreTrainedModel, tp: int) -> None:
        text = model.config.get_text_config()
        self.tp = tp
        self.heads = int(getattr(text, "num_attention_heads", None) or tp)
        self.kv_heads = int(getattr(text, "num_key_value_heads", None) or self.heads)
        self.infos = parameter_infos(model)
        output = cast("torch.nn.Linear | None", model.get_output_embeddings())
        of_head = output.weight if output is not None else None
        self.head = next((name for name, p in model.named_parameters() if p is of_head), None)
        self.body = [i for i in self.infos if i.kind == "linear" and i.name != self.head]

    def accepted_tp(self) -> list[int]:
        """Return the numbers of GPUs that can share it.

        vLLM divides all sides and heads evenly, except for key and value heads, which GPUs may
        hold in common.
        """
        sides = {self.heads, *(side for info in self.body for side in info.shape)}
        return [
            tp
            for tp in range(1, self.heads + 1)
            if (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)
            and all(side % tp == 0 for side in sides)
        ]

    def shape(self, info: ParameterInfo) -> tuple[int, int]:
        """Return (out, in) on one GPU: in / tp for o_proj and down_proj, out / tp for others.

        As in Megatron-LM (arXiv:1909.08053). Norms and biases are whole, vocabularies padded to 64;
        with fewer key and value heads than GPUs, k_proj and v_proj have out / kv heads.
        """
        rows, columns = info.shape[0], math.prod(info.shape[1:])
        if info.kind == "linear":
            rows, columns = info.out_in
        parameter, _ = split_member(info.name)
        layer = parameter.removesuffix(".weight").rpartition(".")[2]
        if info.kind == "other":
            return rows, columns
        if info.kind == "embedding" or info.name == self.head:
            rows = round_up(rows, _VOCABULARY_STEP)
        if layer in _SPLIT_BY_COLUMNS:
            return rows, columns // self.tp
        ways = min(self.tp, self.kv_heads) if layer in ("k_proj", "v_proj") else self.tp
        return rows // ways, columns

    def elements(self, infos: Iterable[ParameterInfo]) -> int:
        """Return Σ out · in of these parameters."""
        return sum(math.prod(self.shape(info)) for info in infos)

    def slot_elements(self) -> int:
        """Return Σ (out + in), the elements of a LoRA slot of rank 1 without head and experts."""
        slots = [info for info in self.body if split_member(info.name)[1] is None]
        return sum(sum(self.shape(info)) for info in slots)

    def centre_elements(self, space: SearchSpace) -> int:
        """Return the elements of the selected parameters; adapters are whole on every GPU."""
        own = [info for info in self.infos if info.name in space.shapes]
        factors = space.shapes.keys() - {info.name for info in own}
        return self.elements(own) + sum(math.prod(space.shapes[name]) for name in factors)


def cpu_cache_gib(model: PreTrainedModel, context_length: int, available: int, dtype: str) -> float:
    """Return the GiB of the cache on a CPU: for 16 requests of the whole context, at least 1.

    No more than a quarter of the available memory, unless one request needs more. Keys and values
    have the dtype in which vLLM holds weights.
    """
    try:
        size = (model.dtype if dtype == "auto" else getattr(torch, dtype)).itemsize
        token = flat_cache_size(model, context_length).per_token * size // model.dtype.itemsize
    except Exception:  # of any kind: vLLM has its own idea of a model that keeps other things
        return 1.0
    one = token * context_length
    wanted = min(max(GIB, 16 * one), available // 4)
    return max(wanted, 2 * one) / GIB


def check_fits(
    shards: Shards,
    space: SearchSpace,
    slots: Mapping[str, int],
    *,
    size: int,
    cache: int,
    memory: int,
    on_gpu: bool,
) -> int:
    """Refuse what surely does not fit into `memory` bytes. Returns the bytes of the centre.

    Args:
        shards: a GPU's shards, or those of the one rank of a machine without GPUs.
        space: parameters that genomes perturb.
        slots: arguments for their LoRA slots, as `slots_for` returns them.
        size: bytes per weight element; 0 if weights are quantised.
        cache: bytes of the KV cache, if known; else 0.
        memory: available bytes.
        on_gpu: whether this is GPU memory.

    Raises:
        ConfigError: The model, its cache, its centre and the LoRA slots do not fit.
    """
    centre = 4 * shards.centre_elements(space)
    if on_gpu:
        centre = centre + CENTRE_WORK_BYTES if centre_on_gpu(torch.device("cuda")) else 0
    weights = size * sum(math.prod(info.shape) for info in shards.infos) // shards.tp
    left = memory - weights - cache - centre
    where = "each GPU's memory (engine.gpu_memory_utilization)"
    remedy = "use more GPUs (engine.tensor_parallel_size)"
    if not on_gpu:
        where, remedy = "this machine's available memory", "use a larger machine"
    if left <= 0:
        raise ConfigError(
            f"the engine does not fit into {show_bytes(memory)} of {where}: the centre, in "
            f"float32, needs {show_bytes(centre)}, weights {show_bytes(weights)} and the cache "
            f"{show_bytes(cache)}; perturb fewer parameters (search_space.include), or {remedy}"
        )
    slot = size * slots["max_lora_rank"] * shards.slot_elements() if slots else 0
    if slot and slots["max_loras"] * slot > left:
        raise ConfigError(
            f"engine.max_genomes: {slots['max_loras']} LoRA slots of {show_bytes(slot)} each do "
            f"not fit into the {show_bytes(left)} of {where} that are left beside weights, cache "
            f"and centre; lower it to {max(1, left // slot - _more_slots(space))} or less"
        )
    return centre


def slots_for(space: SearchSpace, max_genomes: int, terms_per_genome: int) -> dict[str, int]:
    """Return arguments for the LoRA slots that genomes need; none for dense genomes.

    Raises:
        ConfigError: vLLM has no slots of such a rank, or for such weights.
    """
    if space.rank is not None:
        rank = space.rank * terms_per_genome
    elif space.adapter is not None:
        rank = space.adapter.lora.rank
    else:
        return {}
    slots = max_genomes + _more_slots(space)
    for name in space.weights:
        parameter, expert = split_member(name)
        if expert is not None:
            experts = parameter.split(".")[-2]
            raise ConfigError(
                f"engine=vllm has no LoRA slots for fused experts, and the search space perturbs "
                f"{name}; leave them out (search_space.exclude='*.{experts}.*'), or use "
                "engine=torch, or search_space=full_rank"
            )
    return {"max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": slot_rank(rank)}


def _more_slots(space: SearchSpace) -> int:
    """Return the number of slots for the centre and, of an adapter, for the base."""
    return 1 if space.adapter is None else 2


def layers_with_slots(space: SearchSpace) -> list[str]:
    """Return the names of the layers that need slots; vLLM would make them for all that it can.

    Slots of an output head that nothing perturbs would be multiplied for nothing, and vLLM's
    Triton kernels for them cannot be trusted with log-probabilities of prompts, which they take
    for one row of each request (vllm#51594, vllm#53842).
    """
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in space.weights})


def arguments_for_experts(model: PreTrainedModel, on_cpu: bool) -> dict[str, object]:
    """Return arguments for a model with fused experts: their weights stay as loaded.

    Some of vLLM's kernels for GPUs want them shuffled.

    Raises:
        ConfigError: vLLM's kernels for the CPU pack them and leave nothing to be moved.
    """
    if not any(split_member(name)[1] is not None for name in linear_weights(model)):
        return {}
    if on_cpu:
        raise ConfigError(
            "model_name: engine=vllm hosts no model with fused experts on the CPU; use engine=torch"
        )
    return {"moe_backend": "triton"}
