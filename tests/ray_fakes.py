"""For the pool's tests: an engine without a model that fails on purpose, and a cluster in here."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import chz
from typing_extensions import override

from es_cookbook.common.errors import EngineError, ModelError, RequestError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.base import (
    Engine,
    EngineBuilder,
    EngineTraits,
    LogprobsRequest,
    SampleRequest,
)
from es_cookbook.engines.ray.actor import EngineActor
from es_cookbook.engines.ray.cluster import ActorLostError, Place
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.rl.types import Action

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder

NEVER = 99
"""A prompt of this token is never answered."""


def digest(*parts: object) -> int:
    """Return a number that is a pure function of the arguments."""
    return derive_seed(0, repr(parts))


class Letters:
    """A tokenizer, as much as a run needs."""

    chat_template = None

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token + 32) for token in tokens)


@chz.chz
class LightEngineBuilder(EngineBuilder):
    """Builds a `LightEngine`."""

    fault: str = chz.field(default="", doc="what goes wrong")
    flag: str = chz.field(default="", doc="a file; the first process to write it has the fault")

    @override
    def tokenizer(self, model_name: str) -> "PreTrainedTokenizerBase":
        return cast("PreTrainedTokenizerBase", Letters())

    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        if self.fault == "model":
            raise ModelError(f"{model_name} has no weights")
        return LightEngine(self.fault, self.flag)


class LightEngine(Engine):
    """Answers with digits that depend on genome, centre, prompt and seed; four genomes fit."""

    def __init__(self, fault: str, flag: str, products: str | None = None) -> None:
        self.traits = EngineTraits(4, 64, "float32", max_terms=8, products=products)
        self.tokenizer = cast("PreTrainedTokenizerBase", Letters())
        self.space = FullRankSpace(shapes={"weight": (2, 2)})
        self.fault = fault
        self.flag = flag
        self.genomes: Sequence[Genome] = ()
        self.steps: list[Step] = []
        self.num_requests = 0
        self.prompt_tokens = 0
        self.drifts_on = False

    def goes_wrong(self, fault: str) -> bool:
        """Return True once per fault over all processes; always if the fault has no flag."""
        if fault != self.fault:
            return False
        try:
            return not self.flag or bool(Path(self.flag).open("x"))
        except FileExistsError:
            return False

    async def load(self, genomes_G: Sequence[Genome]) -> None:
        if self.num_requests:
            raise EngineError(f"cannot load while {self.num_requests} requests are in flight")
        self.genomes = genomes_G

    async def sample(self, request: SampleRequest) -> Action:
        self.num_requests += 1
        try:
            await asyncio.sleep(0.002)
            if self.goes_wrong("crash"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.goes_wrong("fail"):
                failure = EngineError(f"out of memory, {time.monotonic_ns()} bytes are left")
                failure.add_note("what the library said")
                raise failure
            if self.goes_wrong("unforeseen"):
                raise KeyError("a bug")
            if self.goes_wrong("hang") or request.observation.tokens_T == (NEVER,):
                await asyncio.sleep(10_000)
            if len(request.observation.tokens_T) > self.traits.context_length:
                raise RequestError("the prompt is too long")
            self.prompt_tokens += len(request.observation.tokens_T)
            text = str(self.digest(request.target, request.observation, request.seed) % 1000)
            return Action(tuple(ord(c) - 32 for c in text), text, "stop")
        finally:
            self.num_requests -= 1

    def digest(self, target: Any, *question: Any) -> int:
        who = self.genomes[target] if isinstance(target, int) else target
        return digest(who, [] if who == "base" else self.steps, *question)

    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        return [-(self.digest(request.target, t) % 100) / 10 for t in request.continuation_T]

    async def apply(self, step: Step) -> int:
        self.steps.append(step)
        self.drifts_on = self.drifts_on or self.goes_wrong("drifts on")
        if self.drifts_on or self.goes_wrong("drift"):
            self.steps.append(step)
        return digest(self.steps)

    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        self.steps = list(steps)
        if self.drifts_on:
            self.steps.append(self.steps[0])
        return digest(self.steps)

    async def save(self, path: Path) -> None:
        path.mkdir()

    def stats(self) -> Mapping[str, float]:
        return {"prefilled_tokens": self.prompt_tokens, "cached_tokens": 0}

    async def close(self) -> None:
        pass


class NearActor:
    """Stands in for `Actor`: the same calls, in this process, and it dies when it is told to."""

    def __init__(self, cluster: "NearCluster") -> None:
        self.cluster = cluster
        self.inside = EngineActor()
        self.died = asyncio.Event()

    async def call(self, method: str, *arguments: object, timeout: float | None) -> object:
        self.cluster.calls.append(method)
        if self.cluster.dies_in and method == self.cluster.dies_in[0]:
            self.cluster.dies_in.pop(0)
            self.kill()
        call = asyncio.ensure_future(self.inside.call(method, *arguments))
        death = asyncio.ensure_future(self.died.wait())
        try:
            both = {call, death}
            await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self.died.is_set():
                raise ActorLostError("its process died")
            if not call.done():
                raise TimeoutError
            was_done, outcome = pickle.loads(call.result())
        finally:
            call.cancel()
            death.cancel()
        if not was_done:
            raise outcome
        return outcome

    def send(self, method: str, *arguments: object) -> None:
        self.cluster.calls.append(method)
        if not self.died.is_set():
            self.cluster.tasks.append(asyncio.create_task(self.inside.call(method, *arguments)))

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.died.set()


class NearCluster:
    """Stands in for `Cluster`.

    Attributes:
        calls: methods of actors, in order.
        dies_in: the next actor that is asked for the first of these methods dies.
    """

    is_private, num_cpus, num_gpus = True, 1.0, 0.0

    def __init__(self, dies_in: Sequence[str] = ()) -> None:
        self.calls: list[str] = []
        self.dies_in = list(dies_in)
        self.tasks: list[asyncio.Task[bytes]] = []

    def start(self, place: Any) -> NearActor:
        return NearActor(self)

    async def reserve(self, count: int) -> list[Place]:
        return [(None, index) for index in range(count)]

    def resources(self) -> dict[str, float]:
        return {"CPU": 1}

    def release(self, places: Sequence[Place]) -> None:
        self.calls.append("release")

    async def close(self) -> None:
        pass
