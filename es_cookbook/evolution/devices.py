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
    """Where noise for a model on this device is made: there if `on_gpu`, else on the CPU."""
    return device if on_gpu(device) else torch.device("cpu")


def on_gpu(device: torch.device) -> bool:
    """Whether the Triton programs serve this device: NVIDIA's do, where Triton is installed.

    Under TRITON_INTERPRET=1 they also serve the CPU: so all that runs on a GPU is tested without.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def for_each(work: Callable[[_T], _R], items: Iterable[_T], num_threads: int) -> list[_R]:
    """Do some work on each item, a few at a time; one thread is the caller's own.

    On a GPU it has to be that one: other threads may queue their work on another stream.
    """
    if num_threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))
