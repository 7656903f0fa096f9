"""vLLM's arguments that follow from the model and the search space: slots of LoRA, and experts.

A low-rank genome or an adapter is resident in a LoRA slot; dense genomes need none.
"""

from collections.abc import Collection

from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import linear_weights, split_member
from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.vllm.memory import slot_rank
from es_cookbook.evolution.spaces.base import SearchSpace


def slots_for(space: SearchSpace, max_genomes: int, terms_per_genome: int) -> dict[str, int]:
    """Arguments for the LoRA slots that genomes need; none for dense genomes.

    Raises:
        ConfigError: vLLM has no slots of such a rank, or for such weights.
    """
    if space.low_rank is not None:
        rank, more_slots = space.low_rank.rank * terms_per_genome, 1
    elif space.adapter is not None:
        rank, more_slots = space.adapter.lora.rank, 2
    else:
        return {}
    _refuse_experts(space.weights)
    slots = max_genomes + more_slots
    return {"max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": slot_rank(rank)}


def _refuse_experts(weights: Collection[str]) -> None:
    for name in weights:
        parameter, expert = split_member(name)
        if expert is not None:
            experts = parameter.split(".")[-2]
            raise ConfigError(
                f"engine=vllm has no LoRA slots for fused experts, and the search space perturbs "
                f"{name}; leave them out (search_space.exclude='*.{experts}.*'), or use "
                "engine=torch, or search_space=full_rank"
            )


def arguments_for_experts(
    model: PreTrainedModel, space: SearchSpace, on_cpu: bool
) -> dict[str, object]:
    """For a model with fused experts: no slots for them, and weights as they are loaded.

    vLLM makes slots of all that it can, and has kernels for experts' slots not everywhere; some of
    its kernels for GPUs want experts' weights shuffled.
    """
    if not any(split_member(name)[1] is not None for name in linear_weights(model)):
        return {}
    layers = {name.removesuffix(".weight").rpartition(".")[2] for name in space.weights}
    arguments: dict[str, object] = {} if on_cpu else {"moe_backend": "triton"}
    if not space.is_dense:
        arguments["lora_target_modules"] = sorted(layers)
    return arguments
