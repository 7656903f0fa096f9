"""What a lying Hub sends stays in the cache, and what it never stops sending is given up."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants, get_session, set_client_factory

from es_cookbook.checkpoints.model_files import find_file
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.servers.library import guard
from es_cookbook.rl.data.sources import load_rows
from tests.bad_servers import BEHAVIOURS, fails, for_ever, http, says, serving
from tests.hub_server import HubServer, Repository

PATIENCE = 8.0
PATHS = {
    "above": "../../../../../evil",
    "above, weak": 'W/"../../../../../evil"',
    "absolute": "{root}/evil",
    "backslashes": "..\\..\\evil",
    "the folder": "..",
    "percents": "%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/evil",
    "NUL": "evil\0evil",
    "long": "e" * 5000,
}
"""Where a file may be said to belong."""
ENDLESS = {
    name: BEHAVIOURS[name]
    for name in (
        "says nothing",
        "drips headers",
        "drips an error",
        "a body without end",
        "chunks without end",
        "small chunks without end",
        "a bomb of gzip",
    )
}
ENDLESS["drips a file"] = for_ever(http(length=10**6), b"x", 0.02)
HARMLESS = {("name", "percents"), ("name", "long")}
"""A file may be called so."""


def _etag(hub: HubServer, path: str) -> None:
    hub.headers["ETag"] = path


def _linked_etag(hub: HubServer, path: str) -> None:
    hub.headers["X-Linked-Etag"] = path


def _commit(hub: HubServer, path: str) -> None:
    hub.headers["X-Repo-Commit"] = path


def _listed_commit(hub: HubServer, path: str) -> None:
    hub.commit = path


def _name(hub: HubServer, path: str) -> None:
    hub.listed.append({"type": "file", "path": path, "size": 1, "oid": "0" * 40})


def _large_file(hub: HubServer, path: str) -> None:
    large = {"oid": path, "size": 1, "pointerSize": 1}
    file = {"type": "file", "path": "x.bin", "size": 1, "oid": "0" * 40}
    hub.listed.append({**file, "lfs": large, "xetHash": "0" * 64})


LIES = {
    "etag": _etag,
    "linked etag": _linked_etag,
    "commit": _commit,
    "listed commit": _listed_commit,
    "name": _name,
    "large file": _large_file,
}


@pytest.fixture
def seconds() -> float:
    """That a server may take."""
    return 20.0


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float) -> Iterator[HubServer]:
    library = type(get_session())
    set_client_factory(lambda: library(follow_redirects=True, timeout=None))
    guard(seconds)
    with HubServer() as server:
        server.lead_here(monkeypatch, tmp_path / "home" / "hub")
        for name in ("DOWNLOAD", "ETAG"):
            monkeypatch.setattr(constants, f"HF_HUB_{name}_TIMEOUT", 1)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
        server.repositories["me/it"] = Repository(False, {"config.json": b'{"a": 7}'})
        server.repositories["datasets/me/it"] = Repository(False, {"train.jsonl": b'{"a": 7}\n'})
        yield server
    set_client_factory(lambda: library(follow_redirects=True, timeout=None))


def model() -> None:
    assert find_file("me/it", "config.json") is not None


def rows() -> None:
    assert [row.fields for row in load_rows("me/it")] == [{"a": 7}]


def sentence(read: Callable[[], None]) -> str:
    """What the user is told; empty if all went well."""
    began = time.perf_counter()
    try:
        read()
    except ESCookbookError as error:
        said = str(error)
        assert 10 < len(said) < 1200 and said.isprintable(), said
        return said
    finally:
        assert time.perf_counter() - began < PATIENCE
    return ""


def outside(root: Path) -> list[Path]:
    """What lies beside the repositories' folders, or is reached from them."""
    hub = root / "home" / "hub"
    inside = [each for each in hub.iterdir() if each.is_dir()] if hub.exists() else []
    found = [each for each in root.rglob("*") if "evil" in each.name]
    escaped = [each for each in found if not any(map(each.resolve().is_relative_to, inside))]
    links = [each for each in hub.rglob("*") if each.is_symlink()]
    return escaped + [each for each in links if not each.is_file()]


@pytest.mark.parametrize("read", [model, rows])
def test_an_honest_hub_gives_its_files(hub: HubServer, read: Callable[[], None]) -> None:
    hub.headers["X-Linked-Etag"] = f'"{"0" * 64}"'
    assert sentence(read) == ""


@pytest.mark.parametrize("read", [model, rows])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lie", LIES)
def test_nothing_that_a_hub_says_leaves_the_cache(
    hub: HubServer, tmp_path: Path, lie: str, path: str, read: Callable[[], None]
) -> None:
    LIES[lie](hub, PATHS[path].format(root=tmp_path))
    said = sentence(read)
    assert outside(tmp_path) == []
    if (lie, path) in HARMLESS:
        assert "evil" not in said
    elif "\0" not in PATHS[path] or lie in ("name", "large file", "listed commit"):
        assert f"{hub.url} " in said and ("no digest" in said or "outside of its repo" in said)


@pytest.mark.parametrize(
    ("read", "stage"),
    [*((model, stage) for stage in (1, 2, 3, 4)), *((rows, stage) for stage in (1, 2, 10, 13, 14))],
)
@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("seconds", [0.3])
def test_what_never_ends_is_given_up(
    hub: HubServer, name: str, read: Callable[[], None], stage: int
) -> None:
    hub.fail_after, hub.behave = stage, ENDLESS[name]
    assert f"{hub.url}" in sentence(read)


@pytest.mark.parametrize("read", [model, rows])
def test_a_file_has_the_size_that_was_said(hub: HubServer, read: Callable[[], None]) -> None:
    hub.fail_after = 4 if read is model else 14
    hub.behave = BEHAVIOURS["a body without end"]
    size = 8 if read is model else 9
    assert f"{hub.url} sent more than {size} bytes, all that this reply may have" in sentence(read)


@pytest.mark.parametrize("location", ["redirect", "next page"])
def test_a_list_of_files_is_checked_wherever_it_is(hub: HubServer, location: str) -> None:
    body = b'[{"type": "file", "path": "../evil", "size": 1, "oid": "0"}]'

    with serving(says(http(body))) as elsewhere:
        hub.fail_after = 2
        if location == "redirect":
            hub.behave = fails("302 Found", f"Location: {elsewhere}/resolve\r\n")
        else:
            link = f'Link: <{elsewhere}/resolve>; rel="next"\r\n'
            hub.behave = says(http(b"[]", headers=link))
        assert "lists the file '../evil', which would lie outside" in sentence(model)


def test_a_users_own_client_stays(hub: HubServer) -> None:
    library = type(get_session())
    set_client_factory(lambda: library(headers={"X-Proxy": "mine"}))
    for _ in range(2):
        guard()
        assert get_session().headers["X-Proxy"] == "mine"
    assert get_session().timeout == library().timeout


@pytest.mark.parametrize("seconds", [1.0])
def test_a_slow_consumer_is_no_slow_server(hub: HubServer) -> None:
    size = 3 << 20
    hub.repositories["me/it"].branches["main"][-1]["big"] = os.urandom(size)
    received = 0
    with get_session().stream("GET", f"{hub.url}/me/it/resolve/main/big") as reply:
        for piece in reply.iter_raw(1 << 20):
            received += len(piece)
            time.sleep(1.2)
    assert received == size
