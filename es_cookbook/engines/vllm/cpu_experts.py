"""What vLLM's CPU builds need so that the weights of fused experts can be moved.

As with linear weights (`cpu`), they pack experts into a layout of their own and keep nothing else.
Here a layer keeps its weights as they were loaded, and what it multiplies with is packed again when
it is used after a change. Experts' weights take twice the memory.

With LoRA slots anywhere in the model, vLLM would also take Triton's kernels for all experts, which
CPUs have not. No genome has slots of experts (`engine` refuses it), so experts are told of none.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from es_cookbook.common.errors import ModelError
from es_cookbook.engines.vllm.cpu import num_weight_changes

_class = cast(Any, CPUUnquantizedExperts)
_pack: "Callable[[_Experts, torch.nn.Module], None]" = _class.process_weights_after_loading
_multiply: Callable[..., None] = _class.apply
_methods = cast(Any, unquantized_fused_moe_method)
_select_backend: "Callable[[_Config], object]" = _methods.select_unquantized_moe_backend


class _Config(Protocol):
    """What is used of vLLM's `FusedMoEConfig`."""

    is_lora_enabled: bool
    intermediate_size_per_partition: int


class _Experts(Protocol):
    """What is used of `CPUUnquantizedExperts`."""

    moe_config: _Config


def prepare() -> None:
    """Replace all of it in this process, before a model is loaded."""
    _class.process_weights_after_loading = _keep_weights
    _class.apply = _pack_and_multiply
    _methods.select_unquantized_moe_backend = _select_without_lora


def _select_without_lora(moe_config: _Config) -> object:
    moe_config.is_lora_enabled = False
    return _select_backend(moe_config)


def _keep_weights(self: _Experts, layer: torch.nn.Module) -> None:
    """In place of packing, which is done at the first use."""
    size = self.moe_config.intermediate_size_per_partition
    padded = cast(Any, self)._padded_intermediate_size(self.moe_config)
    if hasattr(layer, "w13_bias") and padded != size:
        raise ModelError(
            f"vLLM pads experts of {size} intermediate features with biases for its CPU kernels, "
            "in a way that es_cookbook does not know; use engine=torch"
        )


def _pack_and_multiply(
    self: _Experts,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *others: object,
    **more: object,
) -> None:
    """`CPUUnquantizedExperts.apply` of weights as they were loaded: w1 (E, 2I, H), w2 (E, H, I)."""
    own = vars(self)
    if own.get("_packed_at") != num_weight_changes():
        packed = torch.nn.Module()
        packed.w13_weight = torch.nn.Parameter(w1.detach(), requires_grad=False)
        packed.w2_weight = torch.nn.Parameter(w2.detach(), requires_grad=False)
        _pack(self, packed)
        own["_packed"] = packed.w13_weight, packed.w2_weight
        own["_packed_at"] = num_weight_changes()
    _multiply(self, output, hidden_states, *own["_packed"], *others, **more)
