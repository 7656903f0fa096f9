"""An actor's process: one engine, and a counter where requests go in and answers out.

A call between processes costs a hundred times what a request does, so a call carries many: `submit`
takes a batch and returns at once, `fetch` waits until there is an answer and takes all there are.
Exceptions are sent back too: pickled as themselves, never as a traceback.

This module knows nothing of Ray; the pool makes an actor of the class where it starts one.
"""

import asyncio
import os
import pickle
import platform
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from es_cookbook.common.errors import EngineError, ESCookbookError, with_class
from es_cookbook.engines.base import Engine, EngineBuilder, EngineTraits, SampleRequest
from es_cookbook.engines.wire import (
    Answer,
    Batch,
    Request,
    decode_genomes,
    decode_requests,
    decode_steps,
    encode_answers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder


Built: TypeAlias = tuple[EngineTraits, "PreTrainedTokenizerBase", "SearchSpace"]
"""An engine's constants: its `traits`, `tokenizer` and `space`."""


class EngineActor:
    """One engine in its own process. `call` is the only method that the pool uses."""

    _engine: Engine

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[tuple[int, Answer]] = []
        self._there_are_answers = asyncio.Event()
        self._changing = asyncio.Lock()

    async def call(self, method: str, *arguments: object) -> bytes:
        """Run a method. Returns (True, result) or (False, exception), pickled."""
        run = cast("Callable[..., Awaitable[object]]", getattr(self, method))
        try:
            outcome = (True, await run(*arguments))
        except Exception as error:
            outcome = (False, portable(error))
        return pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)

    async def build(
        self, builder: EngineBuilder, model_name: str, search_space: "SearchSpaceBuilder"
    ) -> tuple[Built, int, str]:
        """Build the engine, and return its constants, the process's id and the machine's name."""
        self._engine = engine = await builder(model_name=model_name, search_space=search_space)
        built = engine.traits, engine.tokenizer, engine.space
        return built, os.getpid(), platform.node()

    async def load(self, genomes: bytes) -> None:
        async with self._alone():
            await self._engine.load(decode_genomes(genomes))

    async def apply(self, step: bytes) -> int:
        (decoded,) = decode_steps(step)
        async with self._alone():
            return await self._engine.apply(decoded)

    async def restore(self, steps: bytes, snapshot: str | None) -> int:
        path = None if snapshot is None else Path(snapshot)
        async with self._alone():
            return await self._engine.restore(decode_steps(steps), path)

    async def save(self, path: str) -> None:
        async with self._alone():
            await self._engine.save(Path(path))

    async def close(self) -> None:
        if hasattr(self, "_engine"):
            await self._engine.close()

    async def submit(self, first: int, *batch: *Batch) -> None:
        """Start on the requests of a batch, numbered from `first` on."""
        for number, request in enumerate(decode_requests(batch), first):
            self._tasks[number] = asyncio.create_task(self._answer(number, request))

    async def cancel(self, numbers: Sequence[int]) -> None:
        """Stop working on those of these requests that are not answered yet."""
        for number in numbers:
            if number in self._tasks:
                self._tasks[number].cancel()

    async def fetch(self) -> tuple[bytes, dict[str, float]]:
        """Wait for answers and take all there are, with what the engine has counted up to now."""
        await self._there_are_answers.wait()
        self._there_are_answers.clear()
        answers, self._answers = self._answers, []
        return encode_answers(answers), dict(self._engine.stats())

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """Wait until earlier changes and all requests that the pool has given up are over."""
        async with self._changing:
            if self._tasks:
                await asyncio.wait(self._tasks.values())
            yield

    async def _answer(self, number: int, request: Request) -> None:
        try:
            if isinstance(request, SampleRequest):
                answer = await self._engine.sample(request)
            else:
                answer = await self._engine.logprobs(request)
        except Exception as error:
            answer = portable(error)
        finally:
            del self._tasks[number]
        self._answers.append((number, answer))
        self._there_are_answers.set()


def portable(error: Exception) -> ESCookbookError:
    """Return an error that can be pickled: our own as they are.

    An unexpected error becomes an `EngineError` with its traceback as a note.
    """
    if isinstance(error, ESCookbookError):
        return error
    unforeseen = EngineError(f"the engine failed: {with_class(error)}")
    unforeseen.add_note("".join(traceback.format_exception(error)))
    return unforeseen
