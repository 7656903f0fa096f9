"""Where the files of a model are.

All code that loads models gets a model directory, so transformers and vLLM never ask a server.
Other names (a name on the Hub, a run, a file of another program) belong to a registered format,
which returns a directory for them (`es_cookbook.checkpoints.formats`).
"""

import contextlib
import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TypeAlias, cast

from es_cookbook.checkpoints.formats import Part, formats
from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import ANY_SIZE, LARGEST_TEXT, check_file, parsed, read_file
from es_cookbook.common.terminal import one_line

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
"""Endings of files that are no weights and no code."""
_WEIGHTS = (".safetensors", ".bin")
_FILES = {
    ".safetensors": "a file of weights alone",
    ".bin": "a file of weights alone",
    ".pt": "a file of weights alone",
    ".pth": "a file of weights alone",
    ".json": "a JSON file",
    ".zip": "an archive",
    ".gz": "an archive",
}
"""Ending of a file that somebody may take for a model -> what it is."""
_Index: TypeAlias = dict[str, dict[str, str]]


def model_directory(model_name: str, part: Part = "weights") -> Path:
    """The directory with a model's files: itself, or the one that a registered format returns.

    A format that fetches files has fetched at least `part` of them.

    Raises:
        ModelError: There is no such model, or its files cannot be had; says why.
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
        what = next((what for end, what in _FILES.items() if model_name.endswith(end)), "a file")
        kind = f"{what}, not a model"
    elif model_name.startswith((".", "/", "~")) or model_name.count("/") > 1:
        raise ModelError(f"model_name: there is no directory {model_name!r:.300}")
    raise ModelError(
        f"model_name: {model_name!r:.300} is {kind}; accepted: a directory with {CONFIG}, a "
        "tokenizer and weights in Hugging Face's format, "
        f"{', '.join(each.accepted for each in formats())}"
    )


def _is_whole(model_name: str) -> bool:
    """Whether it is a directory with a config and weights, which no format need be asked for."""
    # `os.path` asks nothing of a name that is too long.
    there = (os.path.isfile(os.path.join(model_name, name)) for name in _WEIGHT_FILES)
    return os.path.exists(os.path.join(model_name, CONFIG)) and any(there)


def hub_repository(model_name: str) -> str | None:
    """The repository on the Hub that a model comes from; None for one that is from here.

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
    if not config.is_file() or (directory / CONFIG).exists():
        return
    base: object = None
    with contextlib.suppress(OSError, ValueError):
        found = parsed(read_file(config, LARGEST_TEXT, None))
        if isinstance(found, dict):
            base = cast("dict[str, object]", found).get("base_model_name_or_path")
    named = shlex.quote(one_line(base)[:300]) if isinstance(base, str) and base else "BASE"
    raise ModelError(
        f"model_name: {str(directory)!r} is a PEFT adapter, which changes a model; to train it on: "
        f"model_name={named} search_space=adapter search_space.start={directory}"
    )


def find_file(model_name: str, file_name: str) -> Path | None:
    """A file of a directory or Hub name that is no weights; None if it has none.

    Raises:
        ModelError: As `model_directory`.
    """
    path = model_directory(model_name, "config") / file_name
    return path if path.is_file() else None


def copy_file(path: Path, directory: Path) -> None:
    """Copy a small file of a model to an export, under its name.

    Raises:
        ModelError: It is a link out of the model: any file of this machine may be behind it, and an
            export is made to be given away.
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
    """The directory, if what libraries would read of it are files; they may be links to such."""
    try:
        for path in directory.iterdir():
            if path.name.endswith((*SMALL, *_WEIGHTS)) and path.exists():
                check_file(path, ANY_SIZE if path.name.endswith(_WEIGHTS) else LARGEST_TEXT, None)
    except OSError as error:
        raise ModelError(f"model_name: {error}") from error
    return directory


def weight_paths(model_name: str) -> list[Path]:
    """The files of a checkpoint that transformers takes, safetensors before others.

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
    """The names of the weight files, whether they are there or not; `more` are taken as there."""
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
