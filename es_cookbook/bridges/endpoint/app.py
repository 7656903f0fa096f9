"""The endpoint as a Starlette application: who answers is another's affair (`Endpoint`).

A request whose client hangs up is cancelled, and what it has asked of an engine with it. A stream
begins with the first token where the speaker tells of its progress, or else with whole answers, as
it does where log-probabilities are asked for.
"""

import contextlib
import dataclasses
import logging
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import anyio
import uvicorn
from anyio.streams.memory import MemoryObjectSendStream
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from es_cookbook.bridges.endpoint.endpoint import Endpoint, Speaker, check_name
from es_cookbook.bridges.endpoint.replies import Piece, Reply, event
from es_cookbook.bridges.endpoint.requests import (
    ChatRequest,
    Json,
    RefusedRequest,
    TextRequest,
    chat_request,
    read_body,
    text_request,
)
from es_cookbook.bridges.endpoint.responses import (
    response,
    response_events,
    response_request,
)
from es_cookbook.bridges.endpoint.translator import Begun
from es_cookbook.common.errors import ESCookbookError, RequestError, leaves
from es_cookbook.engines.base import Progress
from es_cookbook.rl.types import Action

MOST_BYTES = 8 << 20
"""Of a request's body."""
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_Asked = TypeVar("_Asked", ChatRequest, TextRequest)
_MakesEvents: TypeAlias = Callable[[Reply, _Asked, AsyncIterator[Piece]], AsyncIterator[bytes]]


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
        read: Callable[[Json], _Asked],
        whole: Callable[[Reply, _Asked], object],
        events: _MakesEvents[_Asked],
        request: Request,
    ) -> Response:
        key = _key(request)
        asked = read(read_body(await _body(request)))
        speaker = await endpoint.speaker(key, asked.model)
        with contextlib.ExitStack() as admitted:
            admitted.enter_context(speaker.admit(asked.answers))
            work = _Work(speaker, asked)
            if asked.stream and speaker.tells and not asked.draw.logprobs:
                return _Admitted(_Streamed(work, events), admitted.pop_all())
            await _unless_gone(request, work.run)
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


class _Work(Generic[_Asked]):
    """A request on its way to its reply.

    Attributes:
        reply: gets its answers from `run`.

    Raises:
        RefusedRequest: A prompt cannot be made, or is too long.
    """

    def __init__(self, speaker: Speaker, asked: _Asked) -> None:
        if asked.draw.stop is None:
            usual = speaker.chat_stop if isinstance(asked, ChatRequest) else speaker.text_stop
            asked = dataclasses.replace(asked, draw=dataclasses.replace(asked.draw, stop=usual))
        self.speaker, self.asked = speaker, asked
        translator = speaker.translator
        if isinstance(asked, ChatRequest):
            prompts = [translator.of_chat(asked, speaker.kept)]
        else:
            prompts = [translator.of_text(each) for each in asked.prompts]
        self.reply = Reply(asked.model, prompts, translator.tokenizer)
        observed = [(each, translator.observation(each, asked.draw)) for each in prompts]
        self._draws = [each for each in observed for _ in range(asked.draw.n)]

    async def run(self, tell: Callable[[Piece], None] | None = None) -> None:
        """Draw all answers, together.

        Args:
            tell: called with what there is of them.
        """
        told = [_Sampled(self, number, tell) for number in range(len(self._draws))]
        async with anyio.create_task_group() as tasks:
            for number, progress in enumerate(told):
                tasks.start_soon(self._draw, number, progress)
        cached = [each.cached_tokens for each in told if each.cached_tokens is not None]
        if len(cached) == len(told):  # Of a prompt's answers the first has run it.
            n = self.asked.draw.n
            self.reply.cached = sum(min(cached[at : at + n]) for at in range(0, len(cached), n))
        if isinstance(self.asked, ChatRequest):
            (prompt,) = self.reply.prompts
            self.speaker.answered(prompt, self.asked.messages, self.reply.in_order)

    async def _draw(self, number: int, progress: "_Sampled") -> None:
        prompt, observation = self._draws[number]
        draw = self.asked.draw
        if draw.max_tokens == 0:  # The prompt alone is wanted back.
            action = Action((), "", "length", ())
        else:
            action = await self.speaker.sample(observation, draw, number, progress)
        one_call = isinstance(self.asked, ChatRequest) and self.asked.one_call
        answer = self.speaker.translator.answer(prompt, draw, action, one_call)
        if isinstance(self.asked, TextRequest) and self.asked.echo and draw.logprobs:
            tops = await self.speaker.tops(prompt.tokens_T + action.tokens_T)
            answer = dataclasses.replace(answer, tops=tops)
        self.reply.answers[number] = answer
        if progress.tell is not None:
            progress.tell((number, answer))

    def begun(self, number: int) -> Begun:
        """What tells of an answer while it is sampled."""
        prompt, _ = self._draws[number]
        return Begun(self.speaker.translator.texts, prompt, self.asked.draw)


class _Sampled(Progress):
    """Tells of an answer's text while it is sampled."""

    def __init__(self, work: _Work[Any], number: int, tell: Callable[[Piece], None] | None) -> None:
        self._begun, self._number, self.tell = work.begun(number), number, tell
        self.follows = tell is not None

    @override
    def sampled(self, tokens_T: Sequence[int]) -> None:
        assert self.tell is not None
        if new := self._begun.more(tokens_T):
            self.tell((self._number, new))


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


class _Streamed(Response, Generic[_Asked]):
    """A stream that begins before its answers are complete; what fails is its last event."""

    def __init__(self, work: _Work[_Asked], events: _MakesEvents[_Asked]) -> None:
        super().__init__()
        self._work, self._events_of = work, events
        self._refused: RefusedRequest | None = None

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell, told = anyio.create_memory_object_stream[Piece](math.inf)
        async with told, anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, tell)
            with contextlib.suppress(ClientDisconnect):
                await _Events(self._events(told))(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _run(self, tell: MemoryObjectSendStream[Piece]) -> None:
        with tell:
            try:
                await self._work.run(tell.send_nowait)
            except Exception as error:
                self._refused = _refusal(_first(error))

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
