"""Requests that are malformed, incomplete, slow or too large, sent as bytes."""

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream
from typing_extensions import override

from es_cookbook.engines.base import Progress
from es_cookbook.plugins.endpoint.app import MOST_BYTES, serve
from es_cookbook.plugins.endpoint.endpoint import Endpoint, ServedModel
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.requests import Draw
from es_cookbook.plugins.endpoint.translator import Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.types import Action, Observation
from tests.chat_templates import CHATML, tokenizer_with
from tests.plugins.endpoint.test_application import KEY, OneModel

SHORT = 0.3
"""Seconds, for the time-outs of `short`."""
PATIENCE = 20.0
MOST_HEAD = 16 << 10


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs that tests can wait for."""
    endpoint = "es_cookbook.plugins.endpoint"
    monkeypatch.setattr(f"{endpoint}.server.HEAD_SECONDS", SHORT)
    monkeypatch.setattr(f"{endpoint}.server._IDLE_SECONDS", SHORT)
    for name in ("BODY", "PART", "DISCARD"):
        monkeypatch.setattr(f"{endpoint}.app._{name}_SECONDS", SHORT)


class Slow(OneModel, ServedModel):
    """Says "done" after some seconds, a token at a time."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(self)
        self.translator, self.kept = Translator(tokenizer_with(CHATML), 600), KeptTurns()
        self.seconds = seconds
        self.num_asked, self.pending = 0, PendingAnswers()

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        self.num_asked += 1
        tokens_T = tuple(self.translator.tokenizer.encode("done", add_special_tokens=False))
        if progress.follows:
            progress.sampled(tokens_T[:1])
        await anyio.sleep(self.seconds)
        return Action(tokens_T, "done", "stop")


@contextlib.asynccontextmanager
async def serving(endpoint: Endpoint | None = None) -> AsyncGenerator[int]:
    """The port of a server."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(serve, endpoint or Slow(), bound, until_signal=False))
            yield bound.getsockname()[1]
            tasks.cancel_scope.cancel()


async def connected(port: int) -> ByteStream:
    return await anyio.connect_tcp("127.0.0.1", port)


async def rest_of(stream: ByteStream) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        with anyio.fail_after(PATIENCE):
            while True:
                found += await stream.receive()
    await stream.aclose()
    return found


async def asked(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send these, whatever is answered; what is, until the server closes."""
    stream = await connected(port)

    async def send() -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for piece in pieces:
                await stream.send(piece)
                await anyio.sleep(pause)

    found = b""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        found = await rest_of(stream)
        tasks.cancel_scope.cancel()
    return found


def head(*headers: str, line: str = "POST /v1/completions HTTP/1.1", key: str = KEY) -> bytes:
    own = ("Host: es", f"Authorization: Bearer {key}") if key else ("Host: es",)
    return "\r\n".join((line, *own, *headers, "", "")).encode("latin-1")


def request(*, close: bool = True, stream: bool = False, key: str = KEY) -> bytes:
    body = json.dumps({"model": "centre", "prompt": "x", "stream": stream}).encode()
    more = ["Connection: close"] if close else []
    return head(f"Content-Length: {len(body)}", *more, key=key) + body


def statuses(reply: bytes) -> list[int]:
    """Of all answers in what came."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3})", reply)]


def error_in(reply: bytes) -> str:
    """The message, in OpenAI's form."""
    found = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found["message"]


CHUNKED = "Transfer-Encoding: chunked"
UNFINISHED = {
    "nothing": b"",
    "half a line": b"GET /v1/mod",
    "half of the headers": b"GET /v1/models HTTP/1.1\r\nHost: es\r\nAuthoriz",
    "no body": head("Content-Length: 50"),
    "half a body": head("Content-Length: 50") + b'{"model":',
    "half a chunk": head(CHUNKED) + b"10\r\nabc",
    "half a size": head(CHUNKED) + b"1",
    "half a trailer": head(CHUNKED) + b"0\r\nX-A: 1\r\n",
    "a body of who has no key": head("Content-Length: 50", key="wrong") + b"{",
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("drips", [False, True])
async def test_incomplete_requests_are_closed_in_time(drips: bool) -> None:
    async with serving() as port:
        replies: dict[str, bytes] = {}

        async def ask(name: str, sent: bytes) -> None:
            endless = itertools.repeat(b"a", 10_000) if drips else ()
            replies[name] = await asked(port, sent, *endless, pause=0.01)

        async with anyio.create_task_group() as tasks:
            for name, sent in UNFINISHED.items():
                tasks.start_soon(ask, name, sent)
        reply = replies.pop("a body of who has no key")
        assert statuses(reply) == [401] and error_in(reply).startswith("the key is wrong")
        for name, reply in replies.items():
            in_body = "body" in name or "chunk" in name or name in ("half a size", "half a trailer")
            if in_body and not drips:
                assert error_in(reply) == "the body of the request did not end in time", name
            assert statuses(reply) in ([], [408], [400]), name
        assert statuses(await asked(port, request())) == [200]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_have_no_time_limit(stream: bool) -> None:
    async with serving(Slow(4 * SHORT)) as port:
        reply = await asked(port, request(stream=stream, close=False))
        assert statuses(reply) == [200]  # Afterwards it was idle, and closed.
        assert b"[DONE]" in reply if stream else b'"done"' in reply


async def test_many_connections_opened_at_once_are_all_answered() -> None:
    async with serving() as port:
        streams = [await connected(port) for _ in range(300)]
        for stream in streams:
            await stream.send(request())
        for stream in streams:
            assert statuses(await rest_of(stream)) == [200]


@pytest.mark.usefixtures("short")
async def test_a_body_is_read_only_with_the_right_key() -> None:
    endpoint = Slow()
    async with serving(endpoint) as port:
        for wrong in ("", "wrong", "sesame x", "SESAME", "sesam\xe9", "x" * 9_000):
            reply = await asked(port, head(f"Content-Length: {MOST_BYTES}", key=wrong), b"{")
            assert statuses(reply) == [401] and "key" in error_in(reply)
            assert b"\r\nconnection: close\r\n" in reply.lower()
        waits = "Expect: 100-continue", "Content-Length: 9"
        assert statuses(await asked(port, head(*waits, key="wrong"))) == [401]
        assert statuses(await asked(port, head(*waits, line="POST /v1 HTTP/1.1"))) == [404]
        stream = await connected(port)
        sent = request().replace(b"Host: es", b"Host: es\r\nExpect: 100-continue")
        before, end, body = sent.partition(b"\r\n\r\n")
        await stream.send(before + end)
        assert statuses(await stream.receive()) == [100]
        await stream.send(body)
        assert statuses(await rest_of(stream)) == [200] and endpoint.num_asked == 1


SMUGGLED = "GET /v1/models HTTP/1.1\r\nHost: es\r\n\r\n"
STRANGE: dict[str, tuple[bytes, Sequence[int]]] = {
    "a long header": (head("X: " + "x" * 2 * MOST_HEAD), [400]),
    "one header folded": (head(*["a: b", *[" c"] * MOST_HEAD]), [400]),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", [400]),
    "a host of rubbish": (head("X: 1", line="GET /x HTTP/1.1").replace(b"es", b"[:"), [404]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [404]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), [400]),
    "OPTIONS": (head("Origin: http://x", line="OPTIONS /v1/models HTTP/1.1"), [404]),
    "HEAD with chunks of rubbish": (head(CHUNKED, line="HEAD /x HTTP/1.1") + b"zz\r\n", [400]),
    "two lengths": (head("Content-Length: 5", "Content-Length: 6") + b"abcdef", [400]),
    "an unknown encoding": (head("Transfer-Encoding: gzip, chunked"), [400, 501]),
    "a size without end": (head(CHUNKED) + b"1;" + b"a" * 3 * MOST_HEAD, [400]),
    "a trailer without end": (head(CHUNKED) + b"0\r\n" + b"a:\r\n" * MOST_HEAD, [400]),
    "compressed": (head("Content-Encoding: gzip", "Content-Length: 3") + b"\x1f\x8b\x08", [400]),
    "a request in a body": (head("Content-Length: 44", key="") + SMUGGLED.encode(), [401]),
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("key", [KEY, ""])
async def test_malformed_requests_are_refused_without_a_line_in_the_log(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    endpoint = Slow()
    async with serving(endpoint) as port:
        for name, (sent, expected) in STRANGE.items():
            own = sent if key else sent.replace(b"Authorization: Bearer sesame\r\n", b"")
            reply = await asked(port, own)
            (status, *more) = statuses(reply)
            assert status in (expected if key else (*expected, 401)) and not more, (name, reply)
            assert b"access-control" not in reply.lower(), name
        websocket = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: eA=="]
        line = "GET /v1/models HTTP/1.1"
        assert statuses(await asked(port, head(*websocket, line=line, key=key))) in ([200], [401])
        assert statuses(await asked(port, request())) == [200] and endpoint.num_asked == 1
    assert not caplog.records


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_connections() -> int:
    gc.collect()
    return sum(type(each).__name__ == "_Protocol" for each in gc.get_objects())


@pytest.mark.usefixtures("short")
@pytest.mark.slow
async def test_nothing_is_left_of_connections_and_requests() -> None:
    wrong = request(key="wrong")
    async with serving() as port:

        async def round_() -> tuple[int, int]:
            reply = await asked(port, request(close=False) * 50)
            assert statuses(reply) == [200] * 50
            for sent in [request(), wrong, request()[:-3], b"rubbish\r\n\r\n", b""] * 10:
                stream = await connected(port)
                await stream.send(sent)
                await stream.aclose()
            with anyio.fail_after(PATIENCE):
                while descriptors() > before + 1:  # A last one is about to be closed.
                    await anyio.sleep(0.05)
                while (kept := num_connections()) > 2:  # Of the last ones a moment's.
                    await anyio.sleep(0.05)
            return kept, len(asyncio.all_tasks())

        await asked(port, request())
        before, usual = descriptors(), len(asyncio.all_tasks())
        for kept, tasks in [await round_() for _ in range(2)]:
            assert kept <= 2 and tasks <= usual + 2


_ENDLESS = """
import anyio, socket
from es_cookbook.plugins.endpoint.app import serve
from tests.plugins.endpoint.test_server import Slow
with socket.create_server(("127.0.0.1", 0)) as bound:
    print(bound.getsockname()[1], flush=True)
    anyio.run(serve, Slow(seconds=3600), bound)
"""


@pytest.mark.slow
async def test_sigterm_ends_the_server_without_waiting_for_answers() -> None:
    command = [sys.executable, "-c", _ENDLESS]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        port = int(await process.stdout.receive())
        streams = [await connected(port) for _ in range(2)]
        await streams[0].send(request())
        await streams[1].send(request(stream=True))
        await anyio.sleep(1)
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(PATIENCE):
            await process.wait()
        for stream in streams:
            await stream.aclose()
