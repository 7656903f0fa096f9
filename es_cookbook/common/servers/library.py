"""huggingface_hub's own requests, within the limits of every other request.

For downloads there is `guard`: gigabytes come in streams. The library makes paths in its cache of
what a server sends (`ETag`, commits, names of files) without a check, waits without end, and reads
without end. With the guard each reply is checked before the library sees it.

For pushes there is `bounded`. The library's client waits without end for a reply, reads and unpacks
what comes, sleeps as long as a server wishes (`Retry-After`), follows redirects anywhere, and sends
the token wherever an answer about large files says. Here it gets a transport that sends each
request by `fetched`: so a reply has a deadline, which begins again with each piece of a file that
is sent, and a size.

Left out: what the Rust below it sends by the protocol Xet, in connections of its own. Only an end
of the process ends that; HF_HUB_DISABLE_XET=1 sends large files through here.
"""

import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

import anyio

from es_cookbook.common.errors import HubError
from es_cookbook.common.servers.http import (
    LONGEST_WAIT,
    NoReplyError,
    Reply,
    fetched,
    retry_after,
)
from es_cookbook.common.servers.hub import endpoint, is_direct, within

SECONDS = 60.0
"""For a reply, after the last piece of its request was sent."""
SLOWEST = 60 << 10
"""Bytes of a download within `SECONDS`."""
MOST_UNSAID = 64 << 20
"""Bytes of a reply of which no size was said, as of a list of files."""
_SIZE = "es_cookbook_size"
"""Where a request, and those to which it is redirected, holds the size that its file has."""
_DIGEST = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+=_:-]{0,199}")
"""Of what the library makes paths in its cache."""
_NO_FILE = 300
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

    def guarded(**more: object) -> _Guarded:
        return _Guarded(lambda: library.Client(**more, **settings), SECONDS)

    set_client_factory(guarded(transport=Transport()))
    try:
        yield
    finally:
        set_client_factory(guarded())


def guard(seconds: float = SECONDS) -> None:
    """From now on, in this process, refuse replies that would leave the cache or never end.

    The library's requests raise `HubError` then. Of a reply at least `SLOWEST` bytes have to come
    in so many seconds, without those in which nobody asks for more.
    """
    from huggingface_hub import get_session, set_client_factory

    module: Any = sys.modules[get_session.__module__]
    make = module._GLOBAL_CLIENT_FACTORY  # It may be the user's own, with a proxy.
    if not isinstance(make, _Guarded):
        set_client_factory(_Guarded(make, seconds))


class _Guarded:
    """Makes clients as another does, whose replies are checked."""

    def __init__(self, make: Callable[[], Any], seconds: float) -> None:
        self._make = make
        self._seconds = seconds
        self._sizes: dict[str, int] = {}  # Of files, by the addresses that were said for them.

    def __call__(self) -> Any:  # noqa: ANN401
        client = self._make()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [self._limit, *hooks.get("response", [])]}
        send = client.send

        def send_checked(request: Any, *, stream: bool = False, **settings: Any) -> Any:  # noqa: ANN401
            request.headers["Accept-Encoding"] = "identity"
            request.extensions[_SIZE] = self._sizes.get(str(request.url))
            if request.method not in ("GET", "HEAD"):
                return send(request, stream=stream, **settings)
            waits = request.extensions.get("timeout", {})
            limits = {kind: wait or self._seconds for kind, wait in waits.items()}
            request.extensions["timeout"] = limits
            library: Any = sys.modules[type(request).__module__.partition(".")[0]]
            try:  # Headers may drip too, which no setting of the client limits.
                reply = within(self._seconds, lambda: send(request, stream=True, **settings))
            except (TimeoutError, library.TimeoutException) as error:
                raise HubError(f"{endpoint()} {error}") from None
            if not stream:
                reply.read()
            if request.method == "HEAD":  # The library asks so for the names of a file.
                self._keep_size(reply)
            # What is read as a stream or in ranges is a file, and all else may be a list of files.
            elif not stream and "range" not in request.headers:
                with contextlib.suppress(ValueError, RecursionError):  # The library tells of these.
                    _check_listed(reply.json())
            return reply

        client.send = send_checked
        return client

    def _limit(self, reply: Any) -> None:  # noqa: ANN401
        """Check each reply's headers, and limit what is read of it."""
        request, headers = reply.request, reply.headers
        if request.method == "HEAD":
            # Of a redirect or an error it is about a text: no digest, and often not used.
            if reply.status_code >= _NO_FILE and not _is_digest(headers.get("ETag", "0")):
                del headers["ETag"]
            used = "X-Linked-Etag" if "X-Linked-Etag" in headers else "ETag"
            for name in (used, "X-Repo-Commit", "X-Xet-Hash"):
                _check_digest(name, headers.get(name))
        elif (encoding := headers.get("content-encoding", "identity")) != "identity":
            raise HubError(
                f"{endpoint()} sent a reply compressed by {encoding!r:.20}, which was not asked for"
            )
        most = request.extensions.get(_SIZE)
        if most is None and "content-length" not in headers:
            most = MOST_UNSAID
        reply.stream = _stream(reply.stream, self._seconds, most)

    def _keep_size(self, reply: Any) -> None:  # noqa: ANN401
        size = reply.headers.get("x-linked-size")
        if size is None and reply.status_code not in _REDIRECTS:
            size = reply.headers.get("content-length")
        if size is not None and re.fullmatch("[0-9]{1,18}", size):
            url = str(reply.request.url)
            for address in (url, urljoin(url, reply.headers.get("location", ""))):
                self._sizes[address] = int(size)


def _is_digest(text: str) -> bool:
    """Whether it is one, as the library takes an ETag apart."""
    return _DIGEST.fullmatch(text.lstrip("W/").strip('"')) is not None


def _check_digest(what: str, text: object) -> None:
    if isinstance(text, str) and not _is_digest(text):
        raise HubError(f"{endpoint()} sent the {what} {text[:80]!r}, which is no digest of a file")


def _check_listed(listed: object) -> None:
    """Check what names a repository's files and commits, in a reply that lists them."""
    if isinstance(listed, dict):
        about = cast("dict[str, object]", listed)
        _check_digest("commit", about.get("sha"))
        entries = about.get("siblings")
    else:
        entries = listed
    for entry in cast("list[object]", entries) if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            _check_entry(cast("dict[str, object]", entry))


def _check_entry(entry: dict[str, object]) -> None:
    for key in ("rfilename", "path"):
        name = entry.get(key)
        if isinstance(name, str) and (
            name.startswith("/") or ".." in re.split(r"[/\\]", name) or "\0" in name
        ):
            raise HubError(
                f"{endpoint()} lists the file {name[:80]!r}, which would lie outside of its "
                "repository"
            )
    large = entry.get("lfs")
    if isinstance(large, dict):
        for key in ("oid", "sha256"):
            _check_digest("digest", cast("dict[str, object]", large).get(key))


def _stream(stream: Any, seconds: float, most: int | None) -> Any:  # noqa: ANN401
    library: Any = sys.modules[type(stream).__module__.partition(".")[0]]

    class Stream(library.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return _pieces(stream, seconds, most)

        def close(self) -> None:
            stream.close()

    return Stream()


def _pieces(stream: Iterable[bytes], seconds: float, most: int | None) -> Iterator[bytes]:
    """The same pieces, as long as they come fast enough and are no more than that."""
    received, recently, waited = 0, 0, 0.0
    pieces = iter(stream)
    while True:
        began = time.monotonic()
        piece = next(pieces, None)
        if piece is None:
            return
        waited += time.monotonic() - began
        received += len(piece)
        recently += len(piece)
        if most is not None and received > most:
            raise HubError(
                f"{endpoint()} sent more than {most} bytes, all that this reply may have"
            )
        if waited > seconds:
            if recently < SLOWEST:
                raise HubError(f"{endpoint()} sent only {recently} bytes in {waited:.0f} s")
            recently, waited = 0, 0.0
        yield piece


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
