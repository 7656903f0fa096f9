"""The endpoint as a Starlette application; an `Endpoint` provides the models.

When a client disconnects, its request is cancelled, also in the engine. A stream begins with the
first token if the model reports progress, and with complete answers otherwise or if log
probabilities are requested.
"""

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Generic, TypeAlias

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from es_cookbook.common.errors import ESCookbookError, RequestError, leaves
from es_cookbook.plugins.endpoint.aside import aside
from es_cookbook.plugins.endpoint.endpoint import Endpoint, check_name
from es_cookbook.plugins.endpoint.limits import check_asked, check_body
from es_cookbook.plugins.endpoint.replies import Piece, Reply, as_text, event
from es_cookbook.plugins.endpoint.requests import (
    Json,
    RefusedRequest,
    chat_request,
    read_body,
    text_request,
)
from es_cookbook.plugins.endpoint.responses import (
    response,
    response_events,
    response_request,
)
from es_cookbook.plugins.endpoint.server import HEAD_SECONDS, serve_at
from es_cookbook.plugins.endpoint.work import Asked, Told, Work
from es_cookbook.rl.messages.reading import FieldError

MOST_BYTES = 8 << 20
"""Of a request's body."""
_BODY_SECONDS, _PART_SECONDS = 60.0, HEAD_SECONDS
"""For a body, and for the next part of it."""
_DISCARD_SECONDS = 2.0
"""For the rest of a body that is not read; closed at once, its client would not see the reply."""
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_MakesEvents: TypeAlias = Callable[[Reply, Asked, AsyncIterator[Piece]], AsyncIterator[bytes]]


def application(endpoint: Endpoint) -> Starlette:
    """OpenAI's API over an endpoint."""

    async def models(request: Request) -> Response:
        found = [_described(name) for name in endpoint.names(_opened(request, endpoint))]
        return JSONResponse({"object": "list", "data": found})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        check_name(name, endpoint.names(_opened(request, endpoint)))
        return JSONResponse(_described(name))

    async def answered(
        read: Callable[[Json], Asked],
        whole: Callable[[Reply, Asked], object],
        events: _MakesEvents[Asked],
        request: Request,
    ) -> Response:
        key = _opened(request, endpoint)
        asked, size = await _read(request, read)
        speaker = await endpoint.speaker(key, asked.model)
        with contextlib.ExitStack() as admitted:
            admitted.enter_context(speaker.admit(asked.answers))
            check_asked(asked)
            work = Work(speaker, asked, size)
            if asked.stream and speaker.tells and not asked.draw.logprobs:
                await work.begin()
                return _Admitted(_Streamed(work, events), admitted.pop_all())
            await _unless_gone(request, work.answer)
            if asked.stream:
                found = _Events(events(work.reply, asked, work.reply.pieces()))
            else:
                size = work.reply.size(asked)
                text = await aside(size, lambda: as_text(whole(work.reply, asked)))
                found = Response(text, media_type="application/json")
            return _Admitted(found, admitted.pop_all())

    async def nothing(request: Request, _: Exception) -> Response:
        path = request.scope["path"]  # A strange `Host` breaks `url`.
        listed = ", ".join(paths)
        said = f"there is no {request.method[:20]} {path[:80]}; there are {listed}"
        return await _refused(request, RefusedRequest(said, status=404))

    handlers = {
        "/v1/models": ("GET", models),
        "/v1/models/{name:path}": ("GET", model),
        "/v1/chat/completions": (
            "POST",
            partial(answered, chat_request, Reply.chat, Reply.chat_events),
        ),
        "/v1/responses": (
            "POST",
            partial(answered, response_request, response, response_events),
        ),
        "/v1/completions": (
            "POST",
            partial(answered, text_request, Reply.text, Reply.text_events),
        ),
    }
    paths = [path for path in handlers if "{" not in path]
    routes = [
        Route(path, _told(handler), methods=[method])
        for path, (method, handler) in handlers.items()
    ]
    found = Starlette(routes=routes, exception_handlers={404: nothing, 405: nothing})
    found.router.redirect_slashes = False
    return found


def _told(handler: _Handler) -> _Handler:
    """Report errors in OpenAI's form."""

    async def told(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # It is not read.
        except Exception as error:
            return await _refused(request, _refusal(error))

    return told


async def _refused(request: Request, refused: RefusedRequest) -> Response:
    """A refusal; if the body was not read, its rest is discarded and the connection closed."""
    if getattr(request.state, "is_read", False):
        return JSONResponse(refused.body, refused.status)
    if "expect" not in request.headers:  # Such a client sends its body only when it is asked to.
        with anyio.move_on_after(_DISCARD_SECONDS):
            while (await request.receive()).get("more_body", False):
                pass
    return JSONResponse(refused.body, refused.status, {"Connection": "close"})


def _refusal(error: Exception) -> RefusedRequest:
    """An error in the form that the client gets."""
    if isinstance(error, RefusedRequest):
        return error
    if isinstance(error, RequestError):
        return RefusedRequest(str(error))
    if isinstance(error, FieldError):
        return RefusedRequest(str(error), param=error.where)
    if isinstance(error, ESCookbookError):
        return RefusedRequest(str(error), status=500)
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return RefusedRequest("the server failed; its log says how", status=500)


def _opened(request: Request, endpoint: Endpoint) -> str:
    """The key, which is checked before the body is read."""
    found = request.headers.getlist("authorization")
    scheme, _, key = found[0].partition(" ") if len(found) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not key:
        raise RefusedRequest(
            "there is no key: send it as `Authorization: Bearer KEY`"
            if len(found) < 2
            else "there are several Authorization headers; send one, with `Bearer KEY`",
            status=401,
            code="invalid_api_key",
        )
    endpoint.check(key)
    return key


async def _body(request: Request) -> bytes:
    """Raises RefusedRequest if it is too large or too slow, of which no more is read."""
    body = bytearray()
    try:
        with anyio.fail_after(_BODY_SECONDS):
            more = True
            while more:
                with anyio.fail_after(_PART_SECONDS):
                    message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MOST_BYTES:
                    raise RefusedRequest(
                        f"the body of the request is larger than {MOST_BYTES >> 20} MiB", status=413
                    )
    except TimeoutError:
        raise RefusedRequest("the body of the request did not end in time", status=408) from None
    request.state.is_read = True
    return bytes(body)


async def _read(request: Request, read: Callable[[Json], Asked]) -> tuple[Asked, int]:
    """The request, and the size of its body in bytes."""
    body = await _body(request)
    check_body(body)
    asked = await aside(len(body), lambda: read(read_body(body)))
    return asked, len(body)


async def _unless_gone(request: Request, answer: Callable[[], Awaitable[None]]) -> None:
    """Cancel `answer` when the client disconnects.

    Raises:
        ClientDisconnect: It has.
    """
    ended: list[Exception | None] = []

    async def run() -> None:
        try:
            await answer()
            ended.append(None)
        except Exception as error:
            ended.append(_first(error))
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()
    for error in ended or [ClientDisconnect()]:
        if error is not None:
            raise error


def _first(error: Exception) -> Exception:
    """The first error of a group of tasks."""
    return next(each for each in leaves(error) if isinstance(each, Exception))


class _Admitted(Response):
    """A response that ends the request's admission when it was sent or cannot be sent."""

    def __init__(self, response: Response, admitted: contextlib.ExitStack) -> None:
        super().__init__()
        self._response, self._admitted = response, admitted

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._admitted:
            await self._response(scope, receive, send)


class _Events(StreamingResponse):
    """Events of a stream, as they come."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)


class _Streamed(Response, Generic[Asked]):
    """A stream that begins before its answers are complete; an error is its last event."""

    def __init__(self, work: Work[Asked], events: _MakesEvents[Asked]) -> None:
        super().__init__()
        self._work, self._events_of = work, events
        self._refused: RefusedRequest | None = None

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = Told()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, told)
            with contextlib.suppress(ClientDisconnect):
                await _Events(self._events(told.pieces()))(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _run(self, told: Told) -> None:
        try:
            await self._work.run(told)
        except Exception as error:
            self._refused = _refusal(_first(error))
        finally:
            told.end()

    async def _events(self, told: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[Piece]:
            async for piece in told:
                yield piece
            if self._refused is not None:
                raise self._refused

        try:
            async for each in self._events_of(self._work.reply, self._work.asked, pieces()):
                yield each
        except RefusedRequest as error:
            yield event({"type": "error", **error.body}, is_named=True)


def _described(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "es-cookbook"}


async def serve(endpoint: Endpoint, bound: socket.socket, *, until_told: bool = True) -> None:
    """Answer at this socket until the process is told to end, or else until cancelled."""
    await serve_at(bound, application(endpoint), until_told=until_told)
