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

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from es_cookbook.common.errors import ConfigError, HubError, RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, PARTIAL_SUFFIX, check_file, kind_of, read_file
from es_cookbook.common.servers.http import NoReplyError, brief
from es_cookbook.common.servers.hub import TOKEN, check_online, is_refusal, named, within
from es_cookbook.common.servers.library import SECONDS, bounded
from es_cookbook.common.terminal import plural
from es_cookbook.runs.directory.directory import CONFIG, HISTORY, METRICS, OPTIONS
from es_cookbook.runs.history.store import read_history

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RUN_FILES = (HISTORY, METRICS, CONFIG, OPTIONS)
"""What is pushed of a run directory. A generation's metrics are written before its history line, so
in this order no generation is without them."""
RUN_FOLDER = "run"
MAIN = "main"
_NOT_PUSHED = (PARTIAL_SUFFIX, ".lock")
_NO_ANSWERS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the library raises about an answer of another form."""


def check_repo_id(repo_id: str) -> None:
    """Refuse what is not the name of a repository.

    Raises:
        ConfigError: It is not.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise ConfigError(
            f"repo_id must be owner/name in letters, digits, '-', '_' and '.', found {repo_id!r}"
        )


def files_to_push(path: Path) -> Mapping[str, Path | bytes]:
    """What of a directory is pushed: path in the repository -> file, or bytes where it may grow.

    Raises:
        RunDirectoryError: There is no such directory, nothing in it, or what is no regular file:
            behind a link any file of this machine might be.
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
        file.relative_to(path).as_posix(): check_file(file, ANY_SIZE, path)
        for file in sorted(path.rglob("*"))
        if kind_of(file) != "a directory" and not _is_left_out(file.relative_to(path))
    }
    if not files:
        raise RunDirectoryError(f"path {path} holds nothing to push")
    return files


def _whole_lines(path: Path) -> bytes:
    content = read_file(path, ANY_SIZE, path.parent)
    return content[: content.rfind(b"\n") + 1] if path.suffix == ".jsonl" else content


def _is_left_out(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return hidden or any(part.endswith(_NOT_PUSHED) for part in path.parts)


def push(
    path: Path,
    repo_id: str,
    revision: str = MAIN,
    private: bool = True,
    seconds: float = SECONDS,
) -> str:
    """Push an export or a run directory. Returns the address of the commit.

    Repository and branch (`revision`, from the state of `main`) are made if there are none; if
    `private`, the repository is made private, and a public one refused. A reply may take so many
    seconds after the last piece of its request was sent; what fails is tried five times again.

    Raises:
        RunDirectoryError: There is nothing to push.
        HistoryError: The history of a run directory is damaged.
        HubError: There is no token, or the Hub cannot be reached or refuses.
    """
    token = _token()
    files = files_to_push(path)
    # Imported only here: a run that pushes nothing needs none of it.
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        with bounded(seconds):
            done = _committed(api, repo_id, files, revision, private)
    except HubError:
        raise
    # The library raises its own errors, those of HTTP, of sockets and of the Rust below it; to the
    # user all of them are one thing.
    except Exception as error:
        raise _push_error(error, api, repo_id) from error
    return brief(done)  # It is the server's, and printed.


def _committed(
    api: "HfApi", repo_id: str, files: Mapping[str, Path | bytes], revision: str, private: bool
) -> str:
    """Make one commit of the files. Returns its address."""
    from huggingface_hub import CommitOperationAdd

    _make_repository(api, repo_id, private)
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
    return done.commit_url


def check_push(repo_id: str, private: bool, seconds: float) -> str | None:
    """Find out whether the Hub would take a push; the repository is made, if there is none.

    A process of its own asks, which no server outlives. Returns why that cannot be known, if the
    Hub gives no answer within so many seconds.

    Raises:
        HubError: There is no token, or the Hub refuses.
    """
    _token()
    try:
        check_online()
    except HubError as error:
        raise HubError(f"cannot push to {repo_id}: {error}") from error
    arguments = [repo_id, json.dumps(private), json.dumps(seconds)]
    asking = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import ask_beside; ask_beside()", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        is_refused, said = json.loads(asking.stdout)
    except ValueError:
        last_line = asking.stderr.strip().rpartition("\n")[2]
        return f"cannot push to {repo_id}: the process that asks ended with {last_line!r:.200}"
    if is_refused:
        raise HubError(said)
    return said


def ask_beside() -> None:
    """The process that asks: prints whether the Hub refuses, and what it says, as JSON."""
    repo_id, private, seconds = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    try:
        found = False, _asked(repo_id, private, seconds)
    except HubError as error:
        found = True, str(error)
    print(json.dumps(found), flush=True)
    os._exit(0)  # A thread may hang.


def _asked(repo_id: str, private: bool, seconds: float) -> str | None:
    token = _token()
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)

    def ask() -> None:
        _make_repository(api, repo_id, private)
        # The Hub is asked how a file would have to come, which it tells only those who may write.
        file = CommitOperationAdd(f"{RUN_FOLDER}/{CONFIG}", b"{}")
        api.preupload_lfs_files(repo_id, [file])

    try:
        with bounded(seconds):
            within(seconds, ask)
    except HubError:
        raise
    except Exception as error:  # As in `push`.
        failed = _push_error(error, api, repo_id)
        if is_refusal(error):
            raise failed from error
        return str(failed)
    return None


def _token() -> str:
    if token := os.environ.get(TOKEN):
        return token
    raise HubError(
        f"cannot push to the Hub: {TOKEN} is not set; make a token that may write at "
        f"https://huggingface.co/settings/tokens and set {TOKEN} to it"
    )


def _make_repository(api: "HfApi", repo_id: str, private: bool) -> None:
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise HubError(
            f"cannot push to {repo_id}: it is public; make it private, or give private=False "
            "to push what everybody may read"
        )


def _push_error(error: Exception, api: "HfApi", repo_id: str) -> HubError:
    reason = _reason(error, repo_id).replace(str(api.token), "…")
    return HubError(f"cannot push to {repo_id} on {urlsplit(api.endpoint).netloc}: {reason}")


def _reason(error: Exception, repo_id: str) -> str:
    """Half a sentence, the same for the same reason: no times, addresses or request numbers."""
    from huggingface_hub.errors import HFValidationError

    error = _cause(error)
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
        case _ if isinstance(error, TimeoutError):
            return f"it {error}"
        case _ if isinstance(error, _NO_ANSWERS) and not isinstance(error, HFValidationError):
            return "it answered with what is no answer of the Hub"
        case _:
            return named(error)


def _cause(error: Exception) -> Exception:
    """What the library's own errors wrap: a status, or a reply that there is not."""
    found = error
    while not isinstance(found, NoReplyError) and not hasattr(found, "response"):
        if not isinstance(found.__cause__, Exception):
            return error
        found = found.__cause__
    return found
