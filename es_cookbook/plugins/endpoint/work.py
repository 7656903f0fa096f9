"""The work of a request: prompts first, then all answers concurrently.

Costs are checked in advance (`limits`): no prompt is encoded beyond the context's length, and no
task is started for a request for too many tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar
from typing_extensions import override

from es_cookbook.engines.base import Progress
from es_cookbook.plugins.endpoint.endpoint import ServedModel
from es_cookbook.plugins.endpoint.limits import check_tokens
from es_cookbook.plugins.endpoint.replies import Piece, Reply
from es_cookbook.plugins.endpoint.requests import ChatRequest, TextRequest
from es_cookbook.plugins.endpoint.translator import Prompt, StreamedText
from es_cookbook.rl.types import Action, Observation

RequestT = TypeVar("RequestT", ChatRequest, TextRequest)
Tell: TypeAlias = Callable[[Piece], None]
"""Takes pieces of answers as they are sampled."""
_LONG = 1 << 14
"""Characters or tokens whose reading or writing may take more than a few milliseconds."""
_limiters: RunVar[anyio.CapacityLimiter] = RunVar("long work of requests")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def in_thread_if_long(size: int, function: Callable[[Unpack[_Ts]], _T], *args: *_Ts) -> _T:
    """Call a function, in a thread if it works on many characters or tokens.

    So the event loop can answer others. There is one thread, so that the memory of a piece of work
    is needed once. Short work takes less time than switching to a thread.

    Args:
        size: characters or tokens.
        function: runs to its end even if the caller is cancelled.
        args: the function's arguments.
    """
    if size <= _LONG:
        return function(*args)
    try:
        limiter = _limiters.get()
    except LookupError:
        _limiters.set(limiter := anyio.CapacityLimiter(1))
    return await to_thread.run_sync(function, *args, limiter=limiter)


class Work(Generic[RequestT]):
    """A request's prompts and answers.

    Args:
        model: answers.
        request: the request.
        size: bytes of its body.

    Attributes:
        reply: exists after `begin`, and gets its answers from `run`.
    """

    reply: Reply

    def __init__(self, model: ServedModel, request: RequestT, size: int) -> None:
        if request.draw.stop is None:
            usual = model.chat_stop if isinstance(request, ChatRequest) else model.text_stop
            draw = dataclasses.replace(request.draw, stop=usual)
            request = dataclasses.replace(request, draw=draw)
        self.model, self.request, self._size = model, request, size
        self._draws: Sequence[tuple[Prompt, Observation]] = ()

    async def begin(self) -> None:
        """Make the prompts.

        Raises:
            RefusedRequest: One is invalid or too long, or the request has too many tokens.
        """
        request, translator = self.request, self.model.translator
        if isinstance(request, ChatRequest):
            prompts = [
                await in_thread_if_long(self._size, translator.of_chat, request, self.model.kept)
            ]
        else:
            encoded = map(translator.of_text, request.prompts)
            prompts = await in_thread_if_long(self._size, list[Prompt], encoded)
        lengths = [len(each.tokens_T) for each in prompts]
        check_tokens(request, lengths, translator.context_length)
        observed = [(each, translator.observation(each, request.draw)) for each in prompts]
        self.reply = Reply(request.model, prompts, translator.tokenizer)
        self._draws = [each for each in observed for _ in range(request.draw.n)]

    async def run(self, tell: Tell | None = None) -> None:
        """Sample all answers; `tell` gets them piece by piece, or whole with log-probabilities."""
        cached: list[int | None] = [None] * len(self._draws)
        async with anyio.create_task_group() as tasks:
            for number in range(len(self._draws)):
                tasks.start_soon(self._draw, number, tell, cached)
        known = [each for each in cached if each is not None]
        if len(known) == len(cached):  # The first answer to a prompt has run it.
            n = self.request.draw.n
            self.reply.cached = sum(min(known[at : at + n]) for at in range(0, len(known), n))
        if isinstance(self.request, ChatRequest):
            (prompt,) = self.reply.prompts
            self.model.answered(prompt, self.request.messages, self.reply.in_order)

    async def _draw(self, number: int, tell: Tell | None, cached: list[int | None]) -> None:
        prompt, observation = self._draws[number]
        draw, translator = self.request.draw, self.model.translator
        text = StreamedText(translator.texts, prompt, draw)
        progress = Progress()
        if tell is not None and not draw.logprobs:
            progress = _Following(text, number, tell)
        if draw.max_tokens == 0:  # Only the prompt is wanted.
            action = Action((), "", "length", ())
        else:
            action = await self.model.sample(observation, draw, number, progress)
        size = len(action.text) + (len(prompt.tokens_T) if prompt.form else 0)
        answer = await in_thread_if_long(size, translator.answer, prompt, draw, action)
        if isinstance(self.request, TextRequest) and self.request.echo and draw.logprobs:
            tops = await self.model.tops(prompt.tokens_T + action.tokens_T)
            answer = dataclasses.replace(answer, tops=tops)
        self.reply.answers[number], cached[number] = answer, progress.cached_tokens
        if tell is not None:
            tell((number, answer.content[text.told :], answer))


class _Following(Progress):
    """Passes on an answer's text while it is sampled."""

    follows = True

    def __init__(self, text: StreamedText, number: int, tell: Tell) -> None:
        self._text, self._number, self._tell = text, number, tell

    @override
    def sampled(self, tokens_T: Sequence[int]) -> None:
        if new := self._text.more(tokens_T):
            self._tell((self._number, new, None))
