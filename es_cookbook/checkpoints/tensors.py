"""Files of tensors, read and written one tensor at a time; memory never holds more than one.

A checkpoint's files are mapped into memory and a tensor's bytes come from the disk when they are
looked at, so a model of any size can be read, hashed or replayed in the memory of a few tensors.

Files are safetensors (https://github.com/huggingface/safetensors): a JSON header that says
where each tensor lies, and the tensors' bytes. With names, dtypes and shapes known, the header is
written first and the tensors in any order. The file is, byte for byte, what the library itself
would write.

A snapshot is such a file: the centre of one generation, to begin a replay from. It holds the
selected parameters in float32, and in its header the generation and the fingerprint. A replay from
it has the same bits as one from the base, so an engine that cannot read it begins at the base.
"""

import ctypes
import dataclasses
import json
import logging
import math
import mmap
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeAlias, cast

import safetensors
import torch

from es_cookbook.common.errors import ESCookbookError, HistoryError, ModelError
from es_cookbook.common.files import ANY_SIZE, check_file
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.exact import MODULUS, fingerprint_of
from es_cookbook.evolution.genome import Step

_logger = logging.getLogger(__name__)
_UNCHANGED = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ [1-9]\d* +/.*\n(?:[A-Z].*\n)*?Anonymous: +0 kB",
    re.MULTILINE,
)
"""Matches a mapped file without changed pages in a process's list of memory."""

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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in configs.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


class ReadTensors(Mapping[str, torch.Tensor]):
    """Name -> tensor, each read when it is asked for."""

    def __init__(self, names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weight_files(paths: Iterable[Path]) -> ReadTensors:
    """Open a checkpoint's tensors by name, each read when asked for. Threads may share it.

    `paths` are safetensors files, or `.bin` files of `torch.save`.

    Raises:
        ModelError: A file that cannot be read; says which.
    """
    tensor_of: dict[str, Callable[[str], torch.Tensor]] = {}
    for path in paths:
        try:
            reader = _read_safetensors if path.suffix == ".safetensors" else _read_bin
            names, tensor = reader(path)
        except Exception as error:  # each library has its own; to the user it is one mistake
            raise ModelError(f"cannot read weights from {str(path)!r}: {error}") from error
        tensor_of.update(dict.fromkeys(names, tensor))
    return ReadTensors(tensor_of, lambda name: tensor_of[name](name))


def leave_in_files(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the memory of tensors that lie in mapped files; they are read again when used.

    Only where the system says that no page of the mapping was changed (Linux).
    """
    try:
        maps = Path("/proc/self/smaps").read_text()
    except OSError:
        return
    unchanged = [(int(begin, 16), int(end, 16)) for begin, end in _UNCHANGED.findall(maps)]
    for tensor in tensors:
        # Whole pages alone: the neighbours' bytes on a shared one are in use.
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if size > 0 and any(low <= begin and begin + size <= high for low, high in unchanged):
            pages = ctypes.c_void_p(begin), ctypes.c_size_t(size)
            ctypes.CDLL(None).madvise(*pages, mmap.MADV_DONTNEED)


def _read_safetensors(path: Path) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    file = cast("Any", safetensors.safe_open(path, framework="pt"))
    return list(file.keys()), file.get_tensor


def _read_bin(path: Path) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # a file of torch before 1.6, which cannot be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    tensors = cast("dict[str, torch.Tensor]", loaded)
    return list(tensors), tensors.__getitem__


class TensorFile:
    """A safetensors file under way: a context manager, in which every tensor is written once.

    Args:
        path: must not exist.
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

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._file:
            if kind is None and self._missing:
                raise ValueError(f"{min(self._missing)} was announced and never written")


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A centre on the disk.

    Attributes:
        generation: number of generations after which it was the centre.
        fingerprint: fingerprint of the centre, as the file says.
        tensors: name -> float32 tensor, read when it is asked for.
    """

    path: Path
    generation: int
    fingerprint: int
    tensors: Mapping[str, torch.Tensor]

    def holds_what_it_says(self) -> bool:
        """Return whether the tensors have the fingerprint; reads all of them."""
        if any(tensor.dtype != torch.float32 for tensor in self.tensors.values()):
            return False

        def part(name: str) -> int:
            return fingerprint_of(name, self.tensors[name])

        with ThreadPoolExecutor(num_cores()) as pool:
            return sum(pool.map(part, self.tensors)) % MODULUS == self.fingerprint


def metadata(generation: int, fingerprint: int) -> dict[str, str]:
    """Return the metadata for a snapshot's header."""
    return {"generation": str(generation), "fingerprint": f"{fingerprint:x}"}


def read_snapshot(path: Path) -> Snapshot:
    """Open a snapshot; its tensors are not read yet.

    Raises:
        HistoryError: It cannot be read, or is not a snapshot.
    """
    try:
        check_file(path, ANY_SIZE, path.parent.parent)
        with safetensors.safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            said = cast("dict[str, str]", file.metadata() or {})
        return Snapshot(
            path, int(said["generation"]), int(said["fingerprint"], 16), weight_files([path])
        )
    except KeyError as error:
        raise HistoryError(f"{path} is no snapshot: it does not say its {error.args[0]}") from error
    except (OSError, ValueError, safetensors.SafetensorError, ESCookbookError) as error:
        raise HistoryError(f"{path} cannot be read as a snapshot: {error}") from error


def restore_centre(centre: Centre, steps: Sequence[Step], snapshot: Path | None) -> int:
    """Set a centre to the base moved by these steps. Returns its fingerprint.

    Args:
        centre: centre of the base, on any device, also of a part of the parameters.
        steps: all steps, from the base on.
        snapshot: an earlier centre to start from; the base if None, or if it cannot be used.
    """
    if snapshot is None:
        return centre.restore(steps)
    try:
        found = read_snapshot(snapshot)
        if found.generation > len(steps):
            raise HistoryError(
                f"{snapshot} is of generation {found.generation}, beyond the {len(steps)} wanted"
            )
        held = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
        if held != dict(centre.shapes):
            raise HistoryError(f"{snapshot} holds other parameters than the search space")
    except HistoryError as error:
        _logger.warning("%s; the centre is restored from the base model instead", error)
        return centre.restore(steps)
    return centre.restore(steps[found.generation :], found.tensors)
