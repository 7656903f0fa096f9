"""The attacks of `benchmarks.attacks`: one attack on a server, by name, from a separate process.

    python benchmarks/attackers.py NAME HOST PORT KEY

prints the statuses of its replies as JSON: `null` for a connection that was closed without one.
"""

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Json: TypeAlias = Mapping[str, object]
Status: TypeAlias = int | None
PATIENCE = 60.0
"""Seconds for a reply."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Server(NamedTuple):
    """The attacked server."""

    host: str
    port: int
    key: str

    def connection(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=PATIENCE)

    def head(self, path: str, length: int, *more: str, key: str | None = None) -> bytes:
        """Return the head of a request that has a body of so many bytes."""
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Authorization: Bearer {self.key if key is None else key}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            *more,
        )
        return "\r\n".join((*lines, "", "")).encode()

    def ask(self, path: str, body: Json | bytes, key: str | None = None) -> Status:
        """Return the status of the reply to a body."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.connection() as there:
            return told(there, self.head(path, len(sent), key=key) + sent)


def told(there: socket.socket, data: bytes) -> Status:
    """Return the status of the reply to these bytes, which is read to its end or for a while."""
    with contextlib.suppress(OSError):  # It may close before it has read all.
        there.sendall(data)
    found = b""
    with contextlib.suppress(OSError):
        while len(found) < 64 and (piece := there.recv(65536)):
            found += piece
    line = found.partition(b"\r\n")[0].split()
    status = int(line[1]) if len(line) > 1 and line[1].isdigit() else None
    there.settimeout(0.5)
    with contextlib.suppress(OSError):
        while there.recv(1 << 20):
            pass
    return status


def chat(text: str = "Hi.", **more: object) -> dict[str, object]:
    """Return the body of a chat."""
    given = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return {"model": MODEL, **given, **more}


def text(prompt: object = "Hi.", **more: object) -> dict[str, object]:
    """Return the body of a text."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, **more}


MODEL = "model"
"""Replaced by the name that the server tells."""


def _hang_up(server: Server, path: str, body: Json, after: float, count: int = 1) -> list[Status]:
    """Ask for many tokens, and disconnect."""
    sent = json.dumps(body).encode()
    open_ones: list[socket.socket] = []
    for _ in range(count):
        there = server.connection()
        there.sendall(server.head(path, len(sent)) + sent)
        open_ones.append(there)
    time.sleep(after)
    found: list[Status] = []
    for there in open_ones:
        there.settimeout(0.05)
        answered = b""
        with contextlib.suppress(OSError):
            answered = there.recv(64)
        line = answered.split()
        found.append(int(line[1]) if len(line) > 1 else None)
        there.close()
    return found


def _tool(number: int, **more: object) -> Json:
    function = {"name": f"f{number}", "parameters": {"type": "object", "properties": {}}, **more}
    return {"type": "function", "function": function}


def _deep(levels: int) -> Json:
    found: dict[str, object] = {"type": "object", "properties": {}}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}}
    return found


BODIES: Mapping[str, Callable[[], tuple[str, Json | bytes]]] = {
    "a chat": lambda: (CHAT, chat()),
    "3,000 prompts x 128 answers": lambda: (TEXT, text(["Hi."] * 3000, n=128)),
    "128 answers of 2^31 tokens": lambda: (CHAT, chat(n=128, max_tokens=1 << 31)),
    "a stop text of 400,000 letters, streamed": lambda: (
        CHAT,
        chat(stop="a" * 400_000, stream=True, max_tokens=64),
    ),
    "16 stop texts of 900 letters, streamed": lambda: (
        CHAT,
        chat(stop=["a" * (900 + i) for i in range(16)], stream=True, max_tokens=64),
    ),
    "a chat of 4 M characters": lambda: (CHAT, chat("word " * 800_000)),
    "a text of 4 M characters": lambda: (TEXT, text("word " * 800_000)),
    "4 M letters without a blank": lambda: (TEXT, text("a" * 4_000_000)),
    "300,000 letters without a blank": lambda: (TEXT, text("ab" * 150_000)),
    "300,000 blanks": lambda: (CHAT, chat(" " * 300_000 + "a")),
    "4 M characters of three bytes": lambda: (TEXT, text("\u4e00" * 1_300_000)),
    "a prompt of 1 M tokens": lambda: (TEXT, text([1000] * 1_000_000)),
    "40,000 prompts of a token": lambda: (TEXT, text([[1000]] * 40_000)),
    "100,000 messages": lambda: (
        CHAT,
        chat(messages=[{"role": "user", "content": "a"}] * 100_000),
    ),
    "10,000 tools": lambda: (CHAT, chat(tools=[_tool(i) for i in range(10_000)])),
    "a tool with 2 M letters": lambda: (CHAT, chat(tools=[_tool(0, description="a " * 1_000_000)])),
    "a schema 400 levels deep": lambda: (CHAT, chat(tools=[_tool(0, parameters=_deep(400))])),
    "8 MiB of empty lists": lambda: (CHAT, b'{"messages": [' + b"[]," * 2_790_000 + b"0]}"),
    "8 MiB of empty objects": lambda: (CHAT, b'{"messages": [' + b"{}," * 2_790_000 + b"0]}"),
    "8 MiB of digits": lambda: (CHAT, b'{"n": ' + b"9" * 8_380_000 + b"}"),
    "a million brackets": lambda: (CHAT, b"[" * 1_000_000),
    "a body of 64 MiB": lambda: (CHAT, b" " * (64 << 20)),
    "logprobs of 500 texts, repeated": lambda: (
        TEXT,
        text(["Hi there, how are you?"] * 500, echo=True, logprobs=1, max_tokens=0),
    ),
}
"""Bodies of requests with the right key."""


def _many_lines(server: Server) -> bytes:
    return server.head(CHAT, 2)[:-2] + b"a: b\r\n" * 4_000_000


def _forms(server: Server) -> Mapping[str, bytes]:
    """Return attacks before a key is known."""
    return {
        "a header of 40 MB": server.head(CHAT, 2)[:-2] + b"a: " + b"b" * 40_000_000 + b"\r\n\r\n",
        "4 M header lines": _many_lines(server),
        "a path of 10 MB": b"GET /" + b"a" * 10_000_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 1000,
        "two lengths": server.head(CHAT, 2, "Content-Length: 9") + b"{}",
        "a length and chunks": server.head(CHAT, 2, "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        "a wrong key and 8 MiB": server.head(CHAT, 8 << 20, key="no") + b" " * (8 << 20),
        "1,000 requests at once, wrong key": (server.head(CHAT, 2, key="no") + b"{}") * 1000,
    }


TOGETHER = "64 clients of 128 long answers each, left"
"""Name of an attack with twice as much as a key may have in progress."""
HALF_OPEN: Mapping[str, Callable[[Server], bytes]] = {
    "nothing": lambda _: b"",
    "half a line": lambda _: b"POST /v1/chat",
    "half the headers": lambda server: server.head(CHAT, 9)[:-4],
    "half a body": lambda server: server.head(CHAT, 999) + b'{"a": ',
    "half a body, wrong key": lambda server: server.head(CHAT, 999, key="no") + b'{"a": ',
}
"""Bytes from connections that then send no more."""


def half_open(server: Server, count: int) -> Iterator[float]:
    """Open so many connections of each kind by turns; the seconds until each is closed."""
    kinds = list(HALF_OPEN.values())
    began = time.monotonic()
    there: list[socket.socket] = []
    for number in range(count):
        with contextlib.suppress(OSError):
            there.append(server.connection())
            there[-1].sendall(kinds[number % len(kinds)](server))
    for each in there:
        each.settimeout(max(0.01, 60 - (time.monotonic() - began)))
        with contextlib.suppress(ConnectionError):
            try:
                while each.recv(65536):
                    pass
            except TimeoutError:
                yield float("inf")
                continue
        yield time.monotonic() - began


def names() -> Sequence[str]:
    """Return the names of all attacks by one request or connection."""
    left = ["128 long answers, left", TOGETHER]
    return [*BODIES, *_forms(Server("", 0, "")), *left, "a stream that nobody reads"]


def main(name: str, server: Server) -> list[Status]:
    """Attack, and return the statuses."""
    if name in BODIES:
        path, body = BODIES[name]()
        return [server.ask(path, body)]
    if name == "128 long answers, left":
        return _hang_up(server, CHAT, chat(n=128, max_tokens=2000), 2.0)
    if name == TOGETHER:
        return _hang_up(server, CHAT, chat(n=128, max_tokens=2000), 3.0, count=64)
    if name == "a stream that nobody reads":
        return _hang_up(server, CHAT, chat(n=16, max_tokens=400, stream=True), 5.0)
    with server.connection() as there:
        return [told(there, _forms(server)[name])]


if __name__ == "__main__":
    chosen, host, port, key, MODEL = sys.argv[1:]
    attacked = Server(host, int(port), key)
    if chosen.isdigit():
        print(json.dumps(list(half_open(attacked, int(chosen)))))
    else:
        print(json.dumps(main(chosen, attacked)))
