"""One question to the Hugging Face Hub, answered or given up within seconds.

Libraries that need a file of the Hub ask again and again when it does not answer, for half a minute
and more, with a warning each time. Who needs something of the Hub asks here first, once. Either
there is an answer, and then a library may begin its work, or there is a reason in one sentence.

A thread asks, because a lookup of the host's name has no time-out: if that hangs, the thread is
left behind, and ends with the process. All else has a deadline and a size (`http.py`).

The endpoint (HF_ENDPOINT), the token (HF_TOKEN, or that of `hf auth login`) and HF_HUB_OFFLINE are
huggingface_hub's own settings.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies

import anyio

from es_cookbook.common.errors import HubError
from es_cookbook.common.servers.http import NoReplyError, Reply, bearer, fetched, json_in

_Result = TypeVar("_Result")

OFFLINE = "HF_HUB_OFFLINE"
TOKEN = "HF_TOKEN"
"""Name of the environment variable that holds the token."""
SECONDS = 3.0
"""How long an answer may take; the user's own setting for that, if there is one, comes first."""
_SETTING = "HF_HUB_ETAG_TIMEOUT"
_GRACE = 1.0
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_WRONG_TOKEN = "Invalid credentials in Authorization header"
_TOO_MANY, _TIMED_OUT, _SERVER_ERROR = 429, 408, 500


class _StatusError(Exception):
    """An answer that is none, as huggingface_hub's own errors have it."""

    def __init__(self, response: Reply) -> None:
        self.response = response


def repository_files(name: str) -> list[str]:
    """The names of all files of a model's repository.

    Raises:
        HubError: There is no answer in time, no such repository, or no access to it; says which.
    """
    reply = check_repository("model", name)
    if reply.problem:
        raise HubError(f"{endpoint()} answered with {reply.problem}")
    try:
        return [str(file["rfilename"]) for file in json_in(reply.body).get("siblings") or []]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise HubError(
            f"{endpoint()} answered with what is no list of files: {reply.body[:60]!r}"
        ) from None


def check_repository(kind: Literal["model", "dataset"], name: str) -> Reply:
    """What the Hub says about a repository that can be had.

    Raises:
        HubError: As above.
        ConfigError: The token cannot be in a header.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    check_online()
    seconds = _seconds()
    url = f"{endpoint()}/api/{kind}s/{name}"
    # The library's own headers take a question to the Hub, without limits.
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    headers = bearer(token or "", TOKEN)
    try:
        validate_repo_id(name)
        return within(seconds, lambda: _about(url, headers, seconds), _GRACE)
    # The library raises errors of its own, and the network those of sockets and addresses.
    except Exception as error:
        raise HubError(f"{endpoint()} {reason(error, f'{kind} {name}')}") from error


def _about(url: str, headers: Mapping[str, str], seconds: float) -> Reply:
    # The event loop's own lookup would hold up the program's end.
    if is_direct():
        socket.getaddrinfo(urlsplit(url).hostname, None)

    async def ask() -> Reply:
        with anyio.fail_after(seconds):
            return await _followed(url, headers, seconds, _MOST_REDIRECTS)

    try:
        reply = anyio.run(ask)
    except TimeoutError:
        raise _too_slow(seconds) from None
    if not 200 <= reply.status_code < 300:
        raise _StatusError(reply)
    return reply


async def _followed(url: str, headers: Mapping[str, str], seconds: float, redirects: int) -> Reply:
    """The reply, after redirects on the same server: a repository may have had another name."""
    reply = await fetched("GET", url, headers, None, seconds)
    target = urljoin(url, reply.headers.get("location", ""))
    is_here = urlsplit(target)[:2] == urlsplit(url)[:2]
    if redirects and reply.status_code in _REDIRECTS and is_here:
        return await _followed(target, headers, seconds, redirects - 1)
    return reply


def is_direct() -> bool:
    """Whether servers are asked by this machine, and not by a proxy that looks up their names."""
    return not getproxies().keys() - {"no"}


def _too_slow(seconds: float) -> TimeoutError:
    return TimeoutError(f"did not answer within {seconds:g} s")


def check_online() -> None:
    """Refuse what needs a network where the user has said that there is none.

    Raises:
        HubError: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{endpoint()} is not asked, because {OFFLINE} is set")


def endpoint() -> str:
    """The address of the Hub, or of the mirror in HF_ENDPOINT."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def within(seconds: float, ask: Callable[[], _Result], grace: float = 0.0) -> _Result:
    """What `ask` returns or raises; one with a deadline of its own gets `grace` seconds more.

    Raises:
        TimeoutError: It takes longer than that; it is left to itself then.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(ask())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub question", daemon=True)
    thread.start()
    thread.join(seconds + grace)
    if errors:
        raise errors[0]
    if not results:
        raise _too_slow(seconds)
    return results[0]


def is_refusal(error: Exception) -> bool:
    """Whether the Hub has answered, and would answer the same again."""
    status = _status(error)
    return status is not None and status < _SERVER_ERROR and status not in (_TIMED_OUT, _TOO_MANY)


def reason(error: Exception, what: str) -> str:
    """What the Hub did, to follow its address: the same for the same reason, and no secrets."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError

    given = "with the token that is set" if get_token() else f"without a token ({TOKEN} is not set)"
    match error:
        case TimeoutError():
            return f"{error} ({_SETTING} in the environment sets how long to wait)"
        case HFValidationError():
            return f"has no {what}: a name there is owner/name in letters, digits, '-', '_' and '.'"
        case _:
            pass
    match _status(error), _header(error, "x-error-code"):
        case _, "GatedRepo":
            return f"has terms that an account has to accept for {what}; it was asked {given}"
        case 401, _ if _header(error, "x-error-message") == _WRONG_TOKEN:
            return f"does not accept the token that is set ({TOKEN}, or by `hf auth login`)"
        case (401, _) | (_, "RepoNotFound") | (404, ""):
            return f"knows no {what}, or hides it, because it is private; it was asked {given}"
        case 403, _:
            return f"refuses {what}; it was asked {given}"
        case int() as status, _:
            return f"answered with status {status}"
        case _:
            return f"cannot be reached ({named(error)})"


def named(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    if isinstance(error, NoReplyError):
        return str(error)
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}".removesuffix(": ")


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _header(error: Exception, name: str) -> str:
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", {})
    return headers.get(name, "")


def _seconds() -> float:
    try:
        return float(os.environ.get(_SETTING, ""))
    except ValueError:
        return SECONDS
