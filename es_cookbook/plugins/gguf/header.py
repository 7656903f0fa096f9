"""The header of a GGUF file, whose counts are checked before a library reads it.

The package `gguf` trusts every count of a file: a header of a few bytes could keep it busy for
years. So all lengths are first compared with the size of the file; after that, no count can cause a
large allocation or a long loop.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import ANY_SIZE, opened

if TYPE_CHECKING:
    import numpy.typing as npt

Value: TypeAlias = "int | float | bool | str | list[Value]"
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The format's number of a type of fixed size -> bytes."""
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
"""ggml's number of a type that is not quantised -> torch's name."""
_LONGEST_TEXT = 2**20
"""Limit on the bytes of a string."""
_LARGEST_HEADER = 2**26
"""Bytes before the weights. As Python objects, text may take four times as many."""
_MOST_ENTRIES = 2**21
"""Limit on the entries of all arrays; a vocabulary of 250,000 tokens has a million."""
_MOST_KEYS = 2**16
"""Limit on the keys of the metadata, and on the tensors."""
_EMBEDDING = "token_embd.weight"


class Tensor(NamedTuple):
    """A tensor of a file: ggml's shape (fastest dimension first) and type; its place in bytes."""

    shape: tuple[int, ...]
    type: int
    start: int
    size: int


class Header(NamedTuple):
    """The contents of a file before its weights."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """The dtype of the converted model: that of its floats without norms, or bfloat16."""
        types = {tensor.type for tensor in self.tensors.values()}
        if types <= _FLOATS.keys():
            return _FLOATS[max(types)]  # Where others are narrower, the norms are float32.
        return "bfloat16"


@functools.cache
def import_gguf() -> ModuleType:
    """Import the package.

    Raises:
        ModelError: It is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF files need a package: pip install 'es-cookbook[gguf]'") from error
    import numpy as np

    class Reader(gguf.GGUFReader):
        """Reads from a plain array: a slice of a memory map takes many times as long."""

        @property
        def data(self) -> "npt.NDArray[Any]":
            return self._data

        @data.setter
        def data(self, value: "npt.NDArray[Any]") -> None:
            self._data = value.view(np.ndarray)

    gguf.GGUFReader = Reader
    # transformers asks for the same map again for each of a model's hundreds of modules.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    return gguf


def read_header(path: Path) -> Header:
    """Read a file's metadata and the places of its tensors.

    Raises:
        ModelError: It is not a GGUF file of a whole language model, or is inconsistent; says how.
            Or the package is not installed.
    """
    gguf = import_gguf()
    try:
        with (
            opened(path, ANY_SIZE, None) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            _Counts(data).check()
            file_size = len(data)
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            each.name: Tensor(
                tuple(map(int, each.shape)),
                int(each.tensor_type),
                int(each.data_offset),
                int(each.n_bytes),
            )
            for each in reader.tensors
        }
        if sum(tensor.size for tensor in tensors.values()) > file_size:
            raise ValueError("its tensors share bytes")
    except Exception as error:  # The library raises many kinds; to the user it is one mistake.
        is_cut = "cannot reshape" in str(error)
        what = "it ends in the middle of its weights" if is_cut else error
        raise refused(path, f"cannot be read: {what}"[:300]) from error
    header = Header(metadata, tensors)
    _check_model(path, header)
    return header


class _Counts:
    """Compares the counts of a header with the bytes that there are."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._entries = data, 0, 0

    def check(self) -> None:
        """Walk over the header.

        Raises:
            ValueError: Something does not fit into the file.
        """
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        self._at = 4
        if (version := self._number("I")) not in (2, 3):
            order = " (another byte order)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"it is of version {version}{order}; accepted: 2 and 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > _MOST_KEYS:
            raise ValueError(f"it announces {max(num_tensors, num_values):,} tensors or settings")
        for _ in range(num_values):
            self._skip_string()
            self._skip_value(self._number("I"))
        for _ in range(num_tensors):
            self._skip_string()
            self._skip(self._number("I") * 8 + 12)  # Its shape, type and place.

    def _skip(self, size: int) -> int:
        """Skip `size` bytes; returns where they begin."""
        start, self._at = self._at, self._at + size
        if self._at > min(_LARGEST_HEADER, len(self._data)):
            raise ValueError("it ends in the middle of its header, or the header is too long")
        return start

    def _number(self, form: str) -> int:
        form = "<" + form
        return struct.unpack_from(form, self._data, self._skip(struct.calcsize(form)))[0]

    def _skip_string(self) -> None:
        if (size := self._number("Q")) > _LONGEST_TEXT:
            raise ValueError(f"it has a string of {size:,} bytes; accepted: {_LONGEST_TEXT:,}")
        self._skip(size)

    def _skip_value(self, kind: int) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            entries, length = self._number("I"), self._number("Q")
            self._entries += length
            if entries == _ARRAY or self._entries > _MOST_ENTRIES:
                raise ValueError("it has arrays of arrays, or too many entries in its arrays")
            for _ in range(length):
                self._skip_value(entries)
        else:
            raise ValueError(f"it has a value of the unknown type {kind}")


def _check_model(path: Path, header: Header) -> None:
    """Refuse files that hold something else than a whole language model."""
    metadata, tensors = header.metadata, header.tensors
    if metadata.get("split.count", 1) not in (0, 1):
        raise refused(
            path, "is one of several parts of a model: merge them with llama-gguf-split --merge"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise refused(path, "does not name an architecture (general.architecture)")
    if metadata.get(f"{architecture}.attention.causal", True) is not True:
        raise refused(path, "is an embedding model, which generates no text")
    if _EMBEDDING not in tensors or len(tensors[_EMBEDDING].shape) != 2:
        raise refused(path, f"has no embedding of tokens ({_EMBEDDING}): it is no language model")
    tokens, rows = metadata.get("tokenizer.ggml.tokens"), tensors[_EMBEDDING].shape[1]
    if not isinstance(tokens, list) or not isinstance(next(iter(tokens), None), str):
        raise refused(path, "has no tokenizer (tokenizer.ggml.tokens)")
    if len(tokens) > rows:
        raise refused(path, f"has {len(tokens):,} tokens and {rows:,} rows of the embedding")
    blocks = metadata.get(f"{architecture}.block_count", 1)
    if not isinstance(blocks, int) or not 1 <= blocks <= len(tensors):
        raise refused(path, f"has {architecture}.block_count {blocks!r:.40}, which it cannot have")


def refused(path: Path, what: str) -> ModelError:
    """Return the error of a file that is not read."""
    return ModelError(f"model_name: the GGUF file {str(path)!r:.300} {what}")
