"""Machines by name: how many GPUs, and how much memory each has.

`8xh100`, `24gb`, `laptop`, or `here`: what this machine has.
"""

import dataclasses
import re

from es_cookbook.common.errors import ConfigError, nearest

GPUS = {
    "a10": 24,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "b200": 180,
    "h100": 80,
    "h200": 141,
    "l4": 24,
    "l40s": 48,
    "rtx-4090": 24,
}
"""Memory in GB (10⁹ bytes), from NVIDIA's data sheets; the SXM version where there are several."""
LAPTOP = 8
"""GB of a laptop's memory that a run may take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Some GPUs, each with so many GB (10⁹ bytes); without any, the memory of the machine."""

    num_gpus: int
    gigabytes: float


def machine_of(text: str) -> Machine:
    """The machine that a user's word stands for.

    Raises:
        ConfigError: It stands for none.
    """
    if text == "here":
        return _this_machine()
    if text == "laptop":
        return Machine(0, LAPTOP)
    found = re.fullmatch(r"(?:([1-9]\d{0,4})x)?(?:(\d+(?:\.\d+)?)gb|(.+))", text)
    count, size, name = found.groups() if found else (None, None, text)
    gigabytes = float(size) if size else GPUS.get(name, 0)
    if not gigabytes:
        raise ConfigError(
            f"machine={text}: {nearest(name or text, ['here', 'laptop', *GPUS])}; several are "
            "8xh100, and another GPU is its memory, 24gb"
        )
    return Machine(int(count or 1), gigabytes)


def _this_machine() -> Machine:
    import torch

    from es_cookbook.engines.torch.memory import free_bytes

    if not (count := torch.cuda.device_count()):
        return Machine(0, free_bytes(torch.device("cpu")) / 1e9)
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
    return Machine(count, min(sizes) / 1e9)
