"""A checkpoint's tensors, one at a time, and what identifies them.

The files are mapped into memory and a tensor's bytes come from the disk when they are looked at, so
a model of any size can be read, hashed or replayed in the memory of a few tensors.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

import safetensors
import torch
from transformers.utils.hub import cached_file

from es_cookbook.common.errors import ModelError

# In the order in which transformers looks for them.
_SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


class _OpenFile(Protocol):
    """The part of `safetensors.safe_open` that is used here."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class WeightFiles(Mapping[str, torch.Tensor]):
    """Name -> tensor of a checkpoint, each read when it is asked for. Threads may share it.

    Args:
        paths: safetensors files, or `.bin` files of `torch.save`.

    Raises:
        ModelError: A file that cannot be read; says which.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensor: dict[str, Callable[[str], torch.Tensor]] = {}
        for path in paths:
            try:
                reader = _read_safetensors if path.suffix == ".safetensors" else _read_bin
                names, tensor = reader(path)
            except Exception as error:  # each library has its own; to the user it is one mistake
                raise ModelError(f"cannot read weights from {str(path)!r}: {error}") from error
            self._tensor.update(dict.fromkeys(names, tensor))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensor[name](name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensor)

    def __len__(self) -> int:
        return len(self._tensor)


def weight_files(model_name: str) -> WeightFiles:
    """The checkpoint of a directory or Hub name.

    Raises:
        ModelError: There is none, or it cannot be read; says where.
    """
    return WeightFiles(weight_paths(model_name))


def weight_paths(model_name: str) -> list[Path]:
    """The files of a checkpoint that transformers takes, safetensors before others.

    Raises:
        ModelError: There is none, or it cannot be read; says where.
    """
    for single, index in _SINGLE_AND_INDEX:
        if path := find_file(model_name, single):
            return [path]
        if path := find_file(model_name, index):
            return _shards(model_name, path)
    raise ModelError(
        f"model_name: {model_name!r} has no weights: none of "
        f"{', '.join(name for names in _SINGLE_AND_INDEX for name in names)} in its directory, or "
        "on the Hub and in the cache"
    )


def find_file(model_name: str, file_name: str) -> Path | None:
    """A file of a directory or Hub name, from the cache where it is there; None if it has none.

    Raises:
        ModelError: The Hub refuses it.
    """
    try:
        found = cached_file(
            model_name,
            file_name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception as error:  # transformers raises many kinds; to the user it is one mistake
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model_name: cannot find {model_name!r}: {first_line}") from error
    return None if found is None else Path(found)


def _shards(model_name: str, index: Path) -> list[Path]:
    weight_map = cast("dict[str, dict[str, str]]", json.loads(index.read_text()))["weight_map"]
    paths: list[Path] = []
    for name in sorted(set(weight_map.values())):
        path = find_file(model_name, name)
        if path is None:
            raise ModelError(
                f"model_name: {model_name!r} has no file {name!r}, which its {index.name} names"
            )
        paths.append(path)
    return paths


def _read_safetensors(path: Path) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    file = cast("_OpenFile", safetensors.safe_open(path, framework="pt"))
    return list(file.keys()), file.get_tensor


def _read_bin(path: Path) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # a file of torch before 1.6, which cannot be mapped
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    tensors = cast("dict[str, torch.Tensor]", loaded)
    return list(tensors), tensors.__getitem__
