"""A model's own modules, where a kernel computes the same in one pass over the rows.

These modules are identified by what they compute, not by their names alone: a module is replaced
only if both give the same for random rows. Outputs of linear layers go into a kernel as they
are, in the dtype of their products, with the low-rank parts of the rows' genomes: adding these
needs no separate pass there.

Most of the time of a 16-bit model goes into its products. Processors with the instructions for it
multiply bfloat16 at twice the rate of float32; others multiply float32 alone (see `products`). All
between products moves little data, and is both more exact and faster in float32, which kernels
compute in. So linear layers keep their weights in the model's dtype, and where products are in
bfloat16 round what they read (`population_layers.LinearGroup`); all else is widened (`widen`):
parameters, which keep the values that they have in the model's dtype, and what embeddings return. A
genome's low-rank part is added in float32 as well, so that no rounding loses it. Kernels that stand
between two products read and write the dtype of products; keys and values of a model in bfloat16
are kept in bfloat16.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from es_cookbook.checkpoints.linear_weights import expert_parameters, is_linear
from es_cookbook.engines.torch.kernels.lanes import Row
from es_cookbook.engines.torch.kernels.rows import RankFactors, rms_norm, silu_and_multiply

_TOLERANCE = 1e-5

_LEAST_SIZE = 128
"""Inputs or outputs of a layer below which products in int8 gain less than half."""


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """The path on which batches of a model run.

    Attributes:
        flat: as flat rows over a slot cache; the rest says how the model's own forward does it.
        padded: prompts of different lengths make a batch, padded on the left and masked.
        mixed: so do different genomes.
        wide: all but the products of a 16-bit model is in float32 (see `widen`).
        products: dtype of linear layers' products on the CPU; None: that of their weights; of int8,
            in float32 until the weights are packed.
        kept: dtype of cached keys and values on the CPU, on the flat path.
        cached: the model has a cache that is right; without one every token runs all before it.
    """

    flat: bool = False
    padded: bool = True
    mixed: bool = True
    cached: bool = True
    wide: bool = False
    products: torch.dtype | None = None
    kept: torch.dtype = torch.float32

    def rows_of(self, weight: torch.Tensor) -> torch.dtype:
        """Return the dtype of the rows that a linear layer with this weight reads and writes.

        Models keep some weights in float32; their inputs are not rounded.
        """
        is_narrow = weight.dtype.itemsize < torch.float32.itemsize
        if not (self.wide and self.products and is_narrow):
            return weight.dtype
        return torch.float32 if self.products == torch.int8 else self.products

    def multiplies(self, weight: torch.Tensor) -> bool:
        """Return whether products with this weight are in float32 (`products.multiply`)."""
        products = self.products or weight.dtype
        return has_kernels(weight.device) and products in (torch.float32, torch.int8)

    def quantises(self, weight: torch.Tensor) -> bool:
        """Return whether a packed copy of this linear weight is in int8 (`int8.Int8Weight`).

        Small ones are not, nor those that a model of 16 bits keeps in float32.
        """
        is_kept = self.wide and weight.dtype == torch.float32
        return self.products == torch.int8 and not is_kept and min(weight.shape) >= _LEAST_SIZE

    @override
    def __str__(self) -> str:
        """Return the name in docs/models.md: "flat", or "own" and what the model cannot do.

        >>> print(Path(flat=True), Path(), Path(padded=False, cached=False), sep="; ")
        flat; own; own, equal lengths, no cache
        """
        if self.flat:
            return "flat"
        words = (
            (self.padded, "equal lengths"),
            (self.mixed, "one genome a batch"),
            (self.cached, "no cache"),
        )
        return ", ".join(("own", *(word for can, word in words if not can)))


FLAT = Path(flat=True)

KERNEL_DEVICES = frozenset({"cpu"})
"""Types of devices on which this package's own kernels compute."""


def has_kernels(device: torch.device) -> bool:
    """Return whether this package's own kernels compute on a device."""
    return device.type in KERNEL_DEVICES


_NO_ROWS = np.zeros((1, 1, 1), np.float32)
_NO_COLUMNS, _NO_BLOCKS = np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
NO_FACTORS: RankFactors = (_NO_ROWS, _NO_ROWS, _NO_COLUMNS, _NO_BLOCKS, 1)
NO_NORMS: tuple[Row, Row, float] = (_NO_ROWS[0, 0, :0], _NO_ROWS[0, 0, :0], 0.0)


Projection: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, RankFactors]]
"""Linear layers of one input: it as rows, what the shared weights make of these, side by side, both
in the dtype of products, and what the genomes of the rows add to that."""

LinearOutputs: TypeAlias = tuple[
    torch.Tensor,
    torch.Tensor,
    RankFactors,
    tuple[torch.Tensor, torch.Tensor] | None,
    tuple[Row, Row, float],
]
"""Inputs of attention, as kernels take them: see `attention.Linear`."""


def rows_of(tensor: torch.Tensor) -> Row:
    """Return a tensor's memory as kernels read it."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def suits_kernels(tensor: torch.Tensor) -> bool:
    """Return whether kernels can work on a tensor in place."""
    return has_kernels(tensor.device) and tensor.dtype == torch.float32


class Norm(nn.Module):
    """An RMSNorm, in the place and under the name of the module it replaces."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        rms_norm(rows.numpy(), self.weight.detach().numpy(), self.variance_epsilon, out.numpy())
        return out.view(hidden_states.shape)


class GatedLayers(nn.Module):
    """The gated layers of a Llama-like model, in the place of the module.

    Args:
        gate_and_up: computes both side by side.
    """

    def __init__(
        self,
        gate_proj: nn.Module,
        up_proj: nn.Module,
        down_proj: nn.Module,
        gate_and_up: Projection,
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self._gate_and_up = gate_and_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(SiLU(gate(x)) · up(x))."""
        rows, both, factors = self._gate_and_up(x)
        out = both.new_empty(len(both), both.shape[-1] // 2)
        silu_and_multiply(rows_of(both), rows_of(rows), factors, rows_of(out))
        return self.down_proj(out.view(*x.shape[:-1], -1))


class RotaryAttention(nn.Module):
    """Attention of a Llama-like model, in the place and under the names of the module it replaces.

    Args:
        module: has q_proj, k_proj, v_proj and o_proj, and maybe q_norm and k_norm.
        projection: computes the first three side by side.
        heads: number of kv heads, and d.
        attention: attention of this layer for the batch under way.
    """

    def __init__(
        self,
        module: nn.Module,
        projection: Projection,
        heads: tuple[int, int],
        attention: Callable[[LinearOutputs, tuple[int, int]], torch.Tensor],
    ) -> None:
        super().__init__()
        for name, child in module.named_children():
            setattr(self, name, child)
        self._projection = projection
        self._heads = heads
        self._attention = attention
        children = dict(module.named_children())
        self._o_proj = children["o_proj"]
        self._norms = [children[name] for name in ("q_norm", "k_norm") if name in children]

    @property
    def _norm_weights(self) -> tuple[Row, Row, float]:
        if not self._norms:
            return NO_NORMS
        q, k = (norm.weight.detach().numpy() for norm in self._norms if isinstance(norm, Norm))
        return q, k, float(getattr(self._norms[0], "variance_epsilon", 0.0))

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend as in transformers: (1, T, n), cosines and sines (1, T, rotary d) if any."""
        del options
        x_T_N, y_T_N, factors = self._projection(hidden_states)
        linear = y_T_N, x_T_N, factors, position_embeddings, self._norm_weights
        out_T_N = self._attention(linear, self._heads)
        return self._o_proj(out_T_N.unsqueeze(0)), None


def replace(model: nn.Module, like: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each module for which `like` returns another."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if replacement := like(child):
                setattr(parent, name, replacement)


def norm_like(module: nn.Module) -> Norm | None:
    """Return the same as a kernel for an RMSNorm in float32 on the CPU, or else None."""
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
    rounded: torch.dtype = torch.float32,
) -> bool:
    """Return whether both agree on rows of `size` random numbers, except for rounding.

    `rounded` is the dtype of intermediate results, which may be rounded up or down.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, size, generator=generator)
    tolerance = max(_TOLERANCE, 2 * torch.finfo(rounded).eps)
    with torch.inference_mode():
        try:
            return torch.allclose(module(x), other(x), rtol=tolerance, atol=tolerance)
        except Exception:  # it wants something else than rows
            return False


NARROW = (torch.bfloat16, torch.float16)
"""Dtypes that are computed with in this way."""


def widen(model: PreTrainedModel) -> None:
    """Make all but linear weights float32, in place; tensors are not written to."""
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
