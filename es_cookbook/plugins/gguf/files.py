"""The GGUF file of a model name: a file, the only one of a directory, or one on the Hub."""

import os
import shlex
from pathlib import Path

from typing_extensions import override

from es_cookbook.checkpoints.model_files import CONFIG, Format, Part
from es_cookbook.common.errors import HubError, ModelError
from es_cookbook.common.terminal import say
from es_cookbook.plugins.gguf.conversion import SUFFIX, converted
from es_cookbook.plugins.hub.client import FIRST_SECONDS, asking, endpoint


class GGUFFiles(Format):
    """GGUF files, each converted once; on the Hub it is `owner/name:file.gguf`."""

    accepted = "a GGUF file"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        file = gguf_file(model_name)
        return None if file is None else converted(file)


def gguf_file(model_name: str) -> Path | None:
    """The GGUF file of a model name, in a directory or the Hub's cache; None if it has none.

    Raises:
        ModelError: There is no such file, or it is not clear which one is meant.
    """
    path = Path(model_name)
    if os.path.isdir(path):
        return _only_gguf(path)
    repository, _, file_name = model_name.partition(":")
    if not model_name.endswith(SUFFIX) or os.path.exists(path):
        return path if model_name.endswith(SUFFIX) else None
    if file_name and repository.count("/") == 1 and not repository.startswith((".", "/", "~")):
        return _gguf_of_hub(repository, file_name)
    raise ModelError(
        f"model_name: there is no file {model_name!r}; a file on the Hub is owner/name:file{SUFFIX}"
    )


def _only_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no model in Hugging Face's format."""
    if (directory / CONFIG).exists():
        return None
    files = sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    if len(files) > 1:
        raise ModelError(
            f"model_name: the directory {str(directory)!r} has {len(files)} GGUF files; name one: "
            f"model_name={shlex.quote(str(files[0]))}"
        )
    return files[0] if files else None


def _gguf_of_hub(repository: str, file_name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, file_name)
        if isinstance(found, str):
            return Path(found)
        with asking(f"model {repository}"):
            about = HfApi().model_info(repository, timeout=FIRST_SECONDS)
            files = [file.rfilename for file in about.siblings or []]
            if file_name not in files:
                there = ", ".join(sorted(file for file in files if file.endswith(SUFFIX))) or "none"
                raise HubError(
                    f"{repository!r} has no file {file_name!r}; its GGUF files: {there:.500}"
                )
            say(f"fetching {file_name} of {repository} from {endpoint()}")
            return Path(hf_hub_download(repository, file_name))
    except (HubError, HFValidationError) as error:
        raise ModelError(f"model_name: {repository}:{file_name}: {error}") from error
