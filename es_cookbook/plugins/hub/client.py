"""Requests to the Hugging Face Hub by `huggingface_hub`, with time-outs and one-sentence errors.

The endpoint (HF_ENDPOINT), the token (HF_TOKEN, or that of `hf auth login`) and HF_HUB_OFFLINE are
settings of `huggingface_hub`.
"""

import contextlib
import functools
from collections.abc import Generator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from es_cookbook.common.errors import ESCookbookError, HubError, with_class

if TYPE_CHECKING:
    import httpx2

TOKEN = "HF_TOKEN"
"""Environment variable with the token."""
FIRST_SECONDS = 10.0
"""Time-out for the first answer of the Hub."""
_SECONDS = 60.0
"""Time-out for each step of a later request: to connect, and for the next bytes."""
_TIMED_OUT, _TOO_MANY, _SERVER_ERROR = 408, 429, 500


@contextlib.contextmanager
def asking(what: str) -> Generator[None]:
    """Turn errors of `huggingface_hub` inside the block into sentences about `what`.

    Raises:
        HubError: The Hub cannot be reached or refuses.
    """
    _limit_requests()
    try:
        yield
    except ESCookbookError:
        raise
    # The library raises its own errors, and those of HTTP, sockets, disks and its Rust parts.
    except Exception as error:
        # A failed upload is a RuntimeError with the reason as its cause.
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        raise HubError(f"{endpoint()} {_reason(cause, what)}") from cause


def endpoint() -> str:
    """Return the address of the Hub, or of the mirror in HF_ENDPOINT."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_refusal(error: HubError) -> bool:
    """Return whether the Hub would refuse again, or HF_HUB_OFFLINE is set."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error.__cause__, OfflineModeIsEnabled):
        return True
    status = _status(error.__cause__)
    return status is not None and status < _SERVER_ERROR and status not in (_TIMED_OUT, _TOO_MANY)


@functools.cache
def _limit_requests() -> None:
    """Set a time-out for the library's requests, and send the token to the Hub only."""
    from huggingface_hub import get_session, set_client_factory

    session = get_session()
    hooks = {"request": [*session.event_hooks["request"], _keep_token]}
    make = functools.partial(
        type(session), event_hooks=hooks, follow_redirects=True, timeout=_SECONDS
    )
    set_client_factory(make)


def _keep_token(request: "httpx2.Request") -> None:
    if urlsplit(str(request.url))[:2] != urlsplit(endpoint())[:2]:
        request.headers.pop("authorization", None)


def _reason(error: BaseException, what: str) -> str:
    """Return the rest of an error's sentence that begins with the Hub's address."""
    from huggingface_hub import errors, get_token

    token = get_token()
    given = f"with the token in {TOKEN}" if token else f"without a token ({TOKEN} is not set)"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "is not contacted, because HF_HUB_OFFLINE is set"
    if isinstance(error, errors.HFValidationError):
        return f"has no {what}: a name there is owner/name in letters, digits, '-', '_' and '.'"
    if isinstance(error, errors.GatedRepoError):
        return f"requires an account to accept terms for {what}; the request was made {given}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"has no {what}, or it is private; the request was made {given}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no such revision of {what}"
    status = _status(error)
    if status == 401:
        return f"does not accept the token that is set ({TOKEN}, or by `hf auth login`)"
    if status == 403:
        return f"refuses {what}: the request was made {given}, which does not give this access"
    if status is not None:
        return f"answered with status {status}"
    reason = with_class(error)
    if token:
        reason = reason.replace(token, "…")
    return f"gave no usable answer ({reason:.300})"


def _status(error: BaseException | None) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
