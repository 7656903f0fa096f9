"""Chat completions of an OpenAI-compatible server, requested until there is one.

A server that is slow, overloaded, unreachable or replies with something else is asked again, each
time after twice the wait, or after the time that it asks for (`Retry-After`). Other refusals are
not repeated.

One deadline covers connecting, sending and reading, so a server that sends one byte per second
counts as silent. At most `MOST_BYTES` of a reply are read, and it is never decompressed, because a
few kilobytes could become gigabytes. Redirects are not followed.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from http.client import responses
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import anyio

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import parsed

if TYPE_CHECKING:
    import ssl

LONGEST_WAIT = 60.0
"""Limit in seconds on the wait between attempts, even if the server asks for more."""
MOST_BYTES = 4 << 20
"""Limit on the bytes read of a reply."""
_MOST_VALUES = 2**17
"""JSON values in a reply: a million empty lists would take seconds and much memory."""
_TRY_LATER = (408, 409, 425, 429)
_T = TypeVar("_T")


class AskAgainError(Exception):
    """A failure that may not occur the next time.

    Args:
        why: in a few words.
        wait: seconds that the server asks for.
    """

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


class RefusedError(Exception):
    """A failure that a repetition would not change.

    Args:
        why: in a few words.
        status: HTTP status.
    """

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class Completion(NamedTuple):
    """The model's text, and why it stopped: "stop", "length" and so on."""

    text: str
    finish_reason: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class ChatServer:
    """A server, and how often it is asked.

    Attributes:
        url: base URL, up to /v1.
        key_in: environment variable with the key, if the server needs one.
        seconds: time limit of one attempt.
        attempts: maximum number.
        backoff: seconds before the second attempt; doubled for each further one.
    """

    url: str
    key_in: str
    seconds: float
    attempts: int
    backoff: float

    async def ask(self, question: Mapping[str, object], read: Callable[[Completion], _T]) -> _T:
        """Ask a question; returns `read(reply)`.

        Args:
            question: the fields of the request.
            read: raises AskAgainError for an unusable reply.

        Raises:
            AskAgainError: That of the last attempt.
            RefusedError: The server will not answer this question.
            ConfigError: The key cannot be sent in a header.
        """
        body = json.dumps(question).encode()
        for attempt in range(1, self.attempts):
            try:
                return read(await self._reply(body))
            except AskAgainError as error:
                wait = max(error.wait, self.backoff * 2.0 ** min(attempt - 1, 100))
            await anyio.sleep(min(wait, LONGEST_WAIT))
        return read(await self._reply(body))

    async def _reply(self, body: bytes) -> Completion:
        import httpx2  # Takes 150 ms, which every command would wait for.

        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **self._authorization(),
        }
        url, received = f"{self.url.rstrip('/')}/chat/completions", bytearray()
        try:
            with anyio.fail_after(self.seconds):
                async with (
                    httpx2.AsyncClient(verify=_certificates(), timeout=None) as client,
                    client.stream("POST", url, headers=headers, content=body) as reply,
                ):
                    encoding = reply.headers.get("content-encoding", "identity")
                    if encoding != "identity":
                        raise AskAgainError(f"a reply compressed by {encoding!r:.20}")
                    async for chunk in reply.aiter_raw():
                        received += chunk
                        if len(received) > MOST_BYTES:
                            raise AskAgainError(f"a reply of more than {MOST_BYTES >> 20} MB")
        except TimeoutError:
            raise AskAgainError(f"no reply within {self.seconds:g} s") from None
        # ImportError: a proxy that needs a package; ValueError: an invalid address.
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ImportError, ValueError) as error:
            raise AskAgainError(f"{type(error).__name__}: {_brief(str(error))}") from None
        if not 200 <= reply.status_code < 300:
            raise _failure(reply.status_code, reply.headers, bytes(received))
        return completion_in(bytes(received))

    def _authorization(self) -> dict[str, str]:
        key = os.environ.get(self.key_in, "").strip()
        if not re.fullmatch("[!-~]*", key):
            raise ConfigError(f"the key in {self.key_in} must be ASCII characters without spaces")
        return {"Authorization": f"Bearer {key}"} if key else {}


def completion_in(body: bytes) -> Completion:
    """Parse the completion in the body of a reply. What UTF-8 cannot hold becomes "?".

    Raises:
        AskAgainError: The reply is something else, or has no text.
    """
    try:
        choice = cast("Any", parsed(body, _MOST_VALUES))["choices"][0]
        text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise AskAgainError(f"a reply that is no chat completion: {body[:60]!r}") from None
    if not isinstance(text, str) or not text.strip():
        raise AskAgainError(f"an answer without text: {reprlib.repr(text)}")
    return Completion(
        text.encode("utf-8", "replace").decode(),
        finish_reason if isinstance(finish_reason, str) else None,
    )


def _failure(status: int, headers: Mapping[str, str], body: bytes) -> AskAgainError | RefusedError:
    said = _brief(body[:800].decode(errors="replace"))
    what = f"HTTP {status} {responses.get(status, '')}".rstrip()
    what = f"{what}: {said}".removesuffix(": ")
    if status < 500 and status not in _TRY_LATER:
        return RefusedError(what, status)
    return AskAgainError(what, _retry_after(headers.get("retry-after", "")))


@functools.cache
def _certificates() -> "ssl.SSLContext":
    """Return the trusted certificates, read once: that takes as long as twenty requests."""
    import httpx2

    return httpx2.create_ssl_context()


def _brief(text: str) -> str:
    """Return the beginning of a server's text, on one line without control characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[:200])
    return " ".join(shown.split())


def _retry_after(header: str) -> float:
    """Return the seconds that a `Retry-After` header asks for, as a number or a time; else 0."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(header))
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    return 0.0
