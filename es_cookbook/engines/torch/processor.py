"""Which dtype this machine multiplies fastest: what products of 16-bit weights are computed in.

Processors with instructions for bfloat16 (AVX512_BF16, AMX, some of ARM's) multiply it at twice the
rate of float32 or more. Most others take several times as long as for float32, on AVX2 ten times,
whatever they are called. So it is measured, once for a machine: products of weights in bfloat16,
by oneDNN and in float32 (`kernels.products`). What came out is kept in a file beside the models
that were made of others (`checkpoints.model_files`), under all that it depends on: the processor's
features, limits that the environment sets to the instructions in use, versions. Nobody asks for
float16 products: no CPU that is known of multiplies it faster than float32 without rounding sums.

Weights keep their dtype either way, and so do the centre, the history and its fingerprints.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from llvmlite import binding

from es_cookbook.checkpoints.model_files import cache_directory, write_whole
from es_cookbook.common.files import parsed
from es_cookbook.common.machine.compiled import features
from es_cookbook.common.terminal import say
from es_cookbook.engines.torch.kernels.lanes import SOURCES
from es_cookbook.engines.torch.kernels.packed import PackedWeight, one_thread
from es_cookbook.engines.torch.kernels.products import multiply

_ENOUGH = 1.2
"""How many times as fast bfloat16 has to be: float32 is more exact, and the same everywhere."""
_ROWS, _IN, _OUT = 128, 576, 1024
_REPEATS = 5
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "NUMBA_CPU_NAME")
"""Environment variables that keep torch, oneDNN or kernels from some instructions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Products of weights in bfloat16, in GFLOP/s of one core.

    Attributes:
        float32: the weights widened, sums in float32.
        bfloat16: by torch, rows rounded to bfloat16.
        packs: oneDNN can hold the weights in its own layout (`kernels.packed`).
    """

    float32: float
    bfloat16: float
    packs: bool

    def __post_init__(self) -> None:
        if not (0 < self.float32 < math.inf and 0 < self.bfloat16 < math.inf):
            raise ValueError(f"rates are above 0, found {self}")

    @property
    def slowdown(self) -> float:
        """How many times as long products in bfloat16 take as those in float32."""
        return self.float32 / self.bfloat16

    @property
    def is_native(self) -> bool:
        """Whether bfloat16 is worth its rounding."""
        return self.bfloat16 > _ENOUGH * self.float32


def products_of(weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of the products of weights of a dtype that are fastest on a device."""
    if device.type == "cuda" and weights == torch.bfloat16:
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if device.type != "cpu":
        return weights
    return weights if weights == torch.bfloat16 and rates().is_native else torch.float32


def has_int8() -> bool:
    """Whether there are instructions for products of int8 (`kernels.int8`) that may be used."""
    return any(name in features().split(",") for name in ("+avx512vnni", "+avxvnni"))


@functools.cache
def rates() -> Rates:
    """Of this machine, as its file says or as measured now."""
    path = cache_directory() / f"processor-{_machine()}.json"
    try:
        known = cast("dict[str, float]", parsed(path.read_bytes()))
        return Rates(float(known["float32"]), float(known["bfloat16"]), bool(known["packs"]))
    except (OSError, ValueError, TypeError, KeyError):  # There is none, or it is damaged.
        found = measured()
    _tell(found, path)
    with contextlib.suppress(OSError):  # It is measured again by the next process.
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(found)))
    return found


def _tell(found: Rates, path: Path) -> None:
    chosen = "bfloat16" if found.is_native else "float32"
    faster = "; engine.products=int8 rounds them to 8 bits and takes half the time"
    say(
        f"a core of this processor multiplies {found.float32:.0f} GFLOP/s in float32 and "
        f"{found.bfloat16:.0f} in bfloat16: weights in bfloat16 are multiplied in {chosen} "
        f"(measured once, kept in {path})"
        f"{faster if has_int8() and not found.is_native else ''}"
    )


def _machine() -> str:
    """A digest of all that the rates depend on."""
    limits = [f"{name}={os.environ.get(name, '')}" for name in _LIMITS]
    parts = [platform.machine(), binding.get_host_cpu_name(), features(), *limits]
    text = "\n".join([*parts, torch.__version__, SOURCES])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def measured() -> Rates:
    """Of this machine, as measured now."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, _IN, generator=generator) for n in (_ROWS, _OUT))
    rounded, weight = x.bfloat16(), weight.bfloat16()
    with torch.inference_mode(), one_thread():
        in_float32 = _rate(lambda: multiply(x, weight))
        packed = _packed(weight, rounded)
        product = packed or functools.partial(F.linear, weight=weight)
        return Rates(in_float32, _rate(lambda: product(rounded)), packed is not None)


def _packed(weight: torch.Tensor, rows: torch.Tensor) -> PackedWeight | None:
    """The weight packed, if a row's bits depend neither on the rows' number nor on its place."""
    try:
        packed = PackedWeight(weight, None)
        whole = packed(rows)
    except (RuntimeError, AttributeError):  # oneDNN has no such product here
        return None
    parts = [packed(rows[first:].contiguous()) for first in (1, _ROWS // 2, _ROWS - 16)]
    return packed if all(torch.equal(part, whole[-len(part) :]) for part in parts) else None


def _rate(product: Callable[[], object]) -> float:
    """GFLOP/s, by the shortest of several, in time of this thread's processor."""
    shortest = math.inf
    for _ in range(_REPEATS):
        began = time.thread_time()
        product()
        shortest = min(shortest, time.thread_time() - began)
    return round(2e-9 * _ROWS * _IN * _OUT / max(shortest, 1e-9), 3)
