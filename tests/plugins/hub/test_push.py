"""A push is one commit with exactly the files; whatever goes wrong is one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from es_cookbook.common.errors import HistoryError, HubError, RunDirectoryError
from es_cookbook.plugins.hub.push import files_to_push, push
from es_cookbook.runs.program import run
from tests.hub_server import LARGEST_REGULAR, HubServer, Repository
from tests.tiny_run import tiny

ROOT = Path(__file__).parents[3]


def command(*options: str) -> subprocess.CompletedProcess[str]:
    """The real command with the real client."""
    return subprocess.run(
        [sys.executable, "-m", "es_cookbook", "hub", *options],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "export"
    (path / "deep").mkdir(parents=True)
    (path / "README.md").write_text("---\nlicense: mit\n---\nA model\n")
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    (path / "deep" / "empty.txt").touch()
    (path / "model-2.safetensors.partial").write_bytes(b"half")
    (path / "run.lock").write_text("1234")
    (path / ".hidden").write_text("not for anybody")
    (path / ".cache").mkdir()
    (path / ".cache" / "thing").write_text("nor this")
    return path


EXPORTED = ("README.md", "config.json", "deep/empty.txt", "model.safetensors")


def test_an_export_is_one_commit_of_exactly_its_files_in_a_private_repository(
    hub: HubServer, export: Path
) -> None:
    done = command(f"path={export}", "repo_id=me/model")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.url}/me/model/commit/{2:040x}\n"
    assert hub.files("me/model") == {name: (export / name).read_bytes() for name in EXPORTED}
    assert len(hub.files("me/model")["model.safetensors"]) > LARGEST_REGULAR, "one went by LFS"
    assert hub.repositories["me/model"].private
    assert len(hub.repositories["me/model"].branches["main"]) == 2, "one commit after the first"


def test_what_a_server_calls_the_commit_does_nothing_to_a_terminal(
    hub: HubServer, export: Path
) -> None:
    hub.after_commit = "\x1b[2J\nall is well"
    assert push(export, "me/model").isprintable()


def test_a_revision_is_a_branch_and_a_second_push_adds_to_it(hub: HubServer, export: Path) -> None:
    push(export, "me/model", "generation/12")
    (export / "config.json").write_text("{}")
    push(export, "me/model", "generation/12")
    assert hub.files("me/model") == {}, "main is as it was"
    assert set(hub.files("me/model", "generation/12")) == set(EXPORTED)
    assert hub.files("me/model", "generation/12")["config.json"] == b"{}"


def test_a_public_repository_is_refused_unless_it_is_asked_for(
    hub: HubServer, export: Path
) -> None:
    hub.repositories["me/open"] = Repository(private=False)
    with pytest.raises(HubError) as refused:
        push(export, "me/open")
    assert str(refused.value) == (
        "me/open is public; make it private, or give private=False to push to a repository that "
        "everyone can read"
    )
    assert hub.files("me/open") == {}
    push(export, "me/open", private=False)
    assert set(hub.files("me/open")) == set(EXPORTED)
    push(export, "me/new", private=False)
    assert not hub.repositories["me/new"].private


def test_of_a_run_go_whole_lines_of_what_it_is_made_of(hub: HubServer, tmp_path: Path) -> None:
    run(tiny(tmp_path, num_generations=2))
    names = ("config.json", "history.jsonl", "metrics.jsonl")
    whole = {f"run/{name}": (tmp_path / name).read_bytes() for name in names}
    assert (tmp_path / "rollouts.jsonl").exists()
    (tmp_path / "lock").write_text("1234")
    for name in ("history.jsonl", "metrics.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"version":1,"gener')  # A generation that is being written.
    push(tmp_path, "me/run")
    assert hub.files("me/run") == whole


def test_a_damaged_history_is_not_pushed(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text("nothing of ours\nnor this\n")
    with pytest.raises(HistoryError, match="line 1"):
        files_to_push(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "folder"])
def test_a_link_is_not_pushed_nor_what_is_behind_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "export" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(RunDirectoryError, match=f"{name} cannot be opened: it is a link"):
        files_to_push(tmp_path / "export")


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds nothing to push"):
        files_to_push(tmp_path)
    with pytest.raises(RunDirectoryError, match="must be a directory that exists"):
        files_to_push(tmp_path / "none")


def test_the_token_goes_to_the_hub_only(hub: HubServer, export: Path) -> None:
    with HubServer() as elsewhere:  # It answers 401 to a request without the token.
        hub.verify_at = f"{elsewhere.url}/verify"
        with pytest.raises(HubError, match="does not accept the token"):
            push(export, "me/model")
    assert elsewhere.requests == ["POST /verify"]
