"""An engine on an event loop of its own, for plain test functions that share it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from es_cookbook.engines.base import Engine, EngineBuilder, LogprobsRequest, SampleRequest, Top
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.rl.types import Action


class Running:
    """Builds an engine on entry and closes it on exit.

    Attributes:
        engine: any; genomes are loaded where it lends a place.
        portal: calls what is asynchronous.
    """

    engine: Engine
    portal: BlockingPortal

    def __init__(self, builder: EngineBuilder, path: Path, space: SearchSpaceBuilder) -> None:
        self.builder, self.path, self.space = builder, path, space

    def __enter__(self) -> "Running":
        self._context = start_blocking_portal("asyncio")
        self.portal = self._context.__enter__()
        try:
            self.engine = self.portal.call(
                lambda: self.builder(model_name=str(self.path), search_space=self.space)
            )
        except BaseException:
            self._context.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.portal.call(self.engine.close)
        self._context.__exit__(None, None, None)

    def load(self, genomes_G: Sequence[Genome]) -> None:
        """For requests that load none themselves."""
        self.portal.call(self.engine.load, genomes_G)

    def sample(
        self, requests: Sequence[SampleRequest], genomes_G: Sequence[Genome] | None = None
    ) -> list[Action]:
        """All at once, in this order; genomes are loaded first, unless `load` has."""
        return self.portal.call(self._all, "sample", requests, genomes_G)

    def score(
        self, requests: Sequence[LogprobsRequest], genomes_G: Sequence[Genome] | None = None
    ) -> list[list[float]]:
        """As `sample`."""
        return self.portal.call(self._all, "logprobs", requests, genomes_G)

    def tops(
        self, requests: Sequence[LogprobsRequest], genomes_G: Sequence[Genome] | None = None
    ) -> list[list[Top]]:
        """As `sample`."""
        return self.portal.call(self._all, "tops", requests, genomes_G)

    async def _all(
        self, method: str, requests: Sequence[Any], genomes_G: Sequence[Genome] | None
    ) -> list[Any]:
        if genomes_G is None:
            return list(await asyncio.gather(*map(getattr(self.engine, method), requests)))
        async with self.engine.lend() as host:
            await host.load(genomes_G)
            return list(await asyncio.gather(*map(getattr(host, method), requests)))
