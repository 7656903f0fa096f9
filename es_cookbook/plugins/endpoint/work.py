"""From a request to its reply: prompts first, then all answers concurrently.

Costs are checked in advance (`limits`): no prompt is encoded beyond the context's length, and no
task is started for a request for too many tokens.
"""

import dataclasses
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Generic, TypeVar

import anyio
from typing_extensions import override

from es_cookbook.engines.base import Progress
from es_cookbook.plugins.endpoint.aside import LONG, aside, is_busy
from es_cookbook.plugins.endpoint.endpoint import Speaker
from es_cookbook.plugins.endpoint.limits import check_tokens
from es_cookbook.plugins.endpoint.replies import Piece, Reply
from es_cookbook.plugins.endpoint.requests import ChatRequest, TextRequest
from es_cookbook.plugins.endpoint.translator import Begun, Prompt
from es_cookbook.rl.messages.encoder import Controls
from es_cookbook.rl.types import Action, Observation

Asked = TypeVar("Asked", ChatRequest, TextRequest)
_PIECE = 1 << 16
"""Characters of prompts that are encoded at once, if they are many."""


class Work(Generic[Asked]):
    """A request's prompts and answers.

    Args:
        speaker: the model.
        asked: the request.
        size: bytes of its body.

    Attributes:
        reply: exists after `begin`, and gets its answers from `run`.
    """

    reply: Reply

    def __init__(self, speaker: Speaker, asked: Asked, size: int) -> None:
        if asked.draw.stop is None:
            usual = speaker.chat_stop if isinstance(asked, ChatRequest) else speaker.text_stop
            asked = dataclasses.replace(asked, draw=dataclasses.replace(asked.draw, stop=usual))
        self.speaker, self.asked, self._size = speaker, asked, size
        self._draws: Sequence[tuple[Prompt, Observation]] = ()

    async def begin(self) -> None:
        """Make the prompts.

        Raises:
            RefusedRequest: One is invalid or too long, or they may come to too many tokens.
        """
        asked, translator = self.asked, self.speaker.translator
        prompts: list[Prompt] = []
        if isinstance(asked, ChatRequest):
            size = self._size
            if is_busy() and Controls.of(translator.tokenizer).named_in(repr(asked)):
                size = LONG + 1  # Such texts wait for one another (`encoder.inside`).
            prompts.append(await aside(size, translator.of_chat, asked, self.speaker.kept))
        else:
            size = sum(map(len, asked.prompts))
            for some in _pieces(asked.prompts):
                prompts += await aside(size, list[Prompt], map(translator.of_text, some))
                check_tokens(asked, [len(each.tokens_T) for each in prompts], 0)
        observed = [(each, translator.observation(each, asked.draw)) for each in prompts]
        lengths = [len(each.tokens_T) for each in prompts]
        check_tokens(asked, lengths, translator.context_length)
        self.reply = Reply(asked.model, prompts, translator.tokenizer)
        self._draws = [each for each in observed for _ in range(asked.draw.n)]

    async def answer(self) -> None:
        """Make the prompts, and sample all answers."""
        await self.begin()
        await self.run()

    async def run(self, told: "Told | None" = None) -> None:
        """Sample all answers.

        Args:
            told: receives them as they grow.
        """
        drawn = [self._progress(number, told) for number in range(len(self._draws))]
        async with anyio.create_task_group() as tasks:
            for number, progress in enumerate(drawn):
                tasks.start_soon(self._draw, number, progress, told)
        cached = [each.cached_tokens for each in drawn if each.cached_tokens is not None]
        if len(cached) == len(drawn):  # Of a prompt's answers the first has run it.
            n = self.asked.draw.n
            self.reply.cached = sum(min(cached[at : at + n]) for at in range(0, len(cached), n))
        if isinstance(self.asked, ChatRequest):
            (prompt,) = self.reply.prompts
            self.speaker.answered(prompt, self.asked.messages, self.reply.in_order)

    async def _draw(self, number: int, progress: Progress, told: "Told | None") -> None:
        prompt, observation = self._draws[number]
        draw, translator = self.asked.draw, self.speaker.translator
        if draw.max_tokens == 0:  # Only the prompt is wanted.
            action = Action((), "", "length", ())
        else:
            action = await self.speaker.sample(observation, draw, number, progress)
        one_call = isinstance(self.asked, ChatRequest) and self.asked.one_call
        size = len(action.text) + (len(prompt.tokens_T) if prompt.form else 0)
        answer = await aside(size, translator.answer, prompt, draw, action, one_call)
        if isinstance(self.asked, TextRequest) and self.asked.echo and draw.logprobs:
            tops = await self.speaker.tops(prompt.tokens_T + action.tokens_T)
            answer = dataclasses.replace(answer, tops=tops)
        self.reply.answers[number] = answer
        if told is not None:
            told.tell((number, answer))

    def _progress(self, number: int, told: "Told | None") -> Progress:
        if told is None:
            return Progress()
        begun = Begun(self.speaker.translator.texts, self._draws[number][0], self.asked.draw)
        return _Followed(begun, number, told)


def _pieces(prompts: Sequence[str | tuple[int, ...]]) -> Iterator[Sequence[str | tuple[int, ...]]]:
    """Prompts in groups that are not much longer than `_PIECE`."""
    run: list[str | tuple[int, ...]] = []
    size = 0
    for prompt in prompts:
        run.append(prompt)
        size += len(prompt)
        if size > _PIECE:
            yield run
            run, size = [], 0
    yield run


class _Followed(Progress):
    """Passes on an answer's text while it is sampled."""

    follows = True

    def __init__(self, begun: Begun, number: int, told: "Told") -> None:
        self._begun, self._number, self._told = begun, number, told

    @override
    def sampled(self, tokens_T: Sequence[int]) -> None:
        if new := self._begun.more(tokens_T):
            self._told.tell((self._number, new))


class Told:
    """Pieces of answers that were not sent yet; the client may read slowly."""

    def __init__(self) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[Piece](math.inf)

    def tell(self, piece: Piece) -> None:
        self._send.send_nowait(piece)

    def end(self) -> None:
        """There will be no more."""
        self._send.close()

    async def pieces(self) -> AsyncIterator[Piece]:
        """All of it, as it comes."""
        with self._receive:
            async for piece in self._receive:
                yield piece
