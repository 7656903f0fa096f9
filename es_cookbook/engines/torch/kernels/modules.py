"""A model's own modules, where a kernel computes the same in one pass over the rows.

Which modules these are is found by what they compute, not by their names alone: a module is
replaced only if random rows come out of both alike.
"""

from collections.abc import Callable

import torch
from torch import nn

from es_cookbook.engines.torch.kernels.loops import rms_norm, silu_and_multiply

_TOLERANCE = 1e-5


def suits_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels can read it."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class Norm(nn.Module):
    """An RMSNorm, in the place and under the name of the module it replaces."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., n) -> (..., n)."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        rms_norm(rows.numpy(), self.weight.detach().numpy(), self.variance_epsilon, out.numpy())
        return out.view(hidden_states.shape)


class GatedLayers(nn.Module):
    """The gated layers of a Llama-like model, in the place of the module that they are of.

    Args:
        gate_and_up: computes both side by side, (..., in) -> (..., 2 n).
    """

    def __init__(
        self,
        gate_proj: nn.Module,
        up_proj: nn.Module,
        down_proj: nn.Module,
        gate_and_up: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self._gate_and_up = gate_and_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """down(SiLU(gate(x)) · up(x))."""
        both = self._gate_and_up(x)
        rows = both.view(-1, both.shape[-1])
        out = rows.new_empty(len(rows), rows.shape[-1] // 2)
        silu_and_multiply(rows.numpy(), out.numpy())
        return self.down_proj(out.view(*both.shape[:-1], -1))


def norm_like(module: nn.Module) -> Norm | None:
    """The same as a kernel, if it is an RMSNorm in float32 on the CPU."""
    parameters = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or not isinstance(epsilon, float):
        return None
    if weight.dim() != 1 or not suits_kernels(weight) or list(module.children()):
        return None
    norm = Norm(weight, epsilon)
    return norm if alike(module, norm, len(weight)) else None


def alike(
    module: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
    size: int,
) -> bool:
    """Whether both make the same of rows of so many random numbers, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, size, generator=generator)
    with torch.inference_mode():
        try:
            return torch.allclose(module(x), other(x), rtol=_TOLERANCE, atol=_TOLERANCE)
        except Exception:  # it wants something else than rows
            return False
