"""One HTTP request with a limit on its time and on the size of its reply.

One deadline covers connecting, sending and reading, so a server that sends one byte per second is
given up like a silent one. At most `MOST_BYTES` of a reply are read, and it is never decompressed:
a few kilobytes could become gigabytes. Redirects are not followed.
"""

import functools
import os
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, NamedTuple

import anyio

from es_cookbook.common.errors import ConfigError

if TYPE_CHECKING:
    import ssl

LONGEST_WAIT = 60.0
"""Seconds between two attempts, whatever the server asks for."""
MOST_BYTES = 4 << 20
"""Read of one reply."""


class NoReplyError(Exception):
    """There is no usable reply; the argument says why."""


class Reply(NamedTuple):
    """The reply of a server, of whatever status."""

    status_code: int
    headers: Mapping[str, str]
    body: bytes


async def posted(url: str, headers: Mapping[str, str], body: bytes, seconds: float) -> Reply:
    """Send one POST request and return its reply.

    Raises:
        NoReplyError: There is none within `seconds`, or it is too long or compressed.
    """
    import httpx2  # Takes 150 ms, which every command would wait for.

    headers = {"Accept-Encoding": "identity", **headers}
    received = bytearray()
    try:
        with anyio.fail_after(seconds):
            async with (
                httpx2.AsyncClient(verify=_certificates(), timeout=None) as client,
                client.stream("POST", url, headers=headers, content=body) as reply,
            ):
                if (encoding := reply.headers.get("content-encoding", "identity")) != "identity":
                    raise NoReplyError(f"a reply compressed by {encoding!r:.20}")
                async for chunk in reply.aiter_raw():
                    received += chunk
                    if len(received) > MOST_BYTES:
                        raise NoReplyError(f"a reply of more than {MOST_BYTES >> 20} MB")
    except TimeoutError:
        raise NoReplyError(f"no reply within {seconds:g} s") from None
    # ImportError: a proxy that needs a package; ValueError: an invalid address.
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ImportError, ValueError) as error:
        raise NoReplyError(f"{type(error).__name__}: {brief(str(error))}") from None
    return Reply(reply.status_code, reply.headers, bytes(received))


def key_in(variable: str) -> dict[str, str]:
    """The header with the key in an environment variable; empty without one.

    Raises:
        ConfigError: The key cannot be in a header.
    """
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch("[!-~]*", key):
        raise ConfigError(f"the key in {variable} must be ASCII characters without spaces")
    return {"Authorization": f"Bearer {key}"} if key else {}


@functools.cache
def _certificates() -> "ssl.SSLContext":
    """Read once: it takes as long as twenty requests."""
    import httpx2

    return httpx2.create_ssl_context()


def brief(text: str) -> str:
    """The beginning of a server's text, on one line and without control characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:200])
    return " ".join(shown.split())


def retry_after(header: str) -> float:
    """Seconds that a `Retry-After` header asks for, as a number or a time; 0 if it is neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
