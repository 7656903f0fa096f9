"""Safetensors files that are written tensor by tensor, so that memory never holds more than one.

The format (https://github.com/huggingface/safetensors) is a JSON header that says where each tensor
lies, and the tensors' bytes. Whoever knows names, dtypes and shapes can write the header first and
the tensors in any order. What comes out is, byte for byte, what the library itself would write.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeAlias

import torch

TensorKind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape."""

_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes, in the order in which the library writes them: widest first."""
_PLACES = {dtype: place for place, dtype in enumerate(_NAMES)}


class TensorFile:
    """A safetensors file under way: a context manager, in which every tensor is written once.

    Args:
        path: made; must not exist.
        kinds: name -> dtype and shape of each tensor.
        metadata: texts to put into the header.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(
        self,
        path: Path,
        kinds: Mapping[str, TensorKind],
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._kinds = kinds
        self._missing = set(kinds)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
        end = 0
        for name in sorted(kinds, key=lambda name: (_PLACES[kinds[name][0]], name)):
            dtype, shape = kinds[name]
            self._offsets[name] = end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [self._offsets[name], end],
            }
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._data_starts = 8 + len(encoded)
        self._file = path.open("xb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, rounded to its dtype in the file.

        Raises:
            ValueError: Another shape than announced.
            OSError: The disk is full or failed.
        """
        dtype, shape = self._kinds[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} was announced as {shape}, found {tuple(tensor.shape)}")
        stored = tensor.detach().to(dtype).contiguous().view(-1)
        self._file.seek(self._data_starts + self._offsets[name])
        self._file.write(stored.view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None and self._missing:
                raise ValueError(f"{min(self._missing)} was announced and never written")
