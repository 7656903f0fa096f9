"""Serve a run over OpenAI's API: its centre, its base, any generation and any genome; or a model.

    python -m es_cookbook serve runs/mine
    python -m es_cookbook serve runs/mine generation=12 port=8001
    python -m es_cookbook serve model_name=Qwen/Qwen2.5-0.5B-Instruct
    curl http://127.0.0.1:8000/v1/models -H 'Authorization: Bearer KEY'

The models of a run are `centre` (after the last generation, or generation=), `base`,
`generation-12` (the centre after 12 generations) and `genome-3` (of that generation). The engine
holds one of them at a time, except for the centre and the base together: a request for another one
waits for earlier requests to finish. A model without a run has its own name.

The run's temperature, top_p and stop are defaults. Requests need a key, which is printed. The run
directory is only read.
"""

import dataclasses
import gc
import hmac
import os
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import anyio
import chz
from typing_extensions import override

from es_cookbook.cli.evaluate.measuring import opened, subject_of
from es_cookbook.cli.options import RunOrModel
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, importing
from es_cookbook.common.names import Names
from es_cookbook.engines.base import (
    ENGINE_NAMES,
    Engine,
    EngineBuilder,
    Host,
    LogprobsRequest,
    Progress,
    SampleRequest,
    Target,
    Top,
)
from es_cookbook.plugins.endpoint.endpoint import Endpoint, ServedModel, check_name, wrong_key
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.requests import Draw
from es_cookbook.plugins.endpoint.translator import Translator
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.types import Action, Observation, SamplingParams
from es_cookbook.runs.recorded import RebuiltRun

_BASE = "base"


@chz.chz
class ServeConfig(RunOrModel):
    """Answer requests in the form of OpenAI's API."""

    engine: EngineBuilder | None = Names(ENGINE_NAMES, default=None).field(
        "engine; None: the run's own, or torch for a model"
    )
    host: str = chz.field(default="127.0.0.1", doc="address to listen on; 0.0.0.0: all")
    port: int = chz.field(default=8000, doc="port; 0: any free one")
    key: str = chz.field(default="", doc="key of requests; empty: a random one, which is printed")

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "port", at_least=0, at_most=65535)
        if not self.log_path and self.model_name is None:
            raise ConfigError("nothing to serve: give log_path=RUN or model_name=MODEL")
        if self.key and not re.fullmatch(r"[!-~]+", self.key):
            raise ConfigError("key must consist of ASCII characters without spaces")


@dataclasses.dataclass(frozen=True, slots=True)
class ServedRun:
    """A run and a generation: that of its `centre` and of its genomes.

    Attributes:
        usual_stop: strings that end answers to plain prompts if its sampling has no `stop`.
    """

    rebuilt: RebuiltRun
    generation: int
    usual_stop: tuple[str, ...] = ()

    def places(self) -> dict[str, "_Place | None"]:
        """Return its models; the base is in every place without a genome."""
        run, here = self.rebuilt.run, self.generation
        found: dict[str, _Place | None] = {"centre": (here, None), _BASE: (here, None)}
        found |= {f"generation-{t}": (t, None) for t in range(len(run.records) + 1)}
        if here <= run.last_with_genomes:
            found |= {f"genome-{g}": (here, g) for g in range(len(run.genomes(here)))}
        return found


_Place: TypeAlias = tuple[int, int | None]
"""A generation, and optionally a genome."""


class Served(Endpoint):
    """Serves a model, or those of a run, one generation or genome at a time.

    Args:
        run: None if a model is served.
        name: the model; the last part of its path is its name here.
        params: defaults of requests.
        resident: holds a genome in the engine, and releases it when it is closed.

    Attributes:
        stops: default stop strings of answers to chats, and to texts.
    """

    def __init__(
        self,
        engine: Engine,
        run: ServedRun | None,
        name: str,
        key: str,
        params: SamplingParams,
        resident: AsyncExitStack,
    ) -> None:
        self._run, self._key, self._resident = run, key, resident
        own = os.path.basename(os.path.abspath(name))  # That of "." is the directory's.
        self._places = {own: None} if run is None else run.places()
        self.params = params
        self.translator = Translator(engine.tokenizer, engine.traits.context_length)
        self.pending = PendingAnswers()
        usual = run.usual_stop if run is not None else ()
        self.stops = ((), usual) if params.stop is None else (params.stop, params.stop)
        self._kept: dict[str, KeptTurns] = {}
        self._door = anyio.Lock()
        self._there: _Place | None = None
        self._host: tuple[Host, Target] = engine, "centre"
        self._running = 0
        self._idle = anyio.Event()

    @override
    def check(self, key: str) -> None:
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise wrong_key()

    @override
    def names(self, key: str) -> Sequence[str]:
        return list(self._places)

    @override
    def model(self, key: str, name: str) -> ServedModel:
        check_name(name, self.names(key))
        kept = self._kept.setdefault(name, KeptTurns(next(iter(self._kept.values()), None)))
        return _Model(self, name, kept)

    @asynccontextmanager
    async def at(self, name: str) -> AsyncGenerator[tuple[Host, Target]]:
        """Yield host and target of a model, which stays in the engine inside this context."""
        place = self._places[name]
        async with self._door:  # First come, first served, so that all are served.
            there = self._there
            is_here = there == place or (name == _BASE and there is not None and there[1] is None)
            if place is not None and not is_here:
                if self._running:
                    self._idle = anyio.Event()
                    await self._idle.wait()
                # A thread may be writing weights, which continues if its caller is cancelled.
                with anyio.CancelScope(shield=True):
                    await self._go_to(place)
            self._running += 1
        host, target = self._host
        try:
            yield host, "base" if name == _BASE else target
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _go_to(self, place: _Place) -> None:
        self._there = None
        await self._resident.aclose()
        assert self._run is not None
        (generation, genome), rebuilt = place, self._run.rebuilt
        await rebuilt.go_to(generation)
        answering = rebuilt.answering("centre" if genome is None else genome)
        self._host = await self._resident.enter_async_context(answering)
        self._there = place


class _Model(ServedModel):
    """One of the models."""

    def __init__(self, served: Served, name: str, kept: KeptTurns) -> None:
        self._served, self._name, self.kept = served, name, kept
        self.translator, self.pending = served.translator, served.pending
        self.chat_stop, self.text_stop = served.stops

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        params = draw.params(self._served.params)
        # The observation has the stops.
        params = chz.replace(params, max_tokens=observation.max_tokens, stop=())
        seed = draw.seed_of(number)
        if seed is None:
            seed = secrets.randbits(63)
        async with self._served.at(self._name) as (host, target):
            return await host.sample(SampleRequest(target, observation, params, seed, progress))

    @override
    async def tops(self, tokens_T: tuple[int, ...]) -> Sequence[Top]:
        if len(tokens_T) == 1:
            return ()
        async with self._served.at(self._name) as (host, target):
            return await host.tops(LogprobsRequest(target, tokens_T[:1], tokens_T[1:]))


async def _serve(config: ServeConfig, bound: socket.socket) -> None:
    from es_cookbook.plugins.endpoint.app import serve

    subject = subject_of(config, config.engine)
    key = config.key or secrets.token_urlsafe(24)
    params = SamplingParams(temperature=1.0)
    async with opened(subject) as (engine, rebuilt), AsyncExitStack() as resident:
        run = None
        if rebuilt is not None:
            params = rebuilt.run.config.sampling
            run = ServedRun(rebuilt, subject.generations[0], await rebuilt.usual_stop())
        served = Served(engine, run, subject.name, key, params, resident)
        names = served.names(key)
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        host, port = bound.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        # Searching what was loaded for garbage takes a third of a second, which delays all answers.
        gc.collect()
        gc.freeze()
        print(f"serving {listed}", flush=True)
        print(f"OPENAI_BASE_URL=http://{host}:{port}/v1 OPENAI_API_KEY={key}", flush=True)
        await serve(served, bound)


def _bound(config: ServeConfig) -> socket.socket:
    """Return a socket at the address, before a model is loaded, which may take minutes.

    Raises:
        ConfigError: It is in use, or is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        number = error.errno or 0  # Negative for a host name that is not found.
        why = os.strerror(number) if number > 0 else error.strerror
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {why}; give another host= or port= "
            "(port=0 takes a free one)"
        ) from error


def main(config: ServeConfig) -> None:
    """Load the model or rebuild the run, and answer until stopped."""
    with importing("serve", "es-cookbook[serve]", "starlette", "uvicorn"):
        import es_cookbook.plugins.endpoint.app  # noqa: F401  # pyright: ignore[reportUnusedImport]
    with _bound(config) as bound:
        anyio.run(_serve, config, bound)


def cli() -> None:
    run_cli(main, ServeConfig)
