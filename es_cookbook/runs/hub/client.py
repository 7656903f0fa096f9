"""Push a directory to the Hugging Face Hub: an export, or what makes a run.

A push is one commit, so a revision holds all of it or nothing of it. Of a run directory (one with a
`history.jsonl`) go the history, the config and the metrics, from which everything else comes back,
into the folder `run` of the repository; of any other directory, an export, goes every file, to the
top. So one repository can hold both. Nothing is deleted there.

A run that is going on is pushed up to its last whole line. The token comes from the environment
variable HF_TOKEN and goes nowhere but into requests.

Left out: rollouts and snapshots of a run. The first are large and often quote the data, the second
follow from the history.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from es_cookbook.common.errors import ConfigError, HubError, RunDirectoryError
from es_cookbook.common.files import PARTIAL_SUFFIX
from es_cookbook.common.terminal import plural
from es_cookbook.runs.directory import CONFIG, HISTORY, METRICS
from es_cookbook.runs.history.store import read_history

RUN_FILES = (HISTORY, METRICS, CONFIG)
"""What is pushed of a run directory. A generation's metrics are written before its history line, so
in this order no generation is without them."""
RUN_FOLDER = "run"
TOKEN = "HF_TOKEN"
"""Name of the environment variable that holds the token."""
MAIN = "main"
_NOT_PUSHED = (PARTIAL_SUFFIX, ".lock")


def check_repo_id(repo_id: str) -> None:
    """Refuse what is not the name of a repository.

    Raises:
        ConfigError: It is not.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise ConfigError(
            f"repo_id must be owner/name in letters, digits, '-', '_' and '.', found {repo_id!r}"
        )


def no_token() -> HubError:
    """The error of a push for which no token is set."""
    return HubError(
        f"cannot push to the Hub: {TOKEN} is not set; make a token that may write at "
        f"https://huggingface.co/settings/tokens and set {TOKEN} to it"
    )


def files_to_push(path: Path) -> Mapping[str, Path | bytes]:
    """What of a directory is pushed: path in the repository -> file, or bytes where it may grow.

    Raises:
        RunDirectoryError: There is no such directory, or nothing in it.
        HistoryError: The history of a run directory is damaged.
    """
    if not path.is_dir():
        raise RunDirectoryError(f"path {path} must be a directory that exists")
    if (path / HISTORY).exists():
        for _ in read_history(path / HISTORY):
            pass  # A damaged one is not worth keeping, least of all over a whole one.
        return {
            f"{RUN_FOLDER}/{name}": _whole_lines(path / name)
            for name in RUN_FILES
            if (path / name).exists()
        }
    files = {
        file.relative_to(path).as_posix(): file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not _is_left_out(file.relative_to(path))
    }
    if not files:
        raise RunDirectoryError(f"path {path} holds nothing to push")
    return files


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1] if path.suffix == ".jsonl" else content


def _is_left_out(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or any(part.endswith(_NOT_PUSHED) for part in path.parts)


def push(path: Path, repo_id: str, revision: str = MAIN, private: bool = True) -> str:
    """Push an export or a run directory. Returns the address of the commit.

    Repository and branch (`revision`, from the state of `main`) are made if there are none; if
    `private`, the repository is made private, and a public one refused.

    Raises:
        RunDirectoryError: There is nothing to push.
        HistoryError: The history of a run directory is damaged.
        HubError: There is no token, or the Hub cannot be reached or refuses.
    """
    token = os.environ.get(TOKEN)
    if not token:
        raise no_token()
    files = files_to_push(path)
    # Imported only here: a run that pushes nothing needs none of it.
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise HubError(
                f"cannot push to {repo_id}: it is public; make it private, or give private=False "
                "to push what everybody may read"
            )
        if revision != MAIN:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        operations = [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        message = f"Push {plural(len(operations), 'file')} with es_cookbook"
        done = api.create_commit(
            repo_id, operations, commit_message=message, revision=revision, num_threads=2
        )
    except HubError:
        raise
    # The library raises its own errors, those of HTTP, of sockets and of the Rust below it; to the
    # user all of them are one thing.
    except Exception as error:
        reason = _reason(error, repo_id).replace(token, "…")
        raise HubError(
            f"cannot push to {repo_id} on {urlsplit(api.endpoint).netloc}: {reason}"
        ) from error
    return done.commit_url


def _reason(error: Exception, repo_id: str) -> str:
    """Half a sentence, the same for the same reason: no times, addresses or request numbers."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    match status:
        case 401:
            return f"it does not accept the token in {TOKEN}"
        case 403:
            return f"the token in {TOKEN} may not write to {repo_id}"
        case 404:
            return f"it knows no {repo_id} to which the token in {TOKEN} gives access"
        case int():
            return f"it answered with status {status}"
        case _:
            first_line = str(error).strip().partition("\n")[0]
            return f"{type(error).__name__}: {first_line}".removesuffix(": ")
