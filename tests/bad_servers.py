"""Servers that do what servers should not, each by what it sends to a connection."""

import base64
import contextlib
import gzip
import itertools
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

Behaviour: TypeAlias = Callable[[socket.socket], None]


def http(
    body: bytes = b"", status: str = "200 OK", headers: str = "", length: object = None
) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {size}\r\n\r\n".encode() + body


def says(*pieces: bytes) -> Behaviour:
    """Send the pieces, then wait until the client closes."""

    def behave(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)
        while connection.recv(1 << 16):
            pass

    return behave


def ends(*pieces: bytes) -> Behaviour:
    """Send the pieces, then close the connection."""

    def behave(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)

    return behave


def for_ever(before: bytes, piece: bytes, pause: float = 0.0) -> Behaviour:
    def behave(connection: socket.socket) -> None:
        connection.sendall(before)
        while True:
            connection.sendall(piece)
            if pause:
                time.sleep(pause)

    return behave


def drips(text: bytes) -> Behaviour:
    """Send one byte at a time without end, too slowly to wait for."""

    def behave(connection: socket.socket) -> None:
        for byte in itertools.chain(text, itertools.repeat(32)):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    return behave


def resets(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def content(value: object) -> Behaviour:
    return says(http(json.dumps({"choices": [{"message": {"content": value}}]}).encode()))


def sends(body: bytes, headers: str = "") -> Behaviour:
    return says(http(body, headers=headers))


def fails(status: str, headers: str = "") -> Behaviour:
    return says(http(b"no", status, headers))


def packed(encoding: str, body: bytes) -> Behaviour:
    return sends(body, f"Content-Encoding: {encoding}\r\n")


ZEROS = bytes(1 << 20)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
GZIP = gzip.compress(bytes(32 << 20)) * 20
# 256 MB of zeros.
BROTLI = zlib.decompress(
    base64.b85decode(
        b"c-lMt|Gzzh3d5s~4n^<(|M>r(y@AC+My%o8U-|$4|1(Tr=s3)DVekLP|NqM~2r(2!FzotX|L6aIW(Ot(K5mE"
        b"a|N8&`uV?UJIFiWt;@<y{|Nrwda5h-zFx>rZ|L^~QMg>NJcGd;e|Bpj0*}zaTY6)RW%mH6n&#M"
    )
)
GOOD = json.dumps({"choices": [{"message": {"content": "7"}}]}).encode()
BEHAVIOURS: dict[str, Behaviour] = {
    "closes at once": ends(),
    "resets": resets,
    "says nothing": says(),
    "closes after the status": ends(b"HTTP/1.1 200 OK\r\n"),
    "closes in the middle of a body": ends(http(b'{"choices"', length=1000)),
    "speaks no HTTP": says(bytes(range(256)) * 8 + b"\r\n\r\n"),
    "speaks HTTP 0.9": ends(b"<html>hello</html>"),
    "speaks HTTP 2": says(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "speaks TLS": says(b"\x15\x03\x01\x00\x02\x02\x28"),
    "an empty body": sends(b""),
    "a page": sends(b"<html>" * 1000, "Content-Type: text/html\r\n"),
    "no content type": sends(b"\xff\xfe\x00"),
    "JSON that ends": sends(GOOD[:20]),
    "JSON that is deep": sends(b"[" * 100_000),
    "JSON that is a deep object": sends(b'{"choices":' * 100_000),
    "JSON of many small lists": sends(b"[" + b"[]," * 1_300_000 + b"[]]"),
    "JSON of huge integers": sends(b'{"choices": ' + b"9" * 5000 + b"}"),
    "JSON of huge exponents": sends(b'{"choices": 1e999999999, "siblings": 1e99}'),
    "JSON in UTF-16": sends(GOOD.decode().encode("utf-16")),
    "events without end": for_ever(CHUNKED, b"6\r\ndata: \r\n" * 5000),
    "null": sends(b"null"),
    "choices that are null": sends(b'{"choices": null, "siblings": null}'),
    "choices that are an object": sends(b'{"choices": {"0": {}}, "siblings": {"a": 1}}'),
    "choices that are numbers": sends(b'{"choices": [7], "siblings": [7]}'),
    "no choices": sends(b'{"choices": [], "siblings": []}'),
    "content that is null": content(None),
    "content that is a number": content(7),
    "content that is a list": content([{"type": "text", "text": "7"}]),
    "content that is empty": content(" \n"),
    "content of NUL bytes": content("\0" * 1000),
    "content of lone surrogates": content("7\ud800"),
    "tool calls alone": sends(b'{"choices": [{"message": {"tool_calls": [{"id": 1}]}}]}'),
    "a bomb of gzip": packed("gzip", GZIP),
    "a bomb of deflate": packed("deflate", zlib.compress(bytes(64 << 20))),
    "a bomb of Brotli": packed("br", BROTLI),
    "gzip in gzip": packed("gzip, gzip", gzip.compress(GZIP)),
    "an unknown encoding": packed("zstd", b"\x28\xb5\x2f\xfd"),
    "a body without end": for_ever(b"HTTP/1.1 200 OK\r\n\r\n", ZEROS),
    "chunks without end": for_ever(CHUNKED, b"100000\r\n" + ZEROS + b"\r\n"),
    "small chunks without end": for_ever(CHUNKED, b"1\r\n{\r\n" * 10_000),
    "200 MB": says(http(length=200 << 20), *[ZEROS] * 200),
    "headers without end": for_ever(b"HTTP/1.1 200 OK\r\n", b"X-Header: value\r\n" * 1000),
    "a header without end": for_ever(b"HTTP/1.1 200 OK\r\nX-Header: ", b"x" * 10_000),
    "informs without end": for_ever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "drips a status": drips(b"HTTP/1.1 200 OK"),
    "drips headers": drips(b"HTTP/1.1 200 OK\r\nX-Header: "),
    "drips a body": drips(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
    "drips an error": drips(b"HTTP/1.1 500 Broken\r\nContent-Length: 1000\r\n\r\n"),
    "an error without end": for_ever(b"HTTP/1.1 500 Broken\r\n\r\n", ZEROS),
    "a length too long": ends(http(GOOD, length=10_000)),
    "a length too short": says(http(GOOD, length=5)),
    "a length below zero": says(http(GOOD, length=-5)),
    "a length of 30 digits": says(http(GOOD, length=10**30)),
    "a length of words": says(http(GOOD, length="many")),
    "two lengths": says(http(GOOD, headers="Content-Length: 3\r\n")),
    "a length and chunks": says(http(GOOD, headers="Transfer-Encoding: chunked\r\n")),
    "chunks of words": says(CHUNKED, b"many\r\n{}\r\n"),
    "a huge chunk": says(CHUNKED, b"FFFFFFFFFFFFFFFF\r\n{}\r\n"),
    "keeps the connection": says(http(GOOD, headers="Connection: keep-alive\r\n")),
    "redirects to itself": fails("307 Here", "Location: /v1/chat/completions\r\n"),
    "redirects to a file": fails("302 Found", "Location: file:///etc/passwd\r\n"),
    "redirects to nowhere": fails("301 Moved"),
    "redirects to rubbish": fails("308 Moved", "Location: http://[::1\r\n"),
    "switches protocols": says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", b"x" * 100),
    "status 204": says(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "status 304": says(b"HTTP/1.1 304 Not Modified\r\n\r\n"),
    **{f"status {status}": fails(f"{status} No") for status in (401, 403, 404, 405, 413, 500, 999)},
    "status 1000": fails("1000 No"),
    "status of words": fails("many No"),
    **{
        f"429 and {wish}": fails("429 Later", f"Retry-After: {wish}\r\n")
        for wish in ("-5", 10**9, "nan", "soon", "Fri, 31 Dec 9999 23:59:59 GMT", "9" * 5000)
    },
}


@contextlib.contextmanager
def serving(behave: Behaviour) -> Iterator[str]:
    """Yield the address of a server that treats every connection in this way."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(1 << 16) or b"\r\n\r\n"
            behave(connection)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                open_ones.append(connection)
                threading.Thread(target=serve, args=(connection,), name="server").start()

    thread = threading.Thread(target=listen, name="server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in open_ones:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()
