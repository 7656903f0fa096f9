"""The endpoint that programs ask: one server for all rollouts, and a key for each of them.

A request of a program is an observation of its rollout, and the response is the action. So a call
waits in its rollout's queue until the Env takes it, and is answered by what the sampler sampled.

A rollout may ask for a limited number of answers, whether it waits for them or not. A request for
more is refused before any work is done for it, and ends the rollout once earlier ones are answered.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import socket
from collections.abc import Generator, Sequence
from typing import Literal, TypeAlias

from anyio.lowlevel import RunVar
from typing_extensions import override

from es_cookbook.engines.base import Progress
from es_cookbook.plugins.endpoint.app import serve
from es_cookbook.plugins.endpoint.endpoint import Endpoint, ServedModel, wrong_key
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.requests import Draw, RefusedRequest
from es_cookbook.plugins.endpoint.translator import Answer, Prompt, Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.types import Action, Observation


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One answer that a program waits for.

    Attributes:
        number: index among the answers that one request asks for.
        answer: set by the Env; cancelled if the program disconnects.
    """

    observation: Observation
    draw: Draw
    number: int
    answer: asyncio.Future[Action]


End: TypeAlias = Literal["program", "turn_limit"]
"""Why there are no more calls: the program has ended, or asked for more answers than it may."""
_ASKED_TOO_OFTEN = -1
"""Answers left after a request for too many."""


class Calls(ServedModel):
    """The model as the program of one rollout sees it: a queue of calls.

    Args:
        translator: translator for the model's tokenizer.
        max_turns: maximum number of answers.

    Attributes:
        key: opens this rollout.
        num_tool_calls: number of tool calls in the answers so far.
    """

    def __init__(self, translator: Translator, max_turns: int) -> None:
        self.translator, self.kept, self.pending = translator, KeptTurns(), PendingAnswers()
        self.key = secrets.token_urlsafe(24)
        self.num_tool_calls = 0
        self._most = self._left = max_turns
        self._num_requests = 0
        self._is_closed = False
        self._queue: asyncio.Queue[Call | End] = asyncio.Queue()
        self._waiting: set[Call] = set()

    @override
    @contextlib.contextmanager
    def admit(self, answers: int) -> Generator[None]:
        if self._is_closed:
            raise _rollout_is_over()
        if answers > self._left:
            self._left = _ASKED_TOO_OFTEN
            self._end_after_requests()
            raise RefusedRequest(
                f"the rollout has asked for more than {self._most} answers, and is about to end",
                status=429,
                code="turn_limit",
            )
        self._left -= answers
        self._num_requests += 1
        try:
            with super().admit(answers):
                yield
        finally:
            self._num_requests -= 1
            self._end_after_requests()

    def _end_after_requests(self) -> None:
        """End once earlier requests are answered, if the program has asked for too much."""
        if self._left == _ASKED_TOO_OFTEN and not self._num_requests:
            self._queue.put_nowait("turn_limit")

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        if self._is_closed:
            raise _rollout_is_over()
        call = Call(observation, draw, number, asyncio.get_running_loop().create_future())
        self._waiting.add(call)
        self._queue.put_nowait(call)
        try:
            return await call.answer
        finally:
            self._waiting.discard(call)

    @override
    def answered(self, prompt: Prompt, chat: Sequence[Message], answers: Sequence[Answer]) -> None:
        super().answered(prompt, chat, answers)
        self.num_tool_calls += sum(len(answer.calls) for answer in answers)

    async def next(self) -> Call | End:
        """Wait for the next call that is still pending, or for the reason why there is none."""
        while isinstance(found := await self._queue.get(), Call):
            if not found.answer.done():
                return found
        return found

    def program_ended(self) -> None:
        """Record that there will be no more calls."""
        self._queue.put_nowait("program")

    def close(self) -> None:
        """Refuse pending and later calls: the rollout is over."""
        self._is_closed = True
        for call in self._waiting:
            if not call.answer.done():
                call.answer.set_exception(_rollout_is_over())


def _rollout_is_over() -> RefusedRequest:
    return RefusedRequest("the rollout of this key is over", status=401, code="invalid_api_key")


class ProgramEndpoint(Endpoint):
    """The server of an event loop.

    Attributes:
        url: URL for programs outside of sandboxes.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._calls: dict[str, Calls] = {}

    @staticmethod
    def current() -> "ProgramEndpoint":
        """Return the endpoint of this event loop, which serves it until it ends."""
        try:
            return _endpoints.get()
        except LookupError:
            bound = socket.create_server(("127.0.0.1", 0))
            endpoint = ProgramEndpoint(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
            _endpoints.set(endpoint)
            _serving.set(asyncio.create_task(_serve(endpoint, bound)))
            return endpoint

    @contextlib.contextmanager
    def open(self, calls: Calls) -> Generator[None]:
        """Register the rollout's key for a block."""
        self._calls[calls.key] = calls
        try:
            yield
        finally:
            del self._calls[calls.key]
            calls.close()

    @override
    def check(self, key: str) -> None:
        if key not in self._calls:
            raise wrong_key()

    @override
    def names(self, key: str) -> Sequence[str]:
        return ["policy"]  # Programs may use any other name.

    @override
    def model(self, key: str, name: str) -> ServedModel:
        self.check(key)  # The rollout may have ended while the body was read.
        return self._calls[key]


_endpoints: RunVar[ProgramEndpoint] = RunVar("endpoint of programs")
_serving: RunVar[asyncio.Task[None]] = RunVar("task that serves it")


async def _serve(endpoint: ProgramEndpoint, bound: socket.socket) -> None:
    with bound:
        await serve(endpoint, bound, until_signal=False)
