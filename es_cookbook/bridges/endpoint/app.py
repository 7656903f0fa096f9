"""The endpoint as a Starlette application: who answers is another's affair (`Endpoint`).

A request whose client hangs up is cancelled, and what it has asked of an engine with it. A stream
begins with the first token where the speaker tells of its progress, or else with whole answers, as
it does where log-probabilities are asked for.
"""

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from functools import partial
from typing import Generic, TypeAlias

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from es_cookbook.bridges.endpoint.aside import aside
from es_cookbook.bridges.endpoint.endpoint import Endpoint, check_name
from es_cookbook.bridges.endpoint.limits import check_asked, check_body
from es_cookbook.bridges.endpoint.replies import Piece, Reply, event
from es_cookbook.bridges.endpoint.requests import (
    Json,
    RefusedRequest,
    chat_request,
    read_body,
    text_request,
)
from es_cookbook.bridges.endpoint.responses import (
    response,
    response_events,
    response_request,
)
from es_cookbook.bridges.endpoint.work import Asked, Told, Work
from es_cookbook.common.errors import ESCookbookError, RequestError, leaves

MOST_BYTES = 8 << 20
"""Of a request's body."""
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_MakesEvents: TypeAlias = Callable[[Reply, Asked, AsyncIterator[Piece]], AsyncIterator[bytes]]


def application(endpoint: Endpoint) -> Starlette:
    """OpenAI's API over an endpoint."""

    async def models(request: Request) -> Response:
        found = [_described(name) for name in endpoint.names(_key(request))]
        return JSONResponse({"object": "list", "data": found})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        check_name(name, endpoint.names(_key(request)))
        return JSONResponse(_described(name))

    async def answered(
        read: Callable[[Json], Asked],
        whole: Callable[[Reply, Asked], object],
        events: _MakesEvents[Asked],
        request: Request,
    ) -> Response:
        key = _key(request)
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
                found = JSONResponse(whole(work.reply, asked))
            return _Admitted(found, admitted.pop_all())

    async def nothing(request: Request) -> Response:
        path = request.url.path
        raise RefusedRequest(
            f"there is no {request.method} {path[:80]}; there are {', '.join(paths)}", status=404
        )

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
    every = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[*routes, Route("/{rest:path}", _told(nothing), methods=every)])


def _told(handler: _Handler) -> _Handler:
    """What goes wrong is told in OpenAI's form."""

    async def told(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            refused = _refusal(error)
            return JSONResponse(refused.body, refused.status)

    return told


def _refusal(error: Exception) -> RefusedRequest:
    """An error as the client is told it."""
    if isinstance(error, RefusedRequest):
        return error
    if isinstance(error, RequestError):
        return RefusedRequest(str(error))
    if isinstance(error, ESCookbookError):
        return RefusedRequest(str(error), status=500)
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return RefusedRequest("the server failed; its log says how", status=500)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise RefusedRequest(
            "there is no key: send it as `Authorization: Bearer KEY`",
            status=401,
            code="invalid_api_key",
        )
    return key


async def _body(request: Request) -> bytes:
    """Raises RefusedRequest if it is too large, of which no more is read."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise RefusedRequest(
                f"the body of the request is larger than {MOST_BYTES >> 20} MiB", status=413
            )
    return bytes(body)


async def _read(request: Request, read: Callable[[Json], Asked]) -> tuple[Asked, int]:
    """What is asked, and the bytes that it took."""
    body = await _body(request)
    check_body(body)
    asked = await aside(len(body), lambda: read(read_body(body)))
    return asked, len(body)


async def _unless_gone(request: Request, answer: Callable[[], Awaitable[None]]) -> None:
    """Cancel it when the client hangs up.

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
    """What a group of tasks failed of."""
    return next(each for each in leaves(error) if isinstance(each, Exception))


class _Admitted(Response):
    """A response whose request is over when it has been sent, or can be no more."""

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
    """A stream that begins before its answers are complete; what fails is its last event."""

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


class _WithoutSignals(uvicorn.Server):
    """One that leaves the process's signals to others."""

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(endpoint: Endpoint, bound: socket.socket, *, until_told: bool = True) -> None:
    """Answer at this socket until the process is told to end, or else until cancelled."""
    options = uvicorn.Config(
        application(endpoint), log_level="warning", access_log=False, lifespan="off"
    )
    # asyncio sets it for sockets that were made with the protocol's number, which most are not. A
    # response of two writes waits 40 ms without.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = (uvicorn.Server if until_told else _WithoutSignals)(options)
    try:
        await server.serve([bound])
    finally:  # Cancelled, it leaves the event loop listening at a socket that is closed then.
        for listening in getattr(server, "servers", ()):
            listening.close()
