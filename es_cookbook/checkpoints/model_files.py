"""The files of a model: where they are, what a model name stands for, and the identity of a base.

All code that loads models gets a model directory, so transformers and vLLM never ask a server.
Other names (a name on the Hub, a run, a file of another program, `bundled:countdown`) belong to a
format that is registered in the group `formats` and returns a directory for them. Directories that
formats convert are kept in a cache, under a digest of their sources; they are complete or absent,
and two processes that need one at the same time make it once. A manifest beside each has the sizes
and times of its files; a directory that differs from it is made again.
"""

import contextlib
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, cast

from typing_extensions import override

from es_cookbook.common.errors import ConfigError, ModelError, RunDirectoryError, nearest
from es_cookbook.common.files import (
    ANY_SIZE,
    LARGEST_TEXT,
    check_file,
    parsed,
    read_file,
    whole_directory,
)
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import say, say_once
from es_cookbook.common.trust import load, source_of

Part: TypeAlias = Literal["config", "tokenizer", "weights"]
"""The files of a model that are needed; "weights" includes the others."""
FORMATS = Registered("formats")
"""Name -> a subclass of `Format`, which is made without arguments."""
CONFIG = "config.json"
VOCABULARY = "tokenizer.json"
"""The whole vocabulary; where it is, the older files beside it are not read."""
OLDER_VOCABULARY = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
TOKENIZER_FILES = (VOCABULARY, *OLDER_VOCABULARY)
# In the order in which transformers looks for them.
_SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_WEIGHT_FILES = tuple(name for names in _SINGLE_AND_INDEX for name in names)
SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of files that are neither weights nor code."""
_WEIGHTS = (".safetensors", ".bin")
_Index: TypeAlias = dict[str, dict[str, str]]
TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_HASHING_THREADS = 16
"""Threads, more than cores: reading from a disk or over a network gains from it."""
CACHE = "ES_COOKBOOK_CACHE"
"""Environment variable: the cache's directory; by default in that of the Hub."""
CACHE_SIZE = 64 * 2**30
"""Bytes of models that are kept; the least recently used model goes first."""
_BUNDLED = "bundled:"
_RECIPES = Registered("recipes")


class Format(ABC):
    """One format, which is asked for every name that is not a model directory.

    Attributes:
        accepted: accepted names, as errors list them: "a GGUF file".
    """

    accepted: ClassVar[str]

    @abstractmethod
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        """Return the model directory that a name stands for; None if it is not of this format.

        A format that fetches files may fetch only this part of them.

        Raises:
            ModelError: It is of this format, and there is no such model or it cannot be read.
        """


def formats() -> Iterator[Format]:
    """Yield all registered formats that can be used, in the order of their names."""
    for name in FORMATS:
        try:
            yield cast("type[Format]", load(FORMATS[name]))()
        except ConfigError as error:
            say_once(f"the format {name} is not used: {error}")


class Bundled(Format):
    """A small model that a recipe brings along, in the folder `model` beside its module."""

    accepted = f"the model of a recipe ({_BUNDLED}countdown)"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        if not model_name.startswith(_BUNDLED):
            return None
        name = model_name.removeprefix(_BUNDLED)
        if name in _RECIPES and (found := _folder(name)) is not None:
            return found
        have = [each for each in _RECIPES if _folder(each) is not None]
        raise ModelError(
            f"model_name: no recipe {name!r:.100} brings a model: {nearest(name, have)}"
        )


def _folder(name: str) -> Path | None:
    file = source_of(_RECIPES[name])
    folder = None if file is None else file.parent / "model"
    return folder if folder is not None and folder.is_dir() else None


def model_directory(model_name: str, part: Part = "weights") -> Path:
    """Return the directory of a model's files: itself, or the one that a format returns.

    A format that fetches files has fetched at least `part` of them.

    Raises:
        ModelError: There is no such model, or its files are unavailable; says why.
    """
    if not _is_whole(model_name):
        for each in formats():
            if (found := each.directory(model_name, part)) is not None:
                return _checked(found)
    path = Path(model_name)
    if os.path.isdir(path):
        _refuse_adapter(path)
        return _checked(path)
    kind = "not a model directory"
    if os.path.exists(path):
        kind = "a file, not a model"
    elif model_name.startswith((".", "/", "~")) or model_name.count("/") > 1:
        raise ModelError(f"model_name: there is no directory {model_name!r:.300}")
    raise ModelError(
        f"model_name: {model_name!r:.300} is {kind}; accepted: a directory with {CONFIG}, a "
        "tokenizer and weights in Hugging Face's format, "
        f"{', '.join(each.accepted for each in formats())}"
    )


def _is_whole(model_name: str) -> bool:
    """Return whether this is a directory with config and weights, which needs no format."""
    # `os.path` asks nothing of a name that is too long.
    there = (os.path.isfile(os.path.join(model_name, name)) for name in _WEIGHT_FILES)
    return os.path.exists(os.path.join(model_name, CONFIG)) and any(there)


def hub_repository(model_name: str) -> str | None:
    """Return the repository on the Hub that a model comes from; None for a local model.

    A file of a repository is named as `owner/name:file`.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    repository = model_name.partition(":")[0]
    try:
        validate_repo_id(repository)
    except HFValidationError:
        return None
    return None if os.path.exists(model_name) else repository


def _refuse_adapter(directory: Path) -> None:
    """Refuse a PEFT adapter, which is a change of a model and not one itself."""
    config = directory / "adapter_config.json"
    if config.is_file() and not (directory / CONFIG).exists():
        raise ModelError(
            f"model_name: {str(directory)!r} is a PEFT adapter, which changes a model; to train it "
            f"on: model_name=BASE search_space=adapter search_space.start={directory}, where BASE "
            f"is the model that its {config.name} names"
        )


def find_file(model_name: str, file_name: str) -> Path | None:
    """Return the path of a file, not of weights, of a directory or Hub name; None if missing.

    Raises:
        ModelError: As `model_directory`.
    """
    path = model_directory(model_name, "config") / file_name
    return path if path.is_file() else None


def copy_file(path: Path, directory: Path) -> None:
    """Copy a small file of a model to an export, under its name.

    Raises:
        ModelError: It is a link out of the model: it may lead to any file of this machine, and
            exports are given away.
    """
    folder = path.parent.resolve()
    own = folder.parents[1] if folder.parent.name == "snapshots" else folder  # The Hub's cache.
    if not path.resolve().is_relative_to(own):
        raise ModelError(
            f"model_name: {str(path)!r} is a link out of the model's directory, and is not copied; "
            "put the file itself there"
        )
    (directory / path.name).write_bytes(read_file(path, LARGEST_TEXT, None))


def _checked(directory: Path) -> Path:
    """Check that what libraries would read are files or links to files; return the directory."""
    try:
        for path in directory.iterdir():
            if path.name.endswith((*SMALL, *_WEIGHTS)) and path.exists():
                check_file(path, ANY_SIZE if path.name.endswith(_WEIGHTS) else LARGEST_TEXT, None)
    except OSError as error:
        raise ModelError(f"model_name: {error}") from error
    return directory


def weight_paths(model_name: str) -> list[Path]:
    """Return the files of a checkpoint that transformers takes, safetensors before others.

    Raises:
        ModelError: There is none, or it cannot be read; says where.
    """
    directory = model_directory(model_name)
    names = weight_names(directory)
    if names is None:
        raise no_weights(model_name)
    for name in names:
        if not (directory / name).is_file():
            raise ModelError(
                f"model_name: {model_name!r} has no file {name!r}, which the index of its weights "
                "names"
            )
    return [directory / name for name in names]


def weight_names(directory: Path, more: Collection[str] = ()) -> list[str] | None:
    """Return the names of the weight files, even of missing ones; `more` are taken as there."""
    for single, index in _SINGLE_AND_INDEX:
        if single in more or (directory / single).is_file():
            return [single]
        if (path := directory / index).is_file():
            try:
                found = cast("_Index", parsed(read_file(path, LARGEST_TEXT, None)))
                names = sorted({str(name) for name in found["weight_map"].values()})
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise ModelError(f"cannot read the index of weights {str(path)!r}") from error
            for name in names:
                if os.path.isabs(name) or ".." in Path(name).parts:
                    raise ModelError(
                        f"model_name: the index of weights {str(path)!r} names {name!r:.80}, which "
                        "is outside of the model"
                    )
            return names
    return None


def no_weights(model_name: str) -> ModelError:
    return ModelError(
        f"model_name: {model_name!r} has no weights: none of "
        f"{', '.join(_WEIGHT_FILES)} in its directory or "
        "on the Hub"
    )


def base_identity(model_name: str) -> tuple[str, str]:
    """Return hexadecimal digests of the weights and the tokenizer of a directory or Hub name.

    Two checkpoints are the same if their tensors are, by name, dtype, shape and every bit, wherever
    they lie and however their files are split.

    Raises:
        ModelError: Weights or tokenizer are missing or cannot be read; says where.
    """
    import torch

    from es_cookbook.checkpoints.tensors import weight_files

    files = weight_files(weight_paths(model_name))

    def digest_of_tensor(name: str) -> str:
        tensor = files[name]
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    names = sorted(files)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        weights = _digest(zip(names, pool.map(digest_of_tensor, names), strict=True))
    return weights, _tokenizer_digest(model_name)


def tokenizer_files(model_name: str) -> list[Path]:
    """Return all files of a directory's or Hub name's tokenizer."""
    directory = model_directory(model_name, "tokenizer")
    names = (*TOKENIZER_FILES, *TOKENIZER_SETTINGS)
    return [path for name in names if (path := directory / name).is_file()]


def no_tokenizer(model_name: str) -> ModelError:
    """Return the error of a model that has no tokenizer."""
    return ModelError(
        f"model_name: {model_name!r} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})"
    )


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


def cached_model(what: str, digest: str, make: Callable[[Path], None]) -> Path:
    """Return the model directory of this digest from the cache; make it if it is not there.

    Args:
        what: description of the model's source, for errors.
        digest: digest of everything that the model depends on.
        make: fills an empty directory with the model.

    Raises:
        ModelError: The cache cannot be written; or as `make`.
    """
    directory = cache_directory() / "models" / digest
    if not _is_as_made(directory):
        from filelock import FileLock

        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(directory.with_suffix(".lock")):
                if not _is_as_made(directory):
                    _make(directory, make)
                    _evict(keep=directory)
        except OSError as error:
            raise ModelError(
                f"model_name: {what} cannot be converted into {directory.parent}: "
                f"{error.strerror or error}; {CACHE} may name another directory"
            ) from error
    with contextlib.suppress(OSError):  # Another user's cache may be read-only.
        os.utime(directory)
    return directory


def _make(directory: Path, make: Callable[[Path], None]) -> None:
    if os.path.lexists(directory):
        say(f"{directory} differs from what was converted, or was never checked: converting again")
    for path in (directory, _manifest(directory)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with whole_directory(directory) as beside:
        make(beside)
    _manifest(directory).write_text(json.dumps(_states(directory)))


def _is_as_made(directory: Path) -> bool:
    """Return whether a directory has the files of its manifest, unchanged."""
    try:
        text = read_file(_manifest(directory), LARGEST_TEXT, directory.parent)
        return parsed(text) == _states(directory)
    except (OSError, RunDirectoryError, ValueError):  # It is missing or damaged.
        return False


def _states(directory: Path) -> dict[str, list[int]]:
    """Return the size and times of each file: they change when it is written to."""
    files = sorted(path for path in directory.rglob("*") if not path.is_dir())
    states = {str(file.relative_to(directory)): file.stat() for file in files}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in states.items()}


def _manifest(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.json")


def cache_directory() -> Path:
    """Return the directory of converted models and of measurements of this machine."""
    from huggingface_hub import constants

    return Path(os.environ.get(CACHE) or Path(constants.HF_HOME) / "es_cookbook")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _evict(keep: Path) -> None:
    """Delete the least recently used models until the others fit."""
    models = [path for path in keep.parent.iterdir() if path.is_dir() and path != keep]
    left = CACHE_SIZE
    for model in (keep, *sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)):
        left -= sum(file.stat().st_size for file in model.iterdir())
        if left < 0 and model != keep:
            shutil.rmtree(model, ignore_errors=True)
            _manifest(model).unlink(missing_ok=True)
