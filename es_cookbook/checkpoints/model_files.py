"""Where the files of a model are: in a directory, or in the Hub's cache, fetched if need be.

A name on the Hub becomes its snapshot in the cache (HF_HOME), a directory like any other, and all
that loads models gets that directory: transformers and vLLM never ask the Hub themselves. What is
in the cache is taken as it is, without a question to anybody. So a run that goes on has the base
that it began with, with or without a network; `hf download owner/name` brings a newer one. For what
is not there the Hub is asked once (`es_cookbook.common.servers.hub`), before anything is fetched.

What else may stand for a model (a run, a file of another program) is registered as a format, which
makes a directory of it (`es_cookbook.checkpoints.formats`).
"""

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, TypeAlias, cast

from es_cookbook.checkpoints.formats import formats
from es_cookbook.common.errors import HubError, ModelError
from es_cookbook.common.files import ANY_SIZE, LARGEST_TEXT, check_file, parsed, read_file
from es_cookbook.common.terminal import one_line, say

Part: TypeAlias = Literal["config", "tokenizer", "weights"]
"""What of a model must be there; with the weights also the rest."""

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
_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of files that are no weights and no code."""
_WEIGHTS = (".safetensors", ".bin")
_TERMS = ("LICENSE", "NOTICE")
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
    """The directory with a model's files: itself, or that of a Hub name or of a registered format.

    Of a Hub name at least `part` is there, fetched if it was not.

    Raises:
        ModelError: It is neither, or the Hub does not give the files; says why.
    """
    if not _is_whole(model_name):
        for each in formats():
            if (found := each.directory(model_name)) is not None:
                return found
    path = Path(model_name)
    if os.path.isdir(path):
        _refuse_adapter(path)
        return _checked(path)
    if os.path.exists(path):
        kind = next((what for end, what in _FILES.items() if model_name.endswith(end)), "a file")
        raise ModelError(
            f"model_name: {model_name!r:.300} is {kind}, not a model: a model is a directory with "
            f"{CONFIG}, a tokenizer and weights in Hugging Face's format, {_of_formats()}, or a "
            "name on the Hub"
        )
    if model_name.startswith((".", "/", "~")) or model_name.count("/") > 1:
        raise ModelError(f"model_name: there is no directory {model_name!r}")
    return _checked(_cached(model_name, part) or _fetched(model_name, part))


def _is_whole(model_name: str) -> bool:
    """Whether it is a directory with a config and weights, which no format need be asked for."""
    # `os.path` asks nothing of a name that is too long.
    there = (os.path.isfile(os.path.join(model_name, name)) for name in _WEIGHT_FILES)
    return os.path.exists(os.path.join(model_name, CONFIG)) and any(there)


def _of_formats() -> str:
    return ", ".join(each.accepted for each in formats())


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
            if path.name.endswith((*_SMALL, *_WEIGHTS)) and path.exists():
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
    names = _weights_of(directory)
    if names is None:
        raise _no_weights(model_name)
    for name in names:
        if not (directory / name).is_file():
            raise ModelError(
                f"model_name: {model_name!r} has no file {name!r}, which the index of its weights "
                "names"
            )
    return [directory / name for name in names]


def _cached(model_name: str, part: Part) -> Path | None:
    """The snapshot in the cache, if the part is whole."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model_name, CONFIG)
    except HFValidationError:  # Who asks the Hub says so.
        return None
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    if part == "tokenizer":
        is_there = any((directory / name).is_file() for name in TOKENIZER_FILES)
    elif part == "weights":
        names = _weights_of(directory)
        is_there = names is not None and all((directory / name).is_file() for name in names)
    else:
        is_there = True
    return directory if is_there else None


def _fetched(model_name: str, part: Part) -> Path:
    from es_cookbook.common.servers.hub import endpoint, repository_files  # Most models are here.

    try:
        files = repository_files(model_name)
        if CONFIG not in files:
            raise ModelError(
                f"model_name: {model_name!r} has no {CONFIG} on {endpoint()}: it is no model for "
                "transformers"
            )
        # First, so that whoever finds weights in the cache also finds all that belongs to them.
        directory = download(model_name, filter(_is_small, files))
        if part == "weights":
            names = _weights_of(directory, files)
            if names is None:
                raise _no_weights(model_name)
            # A run keeps the libraries' progress bars off the screen.
            say(f"fetching the weights of {model_name} from {endpoint()}")
            download(model_name, names)
    except HubError as error:
        from huggingface_hub import constants

        raise ModelError(
            f"model_name: {model_name!r} is no directory, its files are not all in the cache "
            f"({constants.HF_HUB_CACHE}), and {error}; accepted: a model directory, "
            f"{_of_formats()}, a name whose files are in the cache, and with a network a name on "
            "the Hub (HF_ENDPOINT for a mirror)"
        ) from error
    return directory


def download(model_name: str, files: Iterable[str]) -> Path:
    """Fetch files of a repository into the Hub's cache; the directory that they are in.

    Raises:
        HubError: They cannot be had.
    """
    from huggingface_hub import snapshot_download

    from es_cookbook.common.servers.hub import endpoint, reason
    from es_cookbook.common.servers.library import guard

    guard()
    try:
        return Path(snapshot_download(model_name, allow_patterns=list(files)))
    except HubError:
        raise
    # As in `check_repository`, and what a full disk raises.
    except Exception as error:
        raise HubError(f"{endpoint()} {reason(error, f'model {model_name}')}") from error


def _is_small(file: str) -> bool:
    folder, _, name = file.rpartition("/")
    in_place = folder in ("", "additional_chat_templates")
    return in_place and (name.endswith(_SMALL) or name.startswith(_TERMS))


def _weights_of(directory: Path, more: Collection[str] = ()) -> list[str] | None:
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


def _no_weights(model_name: str) -> ModelError:
    return ModelError(
        f"model_name: {model_name!r} has no weights: none of "
        f"{', '.join(_WEIGHT_FILES)} in its directory or "
        "on the Hub"
    )
