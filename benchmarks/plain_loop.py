"""A population on vLLM as a plain loop samples it, for `benchmarks.engines`.

One genome at a time: noise is added to all weights in place, the problems are answered, and the
noise is drawn again and subtracted. That needs weights that vLLM has not packed away, which its CPU
build does as a model is loaded; so products are torch's own here. The step of a generation is left
out, in the loop's favour.
"""

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers import utils

SIGMA = 0.005


def _plain_product(layer: nn.Module, remove_weight: bool) -> None:
    """Replace the function that packs a layer's weight."""
    del remove_weight
    vars(layer)["cpu_linear"] = nn.functional.linear  # `__setattr__` is for modules


utils.dispatch_cpu_unquantized_gemm = _plain_product


class NoisyWorker:
    """Methods added to a vLLM worker, as `worker_extension_cls`."""

    def add_noise(self, seed: int, scale: float) -> None:
        """Add scale · standard-normal numbers of a seed to every parameter."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(noise, alpha=scale)

    def num_elements(self) -> int:
        """Return the number of elements of all parameters that noise is added to."""
        return sum(parameter.numel() for parameter in self._parameters())

    def _parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model_runner.model.parameters()  # pyright: ignore[reportAttributeAccessIssue]
