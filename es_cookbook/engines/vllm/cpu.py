"""Patches that vLLM's CPU builds need before a model is loaded.

They pack linear weights into a private layout and leave an empty parameter behind, so that
code that moves `named_parameters()` moves norms and embeddings only. Here a layer keeps its weight,
and is packed again when it is used after a change: packing costs as much as copying, and the packed
product a quarter less than the plain one. Weights take twice the memory.

Their LoRA arithmetic copies each token's factors and multiplies them as one small matrix a token,
through a general einsum. With a factor or a few a token that costs as much as the layer itself;
here it is two loops that copy nothing. It also gives a request without an adapter the last slot's
(index -1); here it gives none.

They sample a token for a prompt that is only partly computed, discard it, and set the request's
random number generator back by an offset, which a generator on the CPU does not have. Here nothing
is drawn from it for such a token.

A layer of 8-bit integers leaves its weight to oneDNN and has none itself, and it is the weight that
LoRA asks where its slots belong. Here that is the CPU.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from vllm import _custom_ops as ops
from vllm.lora.layers import base_linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils

from es_cookbook.evolution.noise.compiled import compiled

_PRODUCTS_KEPT = 32
"""Number of oneDNN programs kept per weight, one per number of rows; vLLM's own choice."""


def prepare() -> None:
    """Replace all of this in the current process."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # not needed on GPUs

    utils.dispatch_cpu_unquantized_gemm = _keep_weight
    cast(Any, base_linear)._get_lora_device = _cpu_of
    PunicaWrapperCPU.add_lora_linear = _add_lora_linear
    PunicaWrapperCPU.add_lora_logits = _add_lora_logits
    runner = cast(Any, CPUModelRunner)
    runner.sample_tokens = _without_idle_generators(runner.sample_tokens)


def weights_changed() -> None:
    """Tell all layers of this process that their packed weights are outdated."""
    _PackedLinear.num_changes += 1


def _without_idle_generators(sample_tokens: Callable[..., object]) -> Callable[..., object]:
    """Sample without the generators of requests whose token is discarded."""

    @functools.wraps(sample_tokens)
    def sample(self: object, *arguments: object) -> object:
        runner = cast(Any, self)
        generators = runner.input_batch.generators  # by row; the sampler has this very dictionary
        is_discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        rows = [row for row in is_discarded.nonzero()[0].tolist() if row in generators]
        idle = {row: generators.pop(row) for row in rows}
        try:
            return sample_tokens(self, *arguments)
        finally:
            generators.update(idle)

    return sample


def _cpu_of(layer: object) -> torch.device:
    del layer
    return torch.device("cpu")


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    del remove_weight
    has_onednn = ops._supports_onednn  # pyright: ignore[reportPrivateUsage]
    product = _PackedLinear() if has_onednn else torch.nn.functional.linear
    vars(layer)["cpu_linear"] = product  # `__setattr__` is for modules


class _PackedLinear:
    """A layer's product with its weight.

    Attributes:
        num_changes: number of changes of this process's weights reported to `weights_changed`.
    """

    num_changes = 0

    def __init__(self) -> None:
        self._packed: ops.CPUDNNLGEMMHandler | None = None
        self._packed_at = -1
        self._can_pack = True

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._can_pack and self._packed_at != self.num_changes:
            self._pack(weight)
        if self._packed is None:
            return torch.nn.functional.linear(x, weight, bias)
        return ops.onednn_mm(self._packed, x, bias)

    def _pack(self, weight: torch.Tensor) -> None:
        """Pack the weight if oneDNN can: with AVX2 alone it has no 16-bit product."""
        try:
            self._packed = ops.create_onednn_mm(weight.t(), _PRODUCTS_KEPT)
        except RuntimeError:
            self._can_pack, self._packed = False, None
        self._packed_at = self.num_changes


def _add_lora_linear(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    *,
    add_inputs: bool = True,
    **_: object,
) -> None:
    """Add scale · (x Aᵀ) Bᵀ of each token's own slot to its slices of y, in place.

    y is (tokens, outputs), overwritten unless `add_inputs`; x is (tokens, inputs); of each slice of
    the outputs A is (slots, 1, rank, inputs) and B (slots, 1, outputs of the slice, rank).
    """
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    if not add_inputs:
        y.zero_()
    first = 0
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        add_product(y, first, x, a[:, 0], b[:, 0], self.token_lora_indices, scale)
        first += size


def _add_lora_logits(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: torch.Tensor,
    lora_b_stacked: torch.Tensor,
    scale: float,
    **_: object,
) -> None:
    """Add the same to logits, whose columns are the tokens that are sampled from.

    vLLM scores prompts through here too, and does not say whose they are; then nothing is added
    (`VLLMEngine.logprobs` refuses where that would matter).
    """
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    if len(self.sampler_indices) == len(x):
        add_product(
            y, 0, x, lora_a_stacked[:, 0], lora_b_stacked[:, 0], self.sampler_indices, scale
        )


def add_product(
    y: torch.Tensor,
    first: int,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slot_T: torch.Tensor,
    scale: float,
) -> None:
    """Add scale · (x Aᵀ) Bᵀ to y from column `first` on, in place, A and B each token's own.

    y is (tokens, columns), x (tokens, inputs), a (slots, rank, inputs) and b (slots, outputs,
    rank). `slot_T` is each token's slot; where it is negative nothing is added.
    """
    tensors = (y, x, a, b)
    if all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors):
        arrays = y.numpy(), x.numpy(), a.numpy(), b.numpy(), slot_T.numpy()
        _add_rows(*arrays, first, scale)
        return
    outputs = y[:, first : first + b.shape[1]]
    scale_T = (slot_T >= 0).to(x.dtype).mul_(scale)[:, None]
    slot_T = slot_T.clamp(min=0)
    for k in range(a.shape[1]):
        h_T = a[:, k].index_select(0, slot_T).mul_(x).sum(1, keepdim=True).mul_(scale_T)
        outputs.addcmul_(b[:, :, k].index_select(0, slot_T), h_T)


_ROWS, _SLOTS = numba.float32[:, ::1], numba.float32[:, :, ::1]


@compiled(
    numba.void(_ROWS, _ROWS, _SLOTS, _SLOTS, numba.int64[::1], numba.int64, numba.float32),
    fastmath=True,
)
def _add_rows(
    y: NDArray[np.float32],
    x: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    slot_T: NDArray[np.int64],
    first: int,
    scale: float,
) -> None:
    """Compute `add_product` in float32."""
    rank, outputs = a.shape[1], b.shape[1]
    h = np.empty(rank, np.float32)
    for t in range(x.shape[0]):
        slot = slot_T[t]
        if slot < 0:
            continue
        for k in range(rank):
            total = np.float32(0)
            for i in range(x.shape[1]):
                total += x[t, i] * a[slot, k, i]
            h[k] = scale * total
        y_t = y[t, first : first + outputs]
        b_slot = b[slot]
        if rank == 1:  # a separate loop: outputs are neighbours, and go into vectors
            factor, column = h[0], b_slot.reshape(outputs)
            for o in range(outputs):
                y_t[o] += factor * column[o]
        else:
            for o in range(outputs):
                total = np.float32(0)
                for k in range(rank):
                    total += h[k] * b_slot[o, k]
                y_t[o] += total
