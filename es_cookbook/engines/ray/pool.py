"""Many engines as one: an actor of a Ray cluster each, any engine inside.

    engine=ray engine.num_engines=8 engine.engine=vllm engine.engine.dtype=bfloat16

Engines are kept in step by seeds. A step goes to all of them at once; they answer with their
centre's fingerprint, and one that disagrees is restored from the base and all steps. Blocks of
genomes go to whichever engine is free; what is asked of the centre or the base goes to the one with
the fewest requests. Engines that die, hang or fail are brought back (`ray_member`), and what they
were doing is done again, so that with engines whose answers do not depend on the batch the run is
the same, bit for bit. If one cannot be brought back the others go on with its block; after the next
step the pool tries again to fill its place. Engines may join a running pool.

Left out: moving a running block to an engine that joins. It gets its first block when one is free,
and a share of the population from the next generation on.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.cores import num_cores
from es_cookbook.common.errors import ConfigError, EngineError, RequestError
from es_cookbook.engines.base import (
    ENGINE_NAMES,
    Engine,
    EngineBuilder,
    Host,
    LogprobsRequest,
    SampleRequest,
)
from es_cookbook.engines.ray.cluster import Cluster, Needs
from es_cookbook.engines.ray.member import EngineLostError, Ledger, Member, PoolSettings
from es_cookbook.engines.ray.roster import Roster
from es_cookbook.engines.wire import Request, encode_genomes, encode_step
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.rl.types import Action

if TYPE_CHECKING:
    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder

_ENGINES = Names(ENGINE_NAMES, default="torch")


@chz.chz
class RayPoolBuilder(EngineBuilder):
    """Builds a `RayPool`."""

    num_engines: int = chz.field(default=1, doc="engines to begin with; all have to start")
    max_engines: int | None = chz.field(
        default=None,
        doc="engines that may join while the cluster has room for them; num_engines if unset",
    )
    engine: EngineBuilder = chz.field(
        meta_factory=_ENGINES, default_factory=_ENGINES.build_default, doc="what each engine is"
    )
    address: str = chz.field(
        default="local",
        doc="local: a Ray of its own on this machine; auto or host:port: a cluster that runs",
    )
    num_cpus: float | None = chz.field(
        default=None,
        doc="cores of one engine, and its threads; if unset a share of this machine's where "
        "address=local, else 1",
    )
    num_gpus: float | None = chz.field(
        default=None, doc="GPUs of one engine; if unset 1 where there are any, else 0"
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = chz.field(
        default="PACK", doc="engines on few machines or on many; strict: on one, or one on each"
    )
    env: Mapping[str, str] = chz.field(
        default_factory=dict, doc="environment variables of the engines' processes"
    )
    max_restarts: int = chz.field(
        default=3, doc="restarts of one engine within a generation before it is given up"
    )
    request_timeout: float = chz.field(
        default=600.0,
        doc="seconds without an answer, while there are requests, after which an engine hangs",
    )
    start_timeout: float = chz.field(
        default=1800.0, doc="seconds for the cluster's room, for building and for restoring"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_engines", "num_cpus", above=0, prefix="engine.")
        timeouts = ("request_timeout", "start_timeout")
        check_range(self, *timeouts, above=0, finite=False, prefix="engine.")
        if self.max_engines is not None and self.max_engines < self.num_engines:
            raise ConfigError(
                f"engine.max_engines must be at least engine.num_engines={self.num_engines}, found "
                f"{self.max_engines}"
            )
        if self.num_gpus is not None and not (
            0 <= self.num_gpus <= 1 or self.num_gpus == int(self.num_gpus) > 0
        ):
            raise ConfigError(
                "engine.num_gpus must be 0, a share of one GPU or a whole number, found "
                f"{self.num_gpus:g}"
            )
        check_range(self, "max_restarts", at_least=0, prefix="engine.")
        if isinstance(self.engine, RayPoolBuilder):
            raise ConfigError(
                "engine.engine must be an engine, not a pool again; accepted: "
                + ", ".join(name for name in ENGINE_NAMES if name != "ray")
            )

    @override
    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> "RayPool":
        cluster = Cluster.connect(self.address)
        pool: RayPool | None = None
        try:
            settings = PoolSettings(
                self.engine,
                model_name,
                search_space,
                cluster,
                self._needs(cluster),
                max_restarts=self.max_restarts,
                request_timeout=self.request_timeout,
                start_timeout=self.start_timeout,
            )
            pool = RayPool(settings, self.strategy, self.max_engines or self.num_engines)
            await pool.add_engines(self.num_engines)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await (pool or cluster).close()
            raise
        return pool

    def _needs(self, cluster: Cluster) -> Needs:
        """What one engine needs; refuses what a private Ray can never have."""
        gpus = cluster.resources().get("GPU", 0)
        num_gpus = float(gpus > 0) if self.num_gpus is None else self.num_gpus
        needed = num_gpus * self.num_engines
        if needed > gpus and cluster.is_private:
            raise ConfigError(
                f"engine.num_engines={self.num_engines} with engine.num_gpus={num_gpus:g} needs "
                f"{needed:g} GPUs, and this machine has {gpus:g}; lower one of them (engines can "
                "share a GPU: 0.5), or join a cluster that has more with engine.address"
            )
        num_cpus = self.num_cpus
        if num_cpus is None:
            most = self.max_engines or self.num_engines
            num_cpus = max(1, num_cores() // most) if self.address == "local" else 1
        return Needs(num_cpus, num_gpus, self.env)


class RayPool(Engine):
    """A pool of engines. Has no engines, and no traits, until `add_engines`.

    Args:
        settings: how engines are made.
        strategy: how engines are placed that are added together.
        most: engines up to which more join by themselves while the cluster has room.
    """

    def __init__(self, settings: PoolSettings, strategy: str, most: int) -> None:
        self._ledger = Ledger()
        self._roster = Roster(settings, self._ledger, strategy, most)

    @property
    def members(self) -> Sequence[Member]:
        """Engines that are there now, and where their processes are."""
        return self._roster.members

    @property
    @override
    def num_engines(self) -> int:
        """Engines that are there now."""
        return max(1, len(self._roster.members))

    async def add_engines(self, count: int) -> None:
        """Have more engines join, and wait until they are there.

        Raises:
            ConfigError: The cluster has no room for them within `start_timeout`.
            ESCookbookError: One of them cannot be built, or disagrees with the others.
        """
        await self._roster.add(count)
        # The same for all: they have one builder, and their fingerprints prove the same base.
        built = self._roster.least_busy().built
        self.traits, self.tokenizer, self.space = built.traits, built.tokenizer, built.space

    @override
    @asynccontextmanager
    async def lend(self) -> AsyncGenerator[Host]:
        """Borrow an engine; if it is lost meanwhile, the block goes to another by itself."""
        lent = _LentHost(self._roster, await self._roster.borrow())
        try:
            yield lent
        finally:
            self._roster.give_back(lent.member)

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Not for pools: genomes are loaded on an engine that is lent."""
        raise EngineError("a pool hosts genomes on engines that it lends; use its `lend`")

    @override
    async def sample(self, request: SampleRequest) -> Action:
        """For the centre and the base."""
        return cast(Action, await self._ask(request))

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        """For the centre and the base."""
        return cast("list[float]", await self._ask(request))

    @override
    async def apply(self, step: Step) -> int:
        """On every engine.

        Raises:
            DisagreementError: An engine differs from the others after it was restored, too.
            EngineError: No engine is left.
        """
        return await self._roster.apply(encode_step(step))

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        """Raises as `apply`. Engines that see no such file use the base."""
        path = None if snapshot is None else str(snapshot.absolute())
        return await self._roster.restore([encode_step(step) for step in steps], path)

    @override
    async def save(self, path: Path) -> None:
        """An engine writes it, so engines elsewhere need a shared directory."""
        member = self._roster.least_busy()
        await member.save(str(path.absolute()))
        if not path.exists():
            raise EngineError(
                f"the centre was saved as {path} on {member.built.node}, which is not seen from "
                "this machine; give a path in a directory that both share"
            )

    @override
    def stats(self) -> Mapping[str, float]:
        """Counters.

        `engines` there now, `restarted` so far, `requests` answered, `tokens` sampled,
        `sent_bytes` to engines, and of those `question_bytes`: prompts, with how to sample.
        """
        traffic = self._ledger.traffic
        return {
            "engines": len(self._roster.members),
            "restarted": self._ledger.num_restarts,
            "requests": traffic.num_requests,
            "tokens": traffic.num_tokens,
            "sent_bytes": traffic.sent_bytes,
            "question_bytes": traffic.question_bytes,
        }

    @override
    async def close(self) -> None:
        await self._roster.close()

    async def _ask(self, request: Request) -> Action | list[float]:
        if isinstance(request.target, int):
            raise RequestError(
                f"genome {request.target} was asked of a pool, which answers for the centre and "
                "the base; genomes are asked where they are lent a place"
            )
        while True:
            with suppress(EngineLostError):  # Another may know.
                return await self._roster.least_busy().mailbox.ask(request)


class _LentHost(Host):
    """An engine that a block has borrowed; if it is lost, the block goes to another.

    Args:
        roster: lends others.
        member: the first.

    Attributes:
        member: where the block is now.
    """

    def __init__(self, roster: Roster, member: Member) -> None:
        self.member = member
        self._roster = roster
        self._genomes = b""
        self._going = anyio.Lock()

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        self._genomes = encode_genomes(genomes_G)
        with suppress(EngineLostError):
            await self.member.load(self._genomes)
        await self._go_on()

    @override
    async def sample(self, request: SampleRequest) -> Action:
        return cast(Action, await self._ask(request))

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        return cast("list[float]", await self._ask(request))

    async def _ask(self, request: Request) -> Action | list[float]:
        while True:
            try:
                return await self.member.mailbox.ask(request)
            except EngineLostError:
                await self._go_on()

    async def _go_on(self) -> None:
        """Borrow another engine in place of a lost one."""
        async with self._going:
            while isinstance(self.member.lost, EngineLostError):
                self.member = await self._roster.borrow()
                with suppress(EngineLostError):
                    await self.member.load(self._genomes)
