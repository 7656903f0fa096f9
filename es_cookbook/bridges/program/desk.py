"""Where programs reach the rollouts that they are: one server, a key for each rollout.

A request of a program is an observation of its rollout, and the response is the action. So a call
waits in its rollout's queue until the Env has it, and is answered by what the sampler sampled.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import socket
from collections.abc import Generator, Sequence

from anyio.lowlevel import RunVar
from typing_extensions import override

from es_cookbook.bridges.endpoint.app import serve
from es_cookbook.bridges.endpoint.endpoint import Endpoint, Speaker, wrong_key
from es_cookbook.bridges.endpoint.limits import UnderWay
from es_cookbook.bridges.endpoint.requests import Draw, RefusedRequest
from es_cookbook.bridges.endpoint.translator import Answer, Prompt, Translator
from es_cookbook.engines.base import Progress
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


class Calls(Speaker):
    """What one rollout's program asks.

    Attributes:
        key: of the rollout.
        chat: the last one that was answered, the answer included.
        num_tool_calls: in the answers up to now.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator, self.kept, self.under_way = translator, KeptTurns(), UnderWay()
        self.key = secrets.token_urlsafe(24)
        self.chat: Sequence[Message] = ()
        self.num_tool_calls = 0
        self._queue: asyncio.Queue[Call | None] = asyncio.Queue()
        self._waiting: set[Call] = set()

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
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

    async def next(self) -> Call | None:
        """The call that came first and is still waited for; None once the program has ended."""
        while (call := await self._queue.get()) is not None:
            if not call.answer.done():
                return call
        return None

    def program_ended(self) -> None:
        """There will be no more calls."""
        self._queue.put_nowait(None)

    def close(self) -> None:
        """Refuse what is still waited for: the rollout is over."""
        for call in self._waiting:
            if not call.answer.done():
                over = "the rollout of this key is over"
                call.answer.set_exception(RefusedRequest(over, status=401, code="invalid_api_key"))


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
