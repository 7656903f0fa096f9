"""The endpoint as a Starlette application: who answers is another's affair (`Endpoint`).

A request whose client hangs up is cancelled, and what it has asked of an engine with it.
"""

import logging
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typing_extensions import override

from es_cookbook.bridges.endpoint.endpoint import Endpoint, Speaker, check_name
from es_cookbook.bridges.endpoint.replies import Reply
from es_cookbook.bridges.endpoint.requests import (
    ChatRequest,
    Draw,
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
from es_cookbook.bridges.endpoint.translator import Answer, Prompt
from es_cookbook.common.errors import ESCookbookError, RequestError, leaves

MOST_BYTES = 8 << 20
"""Of a request's body."""
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_Asked = TypeVar("_Asked", ChatRequest, TextRequest)


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
        reply_to: Callable[[Endpoint, str, _Asked], Awaitable[Reply]],
        whole: Callable[[Reply, _Asked], object],
        events: Callable[[Reply, _Asked], Iterator[bytes]],
        request: Request,
    ) -> Response:
        key = _key(request)
        asked = read(read_body(await _body(request)))
        reply = await _unless_gone(request, partial(reply_to, endpoint, key, asked))
        if asked.stream:
            return _streamed(events(reply, asked))
        return JSONResponse(whole(reply, asked))

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
            partial(answered, chat_request, _chat, Reply.chat, Reply.chat_events),
        ),
        "/v1/responses": (
            "POST",
            partial(answered, response_request, _chat, response, response_events),
        ),
        "/v1/completions": (
            "POST",
            partial(answered, text_request, _text, Reply.text, Reply.text_events),
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
        except RefusedRequest as error:
            refused = error
        except RequestError as error:
            refused = RefusedRequest(str(error))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except ESCookbookError as error:
            refused = RefusedRequest(str(error), status=500)
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            refused = RefusedRequest("the server failed; its log says how", status=500)
        return JSONResponse(refused.body, refused.status)

    return told


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


async def _unless_gone(request: Request, answer: Callable[[], Awaitable[Reply]]) -> Reply:
    """The reply; cancelled when the client hangs up.

    Raises:
        ClientDisconnect: It has.
    """
    found: list[Reply] = []
    failed: list[Exception] = []

    async def run() -> None:
        try:
            found.append(await answer())
        except Exception as error:
            failed.append(next(each for each in leaves(error) if isinstance(each, Exception)))
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()
    if failed:
        raise failed[0]
    if not found:
        raise ClientDisconnect
    return found[0]


async def _chat(endpoint: Endpoint, key: str, asked: ChatRequest) -> Reply:
    speaker = await endpoint.speaker(key, asked.model)
    prompt = speaker.translator.of_chat(asked, speaker.kept)
    answers = await _answers(speaker, [prompt], asked.draw, asked.one_call)
    speaker.answered(prompt, asked.messages, answers)
    return Reply(asked.model, [prompt], answers, speaker.translator.tokenizer)


async def _text(endpoint: Endpoint, key: str, asked: TextRequest) -> Reply:
    speaker = await endpoint.speaker(key, asked.model)
    prompts = [speaker.translator.of_text(each) for each in asked.prompts]
    answers = await _answers(speaker, prompts, asked.draw)
    return Reply(asked.model, prompts, answers, speaker.translator.tokenizer)


async def _answers(
    speaker: Speaker, prompts: Sequence[Prompt], draw: Draw, one_call: bool = False
) -> list[Answer]:
    """`draw.n` to each prompt, which run together."""
    asked = [
        (prompt, speaker.translator.observation(prompt, draw))
        for prompt in prompts
        for _ in range(draw.n)
    ]
    answers: dict[int, Answer] = {}

    async def one(number: int) -> None:
        prompt, observation = asked[number]
        action = await speaker.sample(observation, draw, number)
        answers[number] = speaker.translator.answer(prompt, draw, action, one_call)

    async with anyio.create_task_group() as tasks:
        for number in range(len(asked)):
            tasks.start_soon(one, number)
    return [answers[number] for number in range(len(asked))]


def _described(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "es-cookbook"}


def _streamed(events: Iterator[bytes]) -> Response:
    async def pieces() -> AsyncIterator[bytes]:  # a plain iterator would run in threads
        for event in events:
            yield event

    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(pieces(), media_type="text/event-stream", headers=headers)


class _WithoutSignals(uvicorn.Server):
    """One that leaves the process's signals to others."""

    @override
    @contextmanager
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
