"""Chat completions of an OpenAI-compatible server, asked for until there is one.

A server that is slow, overloaded, unreachable or answers with something else is asked again, each
time after twice the wait, or after what it says itself (`Retry-After`). What a repetition would not
change is not repeated.
"""

import json
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from http.client import responses
from typing import Any, NamedTuple, TypeVar, cast

import anyio

from es_cookbook.common.files import parsed
from es_cookbook.plugins.judges.http import (
    LONGEST_WAIT,
    NoReplyError,
    Reply,
    brief,
    posted,
    retry_after,
)

_MOST_VALUES = 2**17
"""JSON values in a reply: a million empty lists would take seconds and much memory."""
_TOO_EARLY = (408, 409, 425, 429)
_T = TypeVar("_T")


class AskAgainError(Exception):
    """What may be better the next time.

    Args:
        why: in a few words.
        wait: seconds that the server asks for.
    """

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


class RefusedError(Exception):
    """What a repetition would not change.

    Args:
        why: in a few words.
        status: of HTTP.
    """

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class Completion(NamedTuple):
    """What the model wrote, and why it stopped: "stop", "length" and so on."""

    text: str
    finish_reason: str | None


async def completion(
    url: str, headers: Mapping[str, str], question: Mapping[str, object], seconds: float
) -> Completion:
    """Ask once.

    Args:
        url: of the server, up to /v1.
        headers: with the key, if it needs one.
        question: the fields of the request.
        seconds: for all of it.

    Raises:
        AskAgainError: There is no usable reply.
        RefusedError: There will be none to this question.
    """
    headers = {"Content-Type": "application/json", **headers}
    body = json.dumps(question).encode()
    try:
        reply = await posted(f"{url.rstrip('/')}/chat/completions", headers, body, seconds)
    except NoReplyError as error:
        raise AskAgainError(str(error)) from None
    if not 200 <= reply.status_code < 300:
        raise _failure(reply)
    return completion_in(reply.body)


async def asked(ask: Callable[[], Awaitable[_T]], attempts: int, backoff: float) -> _T:
    """Ask, so often at most, until there is an answer.

    Raises:
        AskAgainError: The last attempt's.
    """
    for attempt in range(1, attempts):
        try:
            return await ask()
        except AskAgainError as error:
            wait = max(error.wait, backoff * 2.0 ** min(attempt - 1, 100))
        await anyio.sleep(min(wait, LONGEST_WAIT))
    return await ask()


def completion_in(body: bytes) -> Completion:
    """The completion in the body of a reply. What UTF-8 cannot hold becomes "?".

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


def _failure(reply: Reply) -> AskAgainError | RefusedError:
    said = brief(reply.body[:800].decode(errors="replace"))
    status = f"{reply.status_code} {responses.get(reply.status_code, '')}".rstrip()
    what = f"HTTP {status}: {said}".removesuffix(": ")
    if reply.status_code < 500 and reply.status_code not in _TOO_EARLY:
        return RefusedError(what, reply.status_code)
    return AskAgainError(what, retry_after(reply.headers.get("retry-after", "")))
