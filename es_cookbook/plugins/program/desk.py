"""Where programs reach the rollouts that they are: one server, a key for each rollout.

A request of a program is an observation of its rollout, and the response is the action. So a call
waits in its rollout's queue until the Env has it, and is answered by what the sampler sampled.

A rollout may ask for so many answers, whether it waits for them or not. A request for more is
refused before anything is made for it, and ends the rollout when what came before it is answered.
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
from es_cookbook.plugins.endpoint.endpoint import Endpoint, Speaker, wrong_key
from es_cookbook.plugins.endpoint.limits import UnderWay
from es_cookbook.plugins.endpoint.requests import Draw, RefusedRequest
from es_cookbook.plugins.endpoint.translator import Answer, Prompt, Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.types import Action, Observation

MODEL = "policy"
"""What programs that ask are told the model is called; they may call it anything."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One answer that a program waits for.

    Attributes:
        number: of those that one request asks for.
        answer: set by the Env; cancelled if the program hangs up.
    """

    observation: Observation
    draw: Draw
    number: int
    answer: asyncio.Future[Action]


_ENOUGH = -1
"""Answers left after a request for too many."""
Over: TypeAlias = Literal["program", "turn_limit"]
"""After which there are no calls: the program's end, or a request for more than it may ask for."""


class Calls(Speaker):
    """What one rollout's program asks.

    Args:
        translator: of the model's tokenizer.
        max_turns: answers that it may ask for.

    Attributes:
        key: of the rollout.
        chat: the last one that was answered, the answer included.
        num_tool_calls: in the answers up to now.
    """

    def __init__(self, translator: Translator, max_turns: int) -> None:
        self.translator, self.kept, self.under_way = translator, KeptTurns(), UnderWay()
        self.key = secrets.token_urlsafe(24)
        self.chat: Sequence[Message] = ()
        self.num_tool_calls = 0
        self._most = self._left = max_turns
        self._num_requests = 0
        self._is_closed = False
        self._queue: asyncio.Queue[Call | Over] = asyncio.Queue()
        self._waiting: set[Call] = set()

    @override
    @contextlib.contextmanager
    def admit(self, answers: int) -> Generator[None]:
        if self._is_closed:
            raise _too_late()
        if answers > self._left:
            self._left = _ENOUGH
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
        """Once the program has asked for too much: end when all else that it asks is answered."""
        if self._left == _ENOUGH and not self._num_requests:
            self._queue.put_nowait("turn_limit")

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        if self._is_closed:
            raise _too_late()
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
        self.chat = (*chat, answers[-1].turn)
        self.num_tool_calls += sum(len(answer.calls) for answer in answers)

    async def next(self) -> Call | Over:
        """The call that came first and is still waited for, or why there is none any more."""
        while isinstance(found := await self._queue.get(), Call):
            if not found.answer.done():
                return found
        return found

    def program_ended(self) -> None:
        """There will be no more calls."""
        self._queue.put_nowait("program")

    def close(self) -> None:
        """Refuse what is still waited for, and what comes: the rollout is over."""
        self._is_closed = True
        for call in self._waiting:
            if not call.answer.done():
                call.answer.set_exception(_too_late())


def _too_late() -> RefusedRequest:
    return RefusedRequest("the rollout of this key is over", status=401, code="invalid_api_key")


class Desk(Endpoint):
    """The server of an event loop.

    Attributes:
        url: what programs are given.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._calls: dict[str, Calls] = {}

    @staticmethod
    def of_loop() -> "Desk":
        """The one of this event loop, which it serves until it ends."""
        try:
            return _desks.get()
        except LookupError:
            bound = socket.create_server(("127.0.0.1", 0))
            desk = Desk(f"http://127.0.0.1:{bound.getsockname()[1]}/v1")
            _desks.set(desk)
            _serving.set(asyncio.create_task(_serve(desk, bound)))
            return desk

    @contextlib.contextmanager
    def open(self, calls: Calls) -> Generator[None]:
        """Inside, the rollout's key opens what it asks for, and nothing else."""
        self._calls[calls.key] = calls
        try:
            yield
        finally:
            del self._calls[calls.key]
            calls.close()

    @override
    def check(self, key: str) -> None:
        self._of(key)

    @override
    def names(self, key: str) -> Sequence[str]:
        self._of(key)
        return [MODEL]

    @override
    async def speaker(self, key: str, name: str) -> Speaker:
        return self._of(key)

    def _of(self, key: str) -> Calls:
        if key not in self._calls:
            raise wrong_key()
        return self._calls[key]


_desks: RunVar[Desk] = RunVar("program desk")
_serving: RunVar[asyncio.Task[None]] = RunVar("program desk's task")


async def _serve(desk: Desk, bound: socket.socket) -> None:
    with bound:
        await serve(desk, bound, until_told=False)
