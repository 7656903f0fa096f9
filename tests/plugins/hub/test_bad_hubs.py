"""Whatever a Hub does, at whatever request of a push, there is one sentence in bounded time.

Each behaviour is tried at one request; with `EVERY_STAGE=1` at all nine, which takes minutes.
"""

import os
import socket
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session, get_session

from es_cookbook.common.errors import HubError
from es_cookbook.common.servers.http import LONGEST_WAIT, fetched
from es_cookbook.plugins.hub.client import push
from tests.bad_servers import BEHAVIOURS, fails, http, serving
from tests.hub_server import TOKEN, HubServer

pytestmark = pytest.mark.anyio
SECONDS = 0.2
"""For one reply; what fails is tried up to six times."""
PATIENCE = 8.0
NO_ANSWERS = (
    "closes",
    "resets",
    "says nothing",
    "speaks",
    "drips a s",
    "drips h",
    "429",
    "status 4",
)
"""How the names of behaviours begin that no request can take for an answer."""
BUGS = ("AttributeError", "TypeError", "KeyError", "IndexError", "AssertionError", "Traceback")
STAGES = (
    "POST /api/repos/create",
    "GET /api/models/me/model",
    "POST /api/models/me/model/branch/new",
    "POST /api/validate-yaml",
    "POST /api/models/me/model/preupload/new",
    "POST /me/model.git/info/lfs/objects/batch",
    "PUT /blobs/",
    "POST /verify",
    "POST /api/models/me/model/commit/new",
)
"""What a push asks, in this order."""


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the library would have slept."""
    seconds: list[float] = []
    clock = types.SimpleNamespace(sleep=seconds.append, time=time.time)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    return seconds


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.lead_here(monkeypatch)
        server.verify_at = f"{server.url}/verify"
        yield server
    close_session()  # It has connections to the server.


@pytest.fixture
def export(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA model\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    return tmp_path


def pushed(export: Path) -> str:
    """The sentence that a push ends with."""
    began = time.perf_counter()
    try:
        push(export, "me/model", "new", seconds=SECONDS)
    except HubError as error:
        sentence = str(error)
        assert 10 < len(sentence) < 500 and sentence.isprintable() and TOKEN not in sentence
        assert not any(word in sentence for word in BUGS), sentence
    else:
        sentence = ""
    assert time.perf_counter() - began < PATIENCE
    return sentence


def test_a_push_asks_in_stages(hub: HubServer, export: Path) -> None:
    assert pushed(export) == ""
    asked = [request.partition("?")[0] for request in hub.requests]
    assert len(asked) == len(STAGES)
    assert all(map(str.startswith, asked, STAGES))


@pytest.mark.parametrize("shift", range(9) if os.environ.get("EVERY_STAGE") else [0])
@pytest.mark.parametrize("number", range(len(BEHAVIOURS)))
def test_whatever_a_hub_does_there_is_a_sentence(
    hub: HubServer, export: Path, slept: list[float], number: int, shift: int
) -> None:
    name, behave = list(BEHAVIOURS.items())[number]
    hub.fail_after, hub.behave = (number + shift) % len(STAGES), behave
    sentence = pushed(export)
    if name.startswith(NO_ANSWERS):
        assert sentence.startswith("cannot push to me/model on 127.0.0.1:"), (name, hub.requests)
    assert max(slept, default=0) <= LONGEST_WAIT + 1


@pytest.mark.parametrize("stage", [0, 1, 5, 6, 8])
def test_nothing_goes_where_a_redirect_leads(hub: HubServer, export: Path, stage: int) -> None:
    asked: list[bytes] = []
    with serving(lambda other: asked.append(b"")) as elsewhere:
        hub.fail_after = stage
        hub.behave = fails("307 Moved", f"Location: {elsewhere}/\r\n")
        sentence = pushed(export)
    assert f"it sends on to {elsewhere[7:]}, which gets no files" in sentence
    assert asked == []


def test_the_token_goes_to_the_hub_alone(hub: HubServer, export: Path) -> None:
    asked: list[bytes] = []
    with serving(lambda other: asked.append(b"")) as elsewhere:
        hub.verify_at = f"{elsewhere}/verify"
        sentence = pushed(export)
    assert f"it wants the token sent to {elsewhere[7:]}" in sentence
    assert asked == []


def test_an_upload_that_is_cut_off_is_tried_again(
    hub: HubServer, export: Path, slept: list[float]
) -> None:
    hub.drop_uploads = 2
    assert pushed(export) == "" and len(slept) == 2
    hub.drop_uploads = 100
    (export / "model.safetensors").write_bytes(b"another" * 10_000)
    assert "cannot push to me/model on 127.0.0.1:" in pushed(export)


@pytest.mark.parametrize("header", ["Retry-After: 31536000", 'RateLimit: "api";r=0;t=31536000'])
def test_no_wish_of_a_hub_makes_a_push_sleep_for_a_year(
    hub: HubServer, export: Path, slept: list[float], header: str
) -> None:
    hub.fail_after, hub.behave = 5, fails("429 Later", f"{header}\r\n")
    assert "it answered with status 429" in pushed(export)
    assert len(slept) == 5 and max(slept) <= LONGEST_WAIT + 1


async def test_a_file_may_take_longer_than_a_reply() -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(8):
            time.sleep(0.1)
            yield b"x"

    def takes(connection: socket.socket) -> None:
        received = b""
        while len(received) < 8:
            received += connection.recv(8)
        connection.sendall(http(b"taken"))

    with serving(takes) as url:
        reply = await fetched("PUT", url, {"Content-Length": "8"}, pieces(), 0.5)
    assert reply.body == b"taken"


@pytest.mark.usefixtures("slept")
def test_afterwards_the_library_has_its_own_client(hub: HubServer, export: Path) -> None:
    pushed(export)
    hub.repositories["me/model"].private = False
    big = bytes(5 << 20)
    hub.repositories["me/model"].branches["main"][-1]["big"] = big
    assert get_session().get(f"{hub.url}/me/model/resolve/main/big").content == big
