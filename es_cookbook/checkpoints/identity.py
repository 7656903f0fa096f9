"""What a base model is: digests over its weights and its tokenizer, wherever the files lie.

Files of safetensors are hashed from where they are mapped into memory, without torch: a run that
cannot go on with another base says so before anything heavy is imported.
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import safetensors

from es_cookbook.checkpoints.model_files import (
    OLDER_VOCABULARY,
    TOKENIZER_FILES,
    VOCABULARY,
    model_directory,
    weight_paths,
)
from es_cookbook.common.errors import ModelError

TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_HASHING_THREADS = 16
"""More than cores: reading from a disk or over a network gains from it."""
_SAFETENSORS = ".safetensors"
_DTYPES = {
    "BF16": "torch.bfloat16",
    "BOOL": "torch.bool",
    "F16": "torch.float16",
    "F32": "torch.float32",
    "F64": "torch.float64",
    "F8_E4M3": "torch.float8_e4m3fn",
    "F8_E5M2": "torch.float8_e5m2",
    "I16": "torch.int16",
    "I32": "torch.int32",
    "I64": "torch.int64",
    "I8": "torch.int8",
    "U8": "torch.uint8",
}
"""The format's names of dtypes -> torch's, which the digest has."""
_Hash: TypeAlias = Callable[[], str]


def base_identity(model_name: str) -> tuple[str, str]:
    """Hexadecimal digests of the weights and the tokenizer of a directory or Hub name.

    Two checkpoints are the same if their tensors are, by name, dtype, shape and every bit, wherever
    they lie and however their files are split.

    Raises:
        ModelError: Weights or tokenizer are missing or cannot be read; says where.
    """
    hashes: dict[str, _Hash] = {}
    for path in weight_paths(model_name):
        hashes.update(_stored(path) if path.suffix == _SAFETENSORS else _loaded(path))
    names = sorted(hashes)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = [pool.submit(hashes[name]) for name in names]
        weights = _digest((n, digest.result()) for n, digest in zip(names, digests, strict=True))
    return weights, _tokenizer_digest(model_name)


def tokenizer_files(model_name: str) -> list[Path]:
    """The files of a directory's or Hub name's tokenizer, all that there are."""
    directory = model_directory(model_name, "tokenizer")
    names = (*TOKENIZER_FILES, *TOKENIZER_SETTINGS)
    return [path for name in names if (path := directory / name).is_file()]


def no_tokenizer(model_name: str) -> ModelError:
    """The error of a model that has none."""
    return ModelError(
        f"model_name: {model_name!r} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})"
    )


def _stored(path: Path) -> dict[str, _Hash]:
    """How to hash each tensor of a file of safetensors."""
    try:
        with safetensors.safe_open(path, framework="numpy"):  # Checks all of the header.
            pass
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(bytes(content[8:start]))
    except Exception as error:  # The library has its own; to the user it is one mistake.
        raise ModelError(f"cannot read weights from {str(path)!r}: {error}") from error
    header.pop("__metadata__", None)
    if any(tensor["dtype"] not in _DTYPES for tensor in header.values()):
        return _loaded(path)

    def hash_of(tensor: dict[str, Any]) -> _Hash:
        first, end = tensor["data_offsets"]
        dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
        return lambda: _tensor_digest(dtype, shape, content[start + first : start + end])

    return {name: hash_of(tensor) for name, tensor in header.items()}


def _loaded(path: Path) -> dict[str, _Hash]:
    """How to hash each tensor of a file that torch reads."""
    import torch

    from es_cookbook.checkpoints.tensors import weight_files

    files = weight_files([path])

    def hash_of(name: str) -> str:
        tensor = files[name]
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _tensor_digest(str(tensor.dtype), tuple(tensor.shape), data)

    return {name: lambda name=name: hash_of(name) for name in files}


def _tensor_digest(dtype: str, shape: tuple[int, ...], data: memoryview) -> str:
    digest = hashlib.sha256(f"{dtype} {shape} ".encode())
    digest.update(data)
    return digest.hexdigest()


def _tokenizer_digest(model_name: str) -> str:
    there = {path.name: path for path in tokenizer_files(model_name)}
    vocabulary = [VOCABULARY] if VOCABULARY in there else [*OLDER_VOCABULARY]
    if not there.keys() & vocabulary:
        raise no_tokenizer(model_name)
    names = [name for name in (*vocabulary, *TOKENIZER_SETTINGS) if name in there]
    return _digest((n, hashlib.sha256(there[n].read_bytes()).hexdigest()) for n in names)


def _digest(named: Iterable[tuple[str, str]]) -> str:
    parts = [part for pair in named for part in pair]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
