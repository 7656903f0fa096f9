"""One question to the Hugging Face Hub, answered or given up within seconds.

Libraries that need a file of the Hub ask again and again when it does not answer, for half a minute
and more, with a warning each time. Who needs something of the Hub asks here first, once. Either
there is an answer, and then a library may begin its work, or there is a reason in one sentence.

A thread asks, because a lookup of the host's name has no time-out and a connection has one for each
address of the host. If it hangs, it is left behind and ends with the process.

The endpoint (HF_ENDPOINT), the token (HF_TOKEN, or that of `hf auth login`) and HF_HUB_OFFLINE are
huggingface_hub's own settings.
"""

import os
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

from es_cookbook.common.errors import HubError

_Result = TypeVar("_Result")

OFFLINE = "HF_HUB_OFFLINE"
TOKEN = "HF_TOKEN"
"""Name of the environment variable that holds the token."""
SECONDS = 3.0
"""How long an answer may take; the user's own setting for that, if there is one, comes first."""
_SETTING = "HF_HUB_ETAG_TIMEOUT"
_TOO_MANY, _TIMED_OUT, _SERVER_ERROR = 429, 408, 500


def repository_files(kind: Literal["model", "dataset"], name: str) -> list[str]:
    """The names of all files of a repository.

    Raises:
        HubError: There is no answer in time, no such repository, or no access to it; says which.
    """
    from huggingface_hub import HfApi

    check_online()
    seconds = _seconds()

    def ask() -> list[str]:
        api = HfApi()
        info = api.model_info if kind == "model" else api.dataset_info
        # The library's time is for each part of the answer. It ends a thread that was left behind.
        return [file.rfilename for file in info(name, timeout=2 * seconds).siblings or []]

    try:
        return within(seconds, ask)
    # The library raises its own errors, those of HTTP, of sockets and of names that are none.
    except Exception as error:
        raise HubError(f"{endpoint()} {reason(error, f'{kind} {name}')}") from error


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


def within(seconds: float, ask: Callable[[], _Result]) -> _Result:
    """What `ask` returns or raises.

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
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"did not answer within {seconds:g} s")
    return results[0]


def is_refusal(error: Exception) -> bool:
    """Whether the Hub has answered, and would answer the same again."""
    status = _status(error)
    return status is not None and status < _SERVER_ERROR and status not in (_TIMED_OUT, _TOO_MANY)


def reason(error: Exception, what: str) -> str:
    """What the Hub did, to follow its address: the same for the same reason, and no secrets."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    given = "with the token that is set" if get_token() else f"without a token ({TOKEN} is not set)"
    match error:
        case TimeoutError():
            return f"{error} ({_SETTING} in the environment sets how long to wait)"
        case GatedRepoError():
            return f"has terms that an account has to accept for {what}; it was asked {given}"
        case RepositoryNotFoundError():
            return f"knows no {what}, or hides it, because it is private; it was asked {given}"
        case HFValidationError():
            return f"has no {what}: a name there is owner/name in letters, digits, '-', '_' and '.'"
        case _:
            pass
    match _status(error):
        case 401 if get_token():
            return f"does not accept the token that is set ({TOKEN}, or by `hf auth login`)"
        case 401 | 403:
            return f"refuses {what}; it was asked {given}"
        case int() as status:
            return f"answered with status {status}"
        case None:
            first_line = str(error).strip().partition("\n")[0]
            said = f"{type(error).__name__}: {first_line}".removesuffix(": ")
            return f"cannot be reached ({said})"


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _seconds() -> float:
    try:
        return float(os.environ.get(_SETTING, ""))
    except ValueError:
        return SECONDS
