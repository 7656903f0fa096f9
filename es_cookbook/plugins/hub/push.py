"""Push a directory to the Hugging Face Hub: an export, or the files of a run.

    HF_TOKEN=... python -m es_cookbook hub runs/mine repo_id=me/mine
    HF_TOKEN=... python -m es_cookbook hub exported repo_id=me/mine revision=generation-50

A push is one commit, so a revision has all of it or nothing. The history, config and metrics of a
run directory (one with a `history.jsonl`) go into the folder `run` of the repository; the files of
any other directory go to the top, so one repository can hold both. Nothing is deleted there. A run
in progress is pushed up to its last complete line.

Left out: rollouts and snapshots of a run. Rollouts are large and often quote the data, and
snapshots follow from the history.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError, HubError, RunDirectoryError
from es_cookbook.common.files import ANY_SIZE, PARTIAL_SUFFIX, check_file, lines, opened
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.plugins.hub.client import FIRST_SECONDS, TOKEN, asking
from es_cookbook.runs.directory.directory import CONFIG, HISTORY, METRICS
from es_cookbook.runs.history.format import LONGEST_LINE
from es_cookbook.runs.history.store import read_history

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAIN = "main"
_RUN_FILES = (HISTORY, METRICS, CONFIG)
"""The history comes first: metrics are written before it, so no generation lacks them."""
_RUN_FOLDER = "run"
_NOT_PUSHED = (PARTIAL_SUFFIX, ".lock")


def check_repo_id(repo_id: str) -> None:
    """Check the name of a repository.

    Raises:
        ConfigError: It is not owner/name.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII):
        raise ConfigError(
            f"repo_id must be owner/name in letters, digits, '-', '_' and '.', found {repo_id!r}"
        )


def files_to_push(path: Path) -> Mapping[str, Path | bytes]:
    """Map paths in the repository to the files to push; of files that may grow, to their bytes.

    Raises:
        RunDirectoryError: The directory does not exist, is empty, or holds something other than
            regular files: a link may lead to any file of this machine.
        HistoryError: The history of a run directory is damaged.
    """
    if not path.is_dir():
        raise RunDirectoryError(f"path {path} must be a directory that exists")
    if (path / HISTORY).exists():
        for _ in read_history(path / HISTORY):
            pass  # A damaged history must not replace a whole one.
        return {
            f"{_RUN_FOLDER}/{name}": _whole_lines(path / name)
            for name in _RUN_FILES
            if (path / name).exists()
        }
    files = {
        file.relative_to(path).as_posix(): check_file(file, ANY_SIZE, path)
        for file in sorted(path.rglob("*"))
        if (file.is_symlink() or not file.is_dir())
        and not any(p[0] == "." or p.endswith(_NOT_PUSHED) for p in file.relative_to(path).parts)
    }
    if not files:
        raise RunDirectoryError(f"path {path} holds nothing to push")
    return files


def _whole_lines(path: Path) -> bytes:
    with opened(path, ANY_SIZE, path.parent) as file:
        found = list(lines(file, LONGEST_LINE))
    if path.suffix == ".jsonl" and found and not found[-1].endswith(b"\n"):
        found.pop()
    return b"".join(found)


def push(path: Path, repo_id: str, revision: str = MAIN, private: bool = True) -> str:
    """Push an export or a run directory. Returns the address of the commit.

    Repository and branch (`revision`, which starts from `main`) are created if they do not exist.
    If `private`, the repository is created as a private one, and a public one is refused.

    Raises:
        RunDirectoryError: There is nothing to push.
        HistoryError: The history of a run directory is damaged.
        HubError: There is no token, or the Hub cannot be reached or refuses.
    """
    api = _api()
    files = files_to_push(path)
    from huggingface_hub import CommitOperationAdd

    with asking(f"repository {repo_id}"):
        _make_repository(api, repo_id, private)
        if revision != MAIN:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        done = api.create_commit(
            repo_id,
            [
                CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
                for name, content in files.items()
            ],
            commit_message=f"Push {plural(len(files), 'file')} with es_cookbook",
            revision=revision,
        )
    return one_line(done.commit_url)  # It is the server's text, and printed.


def check_push(repo_id: str, private: bool) -> None:
    """Check that the Hub would take a push; the repository is created if it does not exist.

    Raises:
        HubError: There is no token, or the Hub cannot be reached or refuses.
    """
    api = _api()
    from huggingface_hub import CommitOperationAdd

    with asking(f"repository {repo_id}"):
        _make_repository(api, repo_id, private)
        # The Hub only tells an account with write access how a file would be uploaded.
        file = CommitOperationAdd(f"{_RUN_FOLDER}/{CONFIG}", b"{}")
        api.preupload_lfs_files(repo_id, [file])


def _api() -> "HfApi":
    if not (token := os.environ.get(TOKEN)):
        raise HubError(
            f"{TOKEN} is not set; make a token that may write at "
            f"https://huggingface.co/settings/tokens and set {TOKEN} to it"
        )
    from huggingface_hub import HfApi  # A run that pushes nothing does not import it.

    return HfApi(token=token)


def _make_repository(api: "HfApi", repo_id: str, private: bool) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        is_private = api.model_info(repo_id, timeout=FIRST_SECONDS).private
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=private, exist_ok=True)
        return
    if private and not is_private:
        raise HubError(
            f"{repo_id} is public; make it private, or give private=False to push to a repository "
            "that everyone can read"
        )


@chz.chz
class HubCommand:
    """Push an export or a run to the Hugging Face Hub, with the token in HF_TOKEN."""

    path: str = chz.field(doc="directory of an export or a run", metadata=UNNAMED)
    repo_id: str = chz.field(doc="repository, owner/name; created if it does not exist")
    revision: str = chz.field(default=MAIN, doc="branch; created if it does not exist")
    private: bool = chz.field(
        default=True, doc="create a private repository, and refuse to push to a public one"
    )

    @chz.validate
    def _repository(self) -> None:
        check_repo_id(self.repo_id)


def main(config: HubCommand) -> None:
    """Push, and print the address of the commit."""
    say(f"pushing {config.path} to {config.repo_id}")
    print(push(Path(config.path), config.repo_id, config.revision, config.private))


def cli() -> None:
    run_cli(main, HubCommand)
