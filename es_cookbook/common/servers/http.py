"""One HTTP request within a time and a size, whatever the server does.

One deadline holds for connecting, sending and reading together, so a server that sends a byte a
second is given up like a silent one. A reply is read up to `MOST_BYTES` and never decompressed: it
is asked for as it is, and a few kilobytes cannot become gigabytes. Redirects are the caller's.

httpx2 comes with huggingface_hub, and cancelling its client leaves no thread behind. The package
`openai` was left: it reads without limits and checks no types. `tenacity` would not be shorter.
"""

import contextlib
import functools
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import anyio

from es_cookbook.common.errors import ConfigError, leaves
from es_cookbook.common.files import parsed

if TYPE_CHECKING:
    import ssl

    import httpx2

LONGEST_WAIT = 60.0
"""Seconds between two attempts, whatever the server wishes."""
MOST_BYTES = 4 << 20
"""Read of one reply."""
_PIECE = 1 << 16
MOST_VALUES = 2**17
"""Of one reply in JSON, as `parsed` counts them."""


class NoReplyError(Exception):
    """A server that cannot be reached, or breaks the protocol; its argument says how."""


class Reply(NamedTuple):
    """What a server said.

    Attributes:
        body: its first `MOST_BYTES`, as they were sent.
        problem: why the body is of no use, if that is known: it is compressed or too long.
    """

    status_code: int
    headers: Mapping[str, str]
    body: bytes
    problem: str | None


async def fetched(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | Iterable[bytes] | None,
    seconds: float,
) -> Reply:
    """Send one request; give its reply, of whatever status.

    A body may come in pieces, in which case `headers` hold its length.

    Raises:
        TimeoutError: The reply is not there, or not whole, after so many seconds; they begin again
            with each piece of the body that is sent.
        NoReplyError: There is none.
    """
    import httpx2  # 150 ms, which every command would wait for.

    headers = {"Accept-Encoding": "identity", **headers}
    try:
        with anyio.fail_after(seconds) as scope:
            pieces = (
                body if body is None or isinstance(body, bytes) else _sent(body, scope, seconds)
            )
            async with (
                httpx2.AsyncClient(verify=_certificates(), timeout=None) as client,
                client.stream(method, url, headers=headers, content=pieces) as reply,
            ):
                received = await _read(reply)
    # ImportError: of a proxy that needs a package; ValueError: of an address that is none.
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ImportError, ValueError) as error:
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no reply within {seconds:g} s") from None
        raise NoReplyError(_cause(error)) from None
    encoding = reply.headers.get("content-encoding", "identity")
    problem = None
    if encoding != "identity":
        problem = f"a reply compressed by {encoding!r:.20}, which was not asked for"
    elif len(received) > MOST_BYTES:
        problem = f"a reply of more than {MOST_BYTES >> 20} MB"
    return Reply(reply.status_code, reply.headers, received[:MOST_BYTES], problem)


def json_in(body: bytes) -> dict[str, Any]:
    """The JSON object of a reply, or what else it is: whoever takes it apart expects that.

    A million empty lists would take seconds and much memory.

    Raises:
        ValueError: It is none, or holds more values than any answer has.
    """
    return cast("dict[str, Any]", parsed(body, MOST_VALUES))


def key_in(variable: str) -> dict[str, str]:
    """The header with the key that an environment variable holds; empty without one.

    Raises:
        ConfigError: It cannot be in a header.
    """
    return bearer(os.environ.get(variable, ""), variable)


def bearer(key: str, variable: str) -> dict[str, str]:
    """The same of a key that has been read."""
    key = key.strip()
    if not re.fullmatch("[!-~]*", key):
        raise ConfigError(f"the key in {variable} must be ASCII characters without spaces")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _sent(
    body: Iterable[bytes], scope: anyio.CancelScope, seconds: float
) -> AsyncIterator[bytes]:
    for piece in body:
        for begin in range(0, len(piece), _PIECE):
            scope.deadline = anyio.current_time() + seconds
            yield piece[begin : begin + _PIECE]


async def _read(reply: "httpx2.Response") -> bytes:
    received = bytearray()
    async with contextlib.aclosing(reply.aiter_raw()) as chunks:
        async for chunk in chunks:
            received += chunk
            if len(received) > MOST_BYTES:
                break
    return bytes(received)


@functools.cache
def _certificates() -> "ssl.SSLContext":
    """Read once: it takes as long as twenty questions."""
    import httpx2

    return httpx2.create_ssl_context()


def _cause(error: BaseException) -> str:
    """The system's own words, which clients wrap into less and less."""
    while isinstance(inner := error.__cause__ or error.__context__, Exception):
        error = next(leaves(inner))
    return f"{type(error).__name__}: {brief(str(error))}".removesuffix(": ")


def brief(text: str) -> str:
    """The beginning of what a server said, on one line and without control characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:200])
    return " ".join(shown.split())


def retry_after(header: str) -> float:
    """What a `Retry-After` header asks for: seconds, or a time of day; 0 for what is neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
