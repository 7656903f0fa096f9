"""Float32 around the products of a 16-bit model, on the CPU.

What takes the time of a model in bfloat16 are its products, which processors with the instructions
for it make at twice the rate of float32. All between them moves little data, and is both more exact
and faster in float32, which kernels compute in (`kernels`). So linear layers keep their
weights in the model's dtype and round what they read (`population_layers.LinearGroup`); all else is
widened: parameters, which keep the values that they have in the model's dtype, and what embeddings
return. A genome's low-rank part is added in float32 as well, so that no rounding loses it. Kernels
that stand between two products read and write the model's dtype; keys and values are kept in it.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from es_cookbook.checkpoints.linear_weights import expert_parameters, is_linear

NARROW = (torch.bfloat16,)
"""Dtypes that are computed with in this way."""


def widen(model: PreTrainedModel) -> None:
    """Make everything float32 that is no linear weight, in place; tensors are not written to."""
    tables: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables |= {id(parameter) for parameter in module.parameters()}
            module.register_forward_hook(_widened)
    for module in list(model.modules()):
        if is_linear(module) or expert_parameters(module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in NARROW and id(parameter) not in tables:
                setattr(module, name, nn.Parameter(parameter.float(), False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in NARROW:
                setattr(module, name, buffer.float())


def _widened(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    del module, inputs
    return output.float()
