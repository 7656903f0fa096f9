"""The Hub is asked once; whatever it or the network does, there is one sentence within seconds."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Literal

import pytest

from es_cookbook.common.errors import HubError
from es_cookbook.common.servers.hub import check_repository, repository_files, within
from tests.hub_server import TOKEN, HubServer, Repository


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.lead_here(monkeypatch)
        server.repositories["me/open"] = Repository(False, {"config.json": b"{}", "a/b": b""})
        server.repositories["me/closed"] = Repository(True, {"config.json": b"{}"})
        server.repositories["datasets/me/data"] = Repository(False, {"train.jsonl": b""})
        yield server


@pytest.mark.parametrize(
    ("kind", "name", "files"),
    [
        ("model", "me/open", ["config.json", "a/b"]),
        ("model", "me/closed", ["config.json"]),
        ("dataset", "me/data", ["train.jsonl"]),
    ],
)
def test_the_answer_is_the_files(
    hub: HubServer, kind: Literal["model", "dataset"], name: str, files: list[str]
) -> None:
    reply = check_repository(kind, name)
    assert [file["rfilename"] for file in json.loads(reply.body)["siblings"]] == files
    if kind == "model":
        assert repository_files(name) == files
        hub.requests.pop()
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("token", "name", "sentence"),
    [
        (TOKEN, "me/none", "knows no model me/none, or hides it, because it is private; it was "),
        ("", "me/closed", "knows no model me/closed, or hides it, because it is private; it was "),
        (TOKEN, "me/none", "asked with the token that is set"),
        ("", "me/none", "asked without a token (HF_TOKEN is not set)"),
        ("hf_wrong", "me/closed", "does not accept the token that is set (HF_TOKEN, or by `hf "),
        (TOKEN, "a b", "has no model a b: a name there is owner/name in letters, digits, '-', '_'"),
    ],
)
def test_a_refusal_is_one_sentence_after_one_question(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str, name: str, sentence: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError) as caught:
        repository_files(name)
    assert str(caught.value).startswith(f"{hub.url} ")
    assert sentence in str(caught.value)
    assert TOKEN not in str(caught.value) and "hf_wrong" not in str(caught.value)
    assert len(hub.requests) <= 1


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_hub_that_fails_is_asked_once(hub: HubServer, status: int) -> None:
    hub.fail_with = status
    with pytest.raises(HubError, match=f"status {status}" if status != 403 else "refuses model"):
        repository_files("me/open")
    assert len(hub.requests) == 1


def test_a_hub_that_hangs_is_given_up(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.1")
    hub.hang = 600
    with pytest.raises(HubError) as caught:
        repository_files("me/open")
    assert str(caught.value) == (
        f"{hub.url} did not answer within 0.1 s (HF_HUB_ETAG_TIMEOUT in the environment sets how "
        "long to wait)"
    )


def no_such_host(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:9", "ConnectionRefusedError"),
        ("https://no-such-host.invalid", "gaierror"),
    ],
)
def test_nobody_there_is_one_sentence(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    if said == "gaierror":  # Where no name server answers, a lookup takes longer than the limit.
        monkeypatch.setattr("socket.getaddrinfo", no_such_host)
    with pytest.raises(HubError) as caught:
        check_repository("dataset", "me/data")
    assert str(caught.value).startswith(f"{address} cannot be reached ({said}: ")


def test_offline_nobody_is_asked(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError) as caught:
        repository_files("me/open")
    assert str(caught.value) == f"{hub.url} is not asked, because HF_HUB_OFFLINE is set"
    assert hub.requests == []


def test_what_takes_too_long_is_left_behind() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.01 s"):
        within(0.01, lambda: released.wait(600))
    released.set()
    assert within(60, lambda: "an answer") == "an answer"
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)
