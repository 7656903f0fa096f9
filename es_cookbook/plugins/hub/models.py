"""Models by their names on the Hub.

A name means its snapshot in the Hub's cache (HF_HOME). Files in the cache are used without asking
the Hub, so a resumed run keeps its base, with or without a network; `hf download owner/name`
updates them. Only settings, vocabularies and weights are fetched, and no code.
"""

import os
from pathlib import Path

from typing_extensions import override

from es_cookbook.checkpoints.model_files import (
    CONFIG,
    SMALL,
    TOKENIZER_FILES,
    Format,
    Part,
    no_weights,
    weight_names,
)
from es_cookbook.common.errors import HubError, ModelError
from es_cookbook.common.terminal import say
from es_cookbook.plugins.hub.client import FIRST_SECONDS, asking, endpoint

_TERMS = ("LICENSE", "NOTICE")


class HubModels(Format):
    """Repositories of models."""

    accepted = "a name on the Hub (owner/name), with a network or its files in the cache"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(model_name)
        except HFValidationError:
            return None
        if model_name.startswith(".") or os.path.exists(model_name):
            return None
        return _cached(model_name, part) or _fetched(model_name, part)


def _cached(model_name: str, part: Part) -> Path | None:
    """Return the snapshot in the cache, if it has all files of the part."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model_name, CONFIG)
    if not isinstance(config, str):
        return None
    directory = Path(config).parent
    if part == "tokenizer":
        is_there = any((directory / name).is_file() for name in TOKENIZER_FILES)
    elif part == "weights":
        names = weight_names(directory)
        is_there = names is not None and all((directory / name).is_file() for name in names)
    else:
        is_there = True
    return directory if is_there else None


def _fetched(model_name: str, part: Part) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        with asking(f"model {model_name}"):
            about = HfApi().model_info(model_name, timeout=FIRST_SECONDS)
            files = [file.rfilename for file in about.siblings or []]
            if CONFIG not in files:
                raise ModelError(
                    f"model_name: {model_name!r} has no {CONFIG} on {endpoint()}, so it is not a "
                    "model for transformers"
                )
            # First, so that a cache with the weights also has all other files.
            small = [file for file in files if _is_small(file)]
            directory = Path(snapshot_download(model_name, allow_patterns=small))
            if part == "weights":
                names = weight_names(directory, files)
                if names is None:
                    raise no_weights(model_name)
                say(f"fetching the weights of {model_name} from {endpoint()}")
                snapshot_download(model_name, allow_patterns=names)
    except HubError as error:
        raise ModelError(
            f"model_name: {model_name!r} is not a directory, its files are not all in the cache "
            f"({constants.HF_HUB_CACHE}), and {error}"
        ) from error
    return directory


def _is_small(file: str) -> bool:
    folder, _, name = file.rpartition("/")
    in_place = folder in ("", "additional_chat_templates")
    return in_place and (name.endswith(SMALL) or name.startswith(_TERMS))
