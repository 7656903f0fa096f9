"""Where noise is made and the centre moves: on the GPU that holds the weights, or on the CPU."""

import importlib.util
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")
_R = TypeVar("_R")


def noise_device(device: torch.device) -> torch.device:
    """The device that generates noise for a model on `device`: itself if `on_gpu`, or the CPU."""
    return device if on_gpu(device) else torch.device("cpu")


def on_gpu(device: torch.device) -> bool:
    """Whether Triton kernels can run on this device: an NVIDIA GPU, where Triton is installed.

    With TRITON_INTERPRET=1 they run on the CPU too, so tests need no GPU.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def for_each(work: Callable[[_T], _R], items: Iterable[_T], num_threads: int) -> list[_R]:
    """Apply `work` to each item in several threads; one thread is the caller's own.

    On a GPU `num_threads` must be 1: other threads may queue their work on another stream.
    """
    if num_threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))
