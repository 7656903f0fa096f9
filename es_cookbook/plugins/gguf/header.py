"""The header of a GGUF file, checked against the file before a library sees it.

Every length, count, offset and type has to fit into the file, and every setting has to be one that
a model can have. So nothing is allocated because a header says so.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import contextlib
import functools
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import ANY_SIZE, opened
from es_cookbook.common.terminal import one_line

if TYPE_CHECKING:
    import numpy.typing as npt

Value: TypeAlias = "int | float | bool | str | list[Value]"
_STRING, _ARRAY = 8, 9
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The format's number of a type of fixed size -> how `struct` calls it."""
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
"""ggml's number of a type that is not quantised -> torch's name."""
_LONGEST_NAME = 1024
"""Bytes of a key, a tensor's name or a token."""
_LONGEST_TEXT = 2**24
"""Bytes of any other string."""
_LONGEST_TEMPLATE = 2**20
"""Characters of a chat template."""
_LARGEST_HEADER = 2**26
"""Bytes before the weights. As Python's objects, text may take four times as many."""
_MOST_ENTRIES = 2**21
"""Of all arrays; a vocabulary of 250,000 tokens has a million."""
_MOST_KEYS = 2**16
"""Of the metadata, and of the tensors."""
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "context_length": (1, 2**31),
    "attention.layer_norm_rms_epsilon": (0, 1),
    "attention.layer_norm_epsilon": (0, 1),
    "attention.sliding_window": (0, 2**31),
    "rope.dimension_count": (1, 2**16),
    "rope.freq_base": (1, 1e12),
    "rope.freq_base_swa": (1, 1e12),
    "rope.scaling.factor": (1e-3, 1e6),
    "expert_count": (0, 4096),
}
"""Settings of a model, without its architecture's name -> the lowest and highest accepted."""
_EMBEDDING = "token_embd.weight"
_NO_MODELS = {
    "adapter": "a LoRA adapter, which changes a model",
    "mmproj": "the vision tower of a model",
    "clip": "the vision tower of a model",
    "imatrix": "statistics for quantising a model",
}
"""`general.type` or `general.architecture` of a file without a language model -> what it is."""


class Tensor(NamedTuple):
    """A tensor of a file: ggml's shape (fastest dimension first) and type; its place in bytes."""

    shape: tuple[int, ...]
    type: int
    start: int
    size: int


class Header(NamedTuple):
    """What a file says before its weights."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """In which its model is converted: that of its floats, norms apart, or bfloat16."""
        types = {tensor.type for tensor in self.tensors.values()}
        if types <= _FLOATS.keys():
            return _FLOATS[max(types)]  # Where others are narrower, the norms are float32.
        return "bfloat16"


@functools.cache
def import_gguf() -> ModuleType:
    """The package.

    Raises:
        ModelError: It is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF files need a package: pip install 'es-cookbook[gguf]'") from error
    import numpy as np

    class Reader(gguf.GGUFReader):
        """Of plain arrays: a slice of a memory map takes many times as long, of millions."""

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
        ModelError: It is no GGUF file of a whole language model, or contradicts itself; says how.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path, ANY_SIZE, None))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # An empty file cannot be mapped.
            raise refused(path, f"cannot be read: {error}") from error
        return _Reader(path, stack.enter_context(contextlib.closing(data))).header()


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._entries = path, data, 0, 0

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._broken("does not begin with the letters GGUF")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            order = " (another byte order)" if version & 0xFFFF == 0 else ""
            raise self._broken(f"is of version {version}{order}; accepted: 2 and 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, Value] = {}
        for _ in range(self._count(num_values, 13, "metadata", _MOST_KEYS)):
            key = self._string(_LONGEST_NAME)
            if key in metadata:
                raise self._broken(f"has {one_line(key)!r:.80} twice")
            metadata[key] = self._value(key, self._number("I"))
        _check_kind(self._path, metadata)
        placed = [
            self._tensor() for _ in range(self._count(num_tensors, 32, "tensors", _MOST_KEYS))
        ]
        header = Header(metadata, self._placed(placed, metadata.get("general.alignment", 32)))
        _check_sizes(self._path, header)
        return header

    def _broken(self, what: str) -> ModelError:
        return refused(self._path, what)

    def _take(self, size: int) -> int:
        """Where `size` more bytes begin."""
        start, self._at = self._at, self._at + size
        if self._at > _LARGEST_HEADER:
            raise self._broken(f"has a header of more than {_LARGEST_HEADER:,} bytes")
        if self._at > len(self._data):
            raise self._broken(f"ends at byte {len(self._data):,}, in the middle of its header")
        return start

    def _unpacked(self, form: str) -> tuple[Any, ...]:
        form = "<" + form
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))

    def _number(self, form: str) -> int:
        return self._unpacked(form)[0]

    def _count(self, count: int, size: int, what: str, most: int) -> int:
        """A count of things of at least `size` bytes each, all of which must be in the file."""
        if count * size > len(self._data) - self._at:
            raise self._broken(f"announces {count:,} {what}, more than it has room for")
        if count > most:
            raise self._broken(f"has {count:,} {what}; accepted: {most:,}")
        return count

    def _string(self, longest: int) -> str:
        size = self._number("Q")
        if size > longest:
            raise self._broken(
                f"has a string of {size:,} bytes in its header; accepted: {longest:,}"
            )
        start = self._take(size)
        try:
            return self._data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"has a string in its header that is no UTF-8: {error}") from error

    def _value(self, key: str, kind: int) -> Value:
        if kind in _FORMATS:
            return self._unpacked(_FORMATS[kind])[0]
        if kind == _STRING:
            return self._string(_LONGEST_TEXT)
        if kind != _ARRAY:
            raise self._broken(f"has {one_line(key)!r:.80} of the unknown type {kind}")
        entries, length = self._number("I"), self._number("Q")
        if entries != _STRING and entries not in _FORMATS:
            raise self._broken(f"has an array of the type {entries} in {one_line(key)!r:.80}")
        size = 8 if entries == _STRING else struct.calcsize(_FORMATS[entries])
        what = f"entries in {one_line(key)!r:.80}"
        self._entries += self._count(length, size, what, _MOST_ENTRIES - self._entries)
        if entries == _STRING:
            return [self._string(_LONGEST_NAME) for _ in range(length)]
        return list(self._unpacked(f"{length}{_FORMATS[entries]}"))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(_LONGEST_NAME), self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._broken(f"has the tensor {one_line(name)!r:.80} of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, tensors: list[tuple[str, tuple[int, ...], int, int]], alignment: Value
    ) -> dict[str, Tensor]:
        """The tensors in the order of their places, none of which overlap."""
        if type(alignment) is not int or alignment not in {2**n for n in range(3, 21)}:
            raise self._broken(f"has an alignment of {alignment!r:.40}; accepted: a power of two")
        end = first = -(-self._at // alignment) * alignment
        placed: dict[str, Tensor] = {}
        for name, shape, kind, offset in sorted(tensors, key=lambda tensor: tensor[3]):
            shown = f"the tensor {one_line(name)!r:.80}"
            start, size = first + offset, self._size(shown, shape, kind)
            if name in placed or start < end or start % alignment:
                raise self._broken(f"has {shown} twice, or in a wrong place")
            end = start + size
            if end > len(self._data):
                raise self._broken(f"ends at byte {len(self._data):,}, before {shown} does")
            placed[name] = Tensor(shape, kind, start, size)
        return placed

    def _size(self, shown: str, shape: tuple[int, ...], kind: int) -> int:
        sizes = {int(each): size for each, size in import_gguf().GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            raise self._broken(f"has {shown} of the unknown type {kind}")
        block, size = sizes[kind]
        if 0 in shape or shape[0] % block:
            raise self._broken(f"has {shown} of a shape {shape} that its type cannot have")
        return math.prod(shape) // block * size


def _check_kind(path: Path, metadata: Mapping[str, Value]) -> None:
    """Refuse files that hold something else than a whole language model."""
    if metadata.get("split.count", 1) not in (0, 1):
        raise refused(
            path, "is one of several parts of a model: merge them with llama-gguf-split --merge"
        )
    for key in ("general.type", "general.architecture"):
        if (what := _NO_MODELS.get(str(metadata.get(key)))) is not None:
            raise refused(path, f"is {what}, not a model")
    if not isinstance(metadata.get("general.architecture"), str):
        raise refused(path, "does not name an architecture (general.architecture)")
    if metadata.get(f"{metadata['general.architecture']}.attention.causal", True) is not True:
        raise refused(path, "is a model of embeddings, which writes no text")
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str) or len(template) > _LONGEST_TEMPLATE:
        raise refused(
            path,
            f"has a tokenizer.chat_template that is no text of {_LONGEST_TEMPLATE:,} characters",
        )


def _check_sizes(path: Path, header: Header) -> None:
    """Refuse what the tensors do not bear out, and numbers that no model has."""
    metadata, embedding = header.metadata, header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise refused(path, f"has no embedding of tokens ({_EMBEDDING}): it is no language model")
    tokens, rows = metadata.get("tokenizer.ggml.tokens"), embedding.shape[1]
    if not isinstance(tokens, list) or not isinstance(next(iter(tokens), None), str):
        raise refused(path, "has no tokenizer (tokenizer.ggml.tokens)")
    counts = {"tokens": range(1, rows + 1), "merges": range(4 * rows + 1)}
    for name in ("tokens", "merges", "scores", "token_type"):
        found = metadata.get(f"tokenizer.ggml.{name}", tokens)
        accepted = counts.get(name, [len(tokens)])
        if not isinstance(found, list) or len(found) not in accepted:
            raise refused(
                path,
                f"has a tokenizer.ggml.{name} that does not go with {len(tokens):,} tokens and "
                f"{rows:,} rows of the embedding",
            )
    for name in _FLAGS:
        if not isinstance(value := metadata.get(f"tokenizer.ggml.{name}", False), bool):
            raise refused(path, f"has tokenizer.ggml.{name} {value!r:.40}; accepted: a bool")
    of_model = f"{metadata['general.architecture']}."
    for name, (lowest, highest) in {**_NUMBERS, "block_count": (1, len(header.tensors))}.items():
        value = metadata.get(of_model + name, lowest)
        if type(value) not in (int, float) or not lowest <= cast(float, value) <= highest:
            raise refused(
                path,
                f"has {one_line(of_model + name):.80} {value!r:.40}; accepted: {lowest:g} to "
                f"{highest:g}",
            )


def refused(path: Path, what: str) -> ModelError:
    """The error of a file that is not read."""
    return ModelError(f"model_name: the GGUF file {str(path)!r:.300} {what}")
