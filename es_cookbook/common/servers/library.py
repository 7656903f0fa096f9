"""huggingface_hub's own requests, within the limits of every other request.

The library's client waits without end for a reply, reads and unpacks what comes, sleeps as long as
a server wishes (`Retry-After`), follows redirects anywhere, and sends the token wherever an answer
about large files says. Here it gets a transport that sends each request by `fetched`: so a reply
has a deadline, which begins again with each piece of a file that is sent, and a size.

Left out: what the Rust below it sends by the protocol Xet, in connections of its own. Only an end
of the process ends that; HF_HUB_DISABLE_XET=1 sends large files through here.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Generator
from typing import Any
from urllib.parse import urljoin, urlsplit

import anyio

from es_cookbook.common.servers.chat import LONGEST_WAIT, retry_after
from es_cookbook.common.servers.http import NoReplyError, Reply, fetched
from es_cookbook.common.servers.hub import endpoint, is_direct, within

SECONDS = 60.0
"""For a reply, after the last piece of its request was sent."""
_REDIRECTS = (301, 302, 303, 307, 308)
_OF_THE_CONNECTION = ("transfer-encoding", "connection", "accept-encoding")
_WAITS = ("retry-after", "ratelimit", "ratelimit-policy")


@contextlib.contextmanager
def bounded(seconds: float = SECONDS) -> Generator[None]:
    """Meanwhile the library asks within these limits; afterwards as it does by itself.

    Its requests raise `NoReplyError` for what a repetition would not change.
    """
    from huggingface_hub import get_session, set_client_factory

    session: Any = get_session()
    library: Any = sys.modules[type(session).__module__.partition(".")[0]]  # httpx or httpx2
    settings = {
        "event_hooks": {"request": session.event_hooks["request"]},
        "follow_redirects": True,
        "timeout": None,
    }

    class Transport(library.BaseTransport):
        def handle_request(self, request: Any) -> Any:  # noqa: ANN401
            _check_token(request)
            try:
                reply = _reply(request, seconds)
            except (NoReplyError, TimeoutError) as error:  # The library tries these again.
                raise library.NetworkError(str(error)) from NoReplyError(str(error))
            _check(reply, str(request.url))
            if wait := retry_after(reply.headers.get("retry-after", "")):
                reply_headers = [("Retry-After", str(int(min(wait, LONGEST_WAIT))))]
            else:
                reply_headers = []
            reply_headers += [
                (name, value) for name, value in reply.headers.items() if name not in _WAITS
            ]
            return library.Response(
                reply.status_code, headers=reply_headers, content=reply.body, request=request
            )

    set_client_factory(lambda: library.Client(transport=Transport(), **settings))
    try:
        yield
    finally:
        set_client_factory(lambda: library.Client(**settings))


def _check_token(request: Any) -> None:  # noqa: ANN401
    url = str(request.url)
    if "authorization" in request.headers and not _is_hub(url):
        raise NoReplyError(f"it wants the token sent to {urlsplit(url).netloc:.80}")


def _reply(request: Any, seconds: float) -> Reply:  # noqa: ANN401
    url, headers = str(request.url), dict(request.headers)
    for name in _OF_THE_CONNECTION:
        headers.pop(name, None)
    if is_direct():  # The event loop's own lookup has no deadline.
        try:
            within(seconds, lambda: socket.getaddrinfo(urlsplit(url).hostname, None))
        except (OSError, UnicodeError) as error:
            raise NoReplyError(f"{type(error).__name__}: {error}") from None
    # In a thread: whoever pushes may have an event loop of its own.
    return within(
        threading.TIMEOUT_MAX,
        lambda: anyio.run(fetched, request.method, url, headers, request.stream, seconds),
    )


def _check(reply: Reply, url: str) -> None:
    if reply.problem:
        raise NoReplyError(reply.problem)
    target = urljoin(url, reply.headers.get("location", ""))
    if reply.status_code in _REDIRECTS and _is_hub(url) and not _is_hub(target):
        raise NoReplyError(f"it sends on to {urlsplit(target).netloc:.80}, which gets no files")


def _is_hub(url: str) -> bool:
    return urlsplit(url)[:2] == urlsplit(endpoint())[:2]
