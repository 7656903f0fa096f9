"""The endpoint as a Starlette application; an `Endpoint` provides the models.

When a client disconnects, its request is cancelled, also in the engine. A stream begins with the
first token if the engine reports progress, and otherwise with complete answers.
"""

import contextlib
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Generic, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from es_cookbook.common.errors import ESCookbookError, RequestError, leaves
from es_cookbook.plugins.endpoint.endpoint import Endpoint, wrong_key
from es_cookbook.plugins.endpoint.replies import Piece, Reply, as_text, event
from es_cookbook.plugins.endpoint.requests import (
    Json,
    RefusedRequest,
    chat_request,
    read_body,
    text_request,
)
from es_cookbook.plugins.endpoint.responses import response, response_events, response_request
from es_cookbook.plugins.endpoint.server import HEAD_SECONDS, serve_at
from es_cookbook.plugins.endpoint.work import RequestT, Work, in_thread_if_long
from es_cookbook.rl.messages.reading import FieldError

MOST_BYTES = 8 << 20
"""Limit on the body of a request."""
_BODY_SECONDS, _PART_SECONDS = 60.0, HEAD_SECONDS
"""Limits on the time for a body, and for its next part."""
_DISCARD_SECONDS = 2.0
"""Time for the unread rest of a body: if closed immediately, the client would not see the
reply."""
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_Events: TypeAlias = Callable[[Reply, RequestT, AsyncIterator[Piece]], AsyncIterator[bytes]]


def application(endpoint: Endpoint) -> Starlette:
    """Return OpenAI's API over an endpoint."""

    async def models(request: Request) -> Response:
        same = {"object": "model", "created": 0, "owned_by": "es-cookbook"}
        found = [{"id": name, **same} for name in endpoint.names(_checked_key(request, endpoint))]
        return JSONResponse({"object": "list", "data": found})

    async def answer(
        read: Callable[[Json], RequestT],
        whole: Callable[[Reply, RequestT], object],
        events: _Events[RequestT],
        request: Request,
    ) -> Response:
        key = _checked_key(request, endpoint)
        body, size = await _read(request, read)
        model = endpoint.model(key, body.model)
        with contextlib.ExitStack() as admitted:
            admitted.enter_context(model.admit(body.answers))
            work = Work(model, body, size)
            await work.begin()
            if body.stream:
                return _Stream(work, events, admitted.pop_all())
            await _until_disconnect(request, work.run)
            size = work.reply.usage["total_tokens"]
            text = await in_thread_if_long(size, lambda: as_text(whole(work.reply, body)))
            return Response(text, media_type="application/json")

    async def not_found(request: Request, _: Exception) -> Response:
        path = request.scope["path"]  # A malformed `Host` breaks `url`.
        said = f"there is no {request.method[:20]} {path[:80]}; there are {', '.join(handlers)}"
        return await _refused(request, RefusedRequest(said, status=404))

    chat = partial(answer, chat_request, Reply.chat, Reply.chat_events)
    text = partial(answer, text_request, Reply.text, Reply.text_events)
    handlers = {
        "/v1/models": ("GET", models),
        "/v1/chat/completions": ("POST", chat),
        "/v1/completions": ("POST", text),
        "/v1/responses": ("POST", partial(answer, response_request, response, response_events)),
    }
    routes = [
        Route(path, _reporting_errors(handler), methods=[method])
        for path, (method, handler) in handlers.items()
    ]
    found = Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})
    found.router.redirect_slashes = False
    return found


def _reporting_errors(handler: _Handler) -> _Handler:
    """Report errors in OpenAI's form."""

    async def reporting(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # No one reads it.
        except Exception as error:
            return await _refused(request, _refusal(error))

    return reporting


async def _refused(request: Request, refused: RefusedRequest) -> Response:
    """Return a refusal; an unread body is discarded, and the connection closed."""
    if getattr(request.state, "is_read", False):
        return JSONResponse(refused.body, refused.status)
    if "expect" not in request.headers:  # Such a client sends its body only when it is asked to.
        with anyio.move_on_after(_DISCARD_SECONDS):
            while (await request.receive()).get("more_body", False):
                pass
    return JSONResponse(refused.body, refused.status, {"Connection": "close"})


def _refusal(error: BaseException) -> RefusedRequest:
    """Return an error in the form that the client gets."""
    error = next(leaves(error))
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


def _checked_key(request: Request, endpoint: Endpoint) -> str:
    """Return the key, which is checked before the body is read."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise wrong_key("there is no key: send it as `Authorization: Bearer KEY`")
    endpoint.check(key)
    return key


async def _read(request: Request, read: Callable[[Json], RequestT]) -> tuple[RequestT, int]:
    """Return the request, and the size of its body in bytes."""
    body = await _body(request)
    return await in_thread_if_long(len(body), lambda: read(read_body(body))), len(body)


async def _body(request: Request) -> bytes:
    """Read the body. Raises RefusedRequest as soon as it is too large or too slow."""
    body, end = bytearray(), anyio.current_time() + _BODY_SECONDS
    try:
        with anyio.fail_after(_PART_SECONDS) as scope:
            async for part in request.stream():
                body += part
                scope.deadline = min(end, anyio.current_time() + _PART_SECONDS)
                if len(body) > MOST_BYTES:
                    raise RefusedRequest(
                        f"the body of the request is larger than {MOST_BYTES >> 20} MiB", status=413
                    )
    except TimeoutError:
        raise RefusedRequest("the body of the request did not end in time", status=408) from None
    request.state.is_read = True
    return bytes(body)


async def _until_disconnect(request: Request, answer: Callable[[], Awaitable[None]]) -> None:
    """Call `answer`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: It has.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await answer()
        tasks.cancel_scope.cancel()
        return
    raise ClientDisconnect


class _Stream(Response, Generic[RequestT]):
    """A stream that begins before its answers are complete; an error is its last event.

    Args:
        work: has begun.
        events: makes events of pieces of answers.
        admitted: resources, closed when the stream ends.
    """

    def __init__(
        self, work: Work[RequestT], events: _Events[RequestT], admitted: contextlib.ExitStack
    ) -> None:
        super().__init__()
        self._work, self._events, self._admitted = work, events, admitted

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without a limit, because the client may read slowly.
        told, pieces = anyio.create_memory_object_stream[Piece | RefusedRequest](math.inf)
        response = StreamingResponse(
            self._body_of(pieces),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
        with self._admitted:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run, told)
                with contextlib.suppress(ClientDisconnect):
                    await response(scope, receive, send)
                tasks.cancel_scope.cancel()

    async def _run(self, told: MemoryObjectSendStream[Piece | RefusedRequest]) -> None:
        def tell(piece: Piece | RefusedRequest) -> None:
            with contextlib.suppress(anyio.BrokenResourceError):  # The client is gone.
                told.send_nowait(piece)

        with told:
            try:
                await self._work.run(tell)
            except Exception as error:
                tell(_refusal(error))

    async def _body_of(
        self, pieces: MemoryObjectReceiveStream[Piece | RefusedRequest]
    ) -> AsyncIterator[bytes]:
        async def until_refused() -> AsyncIterator[Piece]:
            with pieces:
                async for piece in pieces:
                    if isinstance(piece, RefusedRequest):
                        raise piece
                    yield piece

        try:
            async for each in self._events(self._work.reply, self._work.request, until_refused()):
                yield each
        except RefusedRequest as error:
            yield event({"type": "error", **error.body})


async def serve(endpoint: Endpoint, bound: socket.socket, *, until_signal: bool = True) -> None:
    """Answer at this socket until SIGTERM or Ctrl-C, or else until cancelled."""
    await serve_at(bound, application(endpoint), until_signal=until_signal)
