"""Many engines as one: an actor of a Ray cluster each, any engine inside.

    engine=ray engine.num_engines=8 engine.engine=vllm engine.engine.dtype=bfloat16

Engines are kept in step by seeds, and an engine counts only while its centre is the pool's. A step
goes at once to all of them that are free; they answer with their centre's fingerprint, and one that
differs from most is restored from the base and all steps. Those that still run a block, where
generations overlap, take the step before their next one, and are compared with the others then.

Blocks of genomes go to any free engine; requests to the centre or the base go to the one with the
fewest requests. A rollout is a function of (centre, genome, prompt, sampling seed), and all four
are known here. So if an engine dies, hangs or fails, its block goes to another and its requests are
made again: if answers do not depend on the batch, the run is the same, bit for bit. Meanwhile a new
engine is started in place of the lost one, restored from the steps, and joins once its fingerprint
is that of the others. After `max_restarts` of these within a generation, lost
engines stay away until the next step, after which at least one attempt is made for each of them.
"""

import asyncio
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EngineError, ESCookbookError, RequestError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import plural, say
from es_cookbook.common.trust import needs_trust
from es_cookbook.engines.base import (
    ENGINE_NAMES,
    Engine,
    EngineBuilder,
    Host,
    LogprobsRequest,
    ModelEngineBuilder,
    SampleRequest,
)
from es_cookbook.engines.ray.cluster import Cluster, Place
from es_cookbook.engines.ray.member import EngineLostError, Ledger, Member, with_notes
from es_cookbook.engines.wire import Request, encode_genomes, encode_step
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.rl.types import Action

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder

_logger = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds after which a warning says what the pool waits for."""

_RUNS = "can make ray run code that is not part of es_cookbook"


@chz.chz
class RayPoolBuilder(EngineBuilder):
    """Builds a pool of engines, each in a Ray actor, on one machine or many."""

    num_engines: int = chz.field(default=1, doc="number of engines; all have to start")
    engine: EngineBuilder = Names(ENGINE_NAMES, default="torch").field("builder of each engine")
    address: str = chz.field(
        default="local",
        doc="local: a private Ray on this machine; auto or host:port: a running cluster",
        metadata=needs_trust(lambda p: None if p.address in ("local", "auto") else "ray", _RUNS),
    )
    num_cpus: float | None = chz.field(
        default=None,
        doc="cores, and so threads, of one engine; if unset an equal share of this machine's with "
        "address=local, else 1",
    )
    num_gpus: float | None = chz.field(
        default=None, doc="GPUs of one engine; if unset 1 where there are any, else 0"
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = chz.field(
        default="PACK", doc="engines on few machines or on many; strict: on one, or one on each"
    )
    env: Mapping[str, str] = chz.field(
        default_factory=dict,
        doc="environment variables of the engines' processes",
        metadata=needs_trust(lambda p: "ray" if p.env else None, _RUNS),
    )
    max_restarts: int = chz.field(
        default=3,
        doc="restarts of engines within a generation; those lost beyond stay away until the next",
    )
    request_timeout: float = chz.field(
        default=600.0,
        doc="seconds without an answer to any request after which an engine counts as hung",
    )
    start_timeout: float = chz.field(
        default=1800.0, doc="seconds for room on the cluster, for building and for restoring"
    )

    @property
    @override
    def least_temperature(self) -> float:
        return self.engine.least_temperature

    @override
    def check(self, model_name: str) -> None:
        self.engine.check(model_name)

    @override
    def check_space(self, search_space: "SearchSpaceBuilder", max_terms: int = 1) -> None:
        self.engine.check_space(search_space, max_terms)

    @override
    def tokenizer(self, model_name: str) -> "PreTrainedTokenizerBase":
        return self.engine.tokenizer(model_name)

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_engines", "num_cpus", above=0, prefix="engine.")
        timeouts = ("request_timeout", "start_timeout")
        check_range(self, *timeouts, above=0, prefix="engine.")
        if self.num_gpus is not None and not (
            0 <= self.num_gpus <= 1 or self.num_gpus % 1 == 0 < self.num_gpus
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
        if isinstance(self.engine, ModelEngineBuilder):  # Before a cluster is started.
            await asyncio.to_thread(self.check, model_name)
        where = "a private Ray" if self.address == "local" else f"Ray at {self.address}"
        say(f"starting {self.num_engines} x {self.engine.name} on {where}: 10 s to some minutes")
        cluster = Cluster.connect(self.address, self.strategy, self.env)
        pool: RayPool | None = None
        try:
            self._divide(cluster)
            limits = self.max_restarts, self.request_timeout, self.start_timeout
            pool = RayPool(Ledger(self.engine, model_name, search_space, cluster, *limits))
            await pool.add_engines(self.num_engines)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await (pool or cluster).close()
            raise
        return pool

    def _divide(self, cluster: Cluster) -> None:
        """Set the cores, GPUs and share of one engine; refuses what a private Ray can never have.

        The share is that of an engine with one thread per core: by its CPUs, which hyper-threads
        double, engines that take every core would have half.
        """
        gpus = cluster.resources().get("GPU", 0)
        cluster.num_gpus = float(gpus > 0) if self.num_gpus is None else self.num_gpus
        needed = cluster.num_gpus * self.num_engines
        if needed > gpus and cluster.is_private:
            raise ConfigError(
                f"engine.num_engines={self.num_engines} with engine.num_gpus="
                f"{cluster.num_gpus:g} needs {needed:g} GPUs, and this machine has {gpus:g}; lower "
                "one of them (engines can share a GPU: 0.5), or join a cluster that has more with "
                "engine.address"
            )
        share = 1 / self.num_engines
        if self.num_cpus is not None:
            cluster.num_cpus, share = self.num_cpus, min(share, self.num_cpus / num_cores())
        elif self.address == "local":
            cluster.num_cpus = max(1, num_cores() // self.num_engines)
        if cluster.is_private:
            cluster.share = share


class DisagreementError(EngineError):
    """An engine whose centre is not the pool's, even after it was restored."""


class _AskingHost(Host):
    """A host whose requests of both kinds go the same way."""

    @abstractmethod
    async def _ask(self, request: Request) -> Action | list[float]: ...

    @override
    async def sample(self, request: SampleRequest) -> Action:
        return cast(Action, await self._ask(request))

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        return cast("list[float]", await self._ask(request))


class RayPool(_AskingHost, Engine):
    """A pool of engines. It has no engines and no traits until `add_engines`.

    It answers for the centre and the base itself, and for genomes on engines that it lends.

    Args:
        ledger: how to make engines.

    Attributes:
        members: engines that are there now, and where their processes are.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.members: list[Member] = []
        self._ledger = ledger
        self._num_started = 0
        self._free: asyncio.Queue[Member | None] = asyncio.Queue()
        self._vacant: list[Place] = []
        self._restarts_left = ledger.max_restarts
        self._replacing: set[asyncio.Task[None]] = set()
        self._last_loss: EngineError | None = None
        self._is_closed = False
        self._moving = asyncio.Lock()

    @property
    @override
    def num_engines(self) -> int:
        """Current number of engines."""
        return max(1, len(self.members))

    async def add_engines(self, count: int) -> None:
        """Add engines, and wait until they have started.

        Raises:
            ConfigError: The cluster has no room for them within `start_timeout`.
            ESCookbookError: One of them cannot be built, or disagrees with the others.
        """
        cluster, seconds = self._ledger.cluster, self._ledger.start_timeout
        loop = asyncio.get_running_loop()
        there = cluster.resources()
        shortage = (
            f"room on the Ray cluster for {plural(count, 'engine')} with CPU {cluster.num_cpus:g} "
            f"and GPU {cluster.num_gpus:g} each; it has CPU {there.get('CPU', 0):g} and "
            f"GPU {there.get('GPU', 0):g} in all"
        )
        warning = loop.call_later(_PATIENCE, _logger.warning, "waiting for %s", shortage)
        try:
            async with asyncio.timeout(seconds):
                places = await cluster.reserve(count)
        except TimeoutError:
            raise ConfigError(
                f"within engine.start_timeout={seconds:g} s there was no {shortage}"
            ) from None
        finally:
            warning.cancel()
        try:
            await self._join(places)
        except BaseException:
            cluster.release(places)
            raise
        # The same for all: they have one builder, and their fingerprints prove the same base.
        self.traits, self.tokenizer, self.space = self.members[-1].built

    @override
    @asynccontextmanager
    async def lend(self, centre: int | None = None) -> AsyncGenerator[Host]:
        """Borrow an engine; if it is lost meanwhile, the block goes to another by itself."""
        lent = _LentHost(self, await self.borrow(), centre)
        try:
            yield lent
        finally:
            self._free.put_nowait(lent.member)

    async def borrow(self) -> Member:
        """Return the next engine that is free.

        Raises:
            EngineError: None is left, and none is being started.
        """
        while self.members or self._replacing:
            member = await self._free.get()
            if member is not None and member.lost is None:
                return member
        self._free.put_nowait(None)  # Wakes the next task that waits.
        raise self._none_left()

    @override
    @asynccontextmanager
    async def free(self) -> AsyncGenerator[None]:
        """Return at once: `apply` leaves engines alone that are not free."""
        yield

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Refuse: a pool loads genomes on an engine that it lends."""
        raise EngineError("a pool hosts genomes on engines that it lends; use its `lend`")

    @override
    async def apply(self, step: Step) -> int:
        """Apply the step on every free engine, or on the first to become free.

        Each engine adds its part to `spans`.

        Raises:
            DisagreementError: An engine differs from the others after it was restored, too.
            EngineError: No engine is left.
        """
        free = [await self.borrow()]
        while not self._free.empty():
            free += filter(None, [self._free.get_nowait()])
        try:
            async with self._moving:
                self._ledger.steps.append(encode_step(step))
                self._ledger.spans = self.spans
                await self._agree(await _each(Member.catch_up, free), len(self._ledger.steps))
        finally:
            for member in free:
                self._free.put_nowait(member)
        return await self._moved()

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        """Restore all engines; those that cannot see the snapshot begin at the base."""
        plain = [encode_step(step) for step in steps]
        async with self._moving:
            self._ledger.steps = plain
            self._ledger.fingerprints.clear()
            self._ledger.snapshot = None if snapshot is None else str(snapshot.absolute())
            await self._agree(await _each(Member.restore, self.members), len(plain))
        return await self._moved()

    async def _moved(self) -> int:
        """Return the centre's fingerprint, and start all lost engines again."""
        position = len(self._ledger.steps)
        while position not in self._ledger.fingerprints:  # All that were to move are lost.
            async with self.lend(position) as host:
                await host.load([])
        places, self._vacant = self._vacant, []
        self._restarts_left = max(self._ledger.max_restarts, len(places))  # At least one for each.
        for place in places:
            self._replace_soon(place)
        return self._ledger.fingerprints[position]

    async def bring(self, member: Member, centre: int) -> None:
        """Bring a lent engine to the pool's centre after `centre` steps.

        Raises:
            EngineLostError: It is lost.
            DisagreementError: It is elsewhere then, after it was restored, too.
        """
        await self._agree({member: await member.catch_up(centre)}, centre)

    @override
    async def save(self, path: Path) -> None:
        """Have an engine write the centre; engines elsewhere need a shared directory."""
        member = await self._any_member()
        await member.save(str(path.absolute()))
        if not path.exists():
            raise EngineError(
                f"the centre was saved as {path} on {member.node}, which is not seen from "
                "this machine; give a path in a directory that both share"
            )

    @override
    def stats(self) -> Mapping[str, float]:
        """Return the current number of `engines`, and the counters of `Ledger`."""
        return {"engines": len(self.members), **self._ledger.counters}

    @override
    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        members, self.members = self.members, []
        await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
        self._free.put_nowait(None)
        await self._ledger.cluster.close()

    @override
    async def _ask(self, request: Request) -> Action | list[float]:
        if isinstance(request.target, int):
            raise RequestError(
                f"genome {request.target} was requested from a pool, which answers for the centre "
                "and the base; genomes answer on the engines that `lend` returns"
            )
        while True:
            with suppress(EngineLostError):  # Another may know.
                return await (await self._any_member()).ask(request)

    async def _any_member(self) -> Member:
        """Return the engine with the fewest requests; wait for one that is being started.

        Raises:
            EngineError: None is left.
        """
        while not self.members:
            if not self._replacing:
                raise self._none_left()
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        return min(self.members, key=lambda member: member.num_unanswered)

    async def _join(self, places: Sequence[Place]) -> None:
        """Start engines, and admit them once they have the pool's centre."""
        members = [
            Member(number, place, self._ledger, self._lose)
            for number, place in enumerate(places, self._num_started)
        ]
        self._num_started += len(places)
        try:
            await asyncio.gather(*(member.start() for member in members))
            async with self._moving:
                found = await _each(Member.catch_up, members)
                await self._agree(found, len(self._ledger.steps))
                for member in members:
                    if member.lost is not None:
                        raise member.lost
                self.members += members
        except BaseException:
            await asyncio.gather(*(member.close() for member in members), return_exceptions=True)
            raise
        for member in members:
            self._free.put_nowait(member)

    def _lose(self, member: Member) -> None:
        """Take a lost engine out of the pool, and start another in its place."""
        if member not in self.members:  # It has not joined yet.
            return
        self._last_loss = member.lost
        self.members.remove(member)
        _logger.warning("%s; engines left: %d", member.lost, len(self.members))
        self._replace_soon(member.place)

    def _replace_soon(self, place: Place) -> None:
        task = asyncio.create_task(self._replace(place))
        self._replacing.add(task)
        task.add_done_callback(self._replaced)

    def _replaced(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        if not self.members and not self._replacing:
            self._free.put_nowait(None)  # Wakes tasks that wait for an engine.

    async def _replace(self, place: Place) -> None:
        """Start an engine in the place of a lost one."""
        while self._restarts_left:
            self._restarts_left -= 1
            self._ledger.counters["restarted"] += 1
            try:
                return await self._join([place])
            except ESCookbookError as error:
                self._last_loss = with_notes(EngineError(str(error)), error)
                _logger.warning("an engine could not join the pool: %s", error)
        self._vacant.append(place)

    async def _agree(self, found: dict[Member, int], position: int) -> None:
        """Restore engines that differ from the others; all have one fingerprint afterwards."""
        expected = self._ledger.fingerprints.get(position)
        if expected is None:
            for fingerprint, votes in Counter(found.values()).most_common(1):
                expected = fingerprint if 2 * votes > len(found) else None
        for member, fingerprint in list(found.items()):
            if fingerprint != expected:
                _logger.warning(
                    "engine %d of the pool has fingerprint %016x, %s; it is restored",
                    *(member.number, fingerprint),
                    "engines disagree" if expected is None else f"the others {expected:016x}",
                )
                del found[member]
                with suppress(EngineLostError):
                    found[member] = await member.restore(position, from_base=True)
        for member, fingerprint in found.items():
            expected = fingerprint if expected is None else expected
            if fingerprint != expected:
                raise DisagreementError(
                    f"engine {member.number} of the pool was restored from the base model and all "
                    f"steps, and its centre has fingerprint {fingerprint:016x} where the others "
                    f"have {expected:016x}; engines of one pool need the same model files and the "
                    "same version of es_cookbook"
                )
        if expected is not None:
            self._ledger.fingerprints[position] = expected

    def _none_left(self) -> EngineError:
        if self._is_closed:
            return EngineError("the engine is closed")
        none_left = EngineError(
            f"no engine of the pool is left ({self._last_loss}); what a run has recorded stays, "
            "and it can be resumed"
        )
        return with_notes(none_left, self._last_loss)


class _LentHost(_AskingHost):
    """An engine that a block has borrowed; if it is lost, the block goes to another.

    `centre` is the number of steps before the block's genomes; None: all.
    """

    def __init__(self, pool: RayPool, member: Member, centre: int | None) -> None:
        self.member = member
        self._pool = pool
        self._centre = centre
        self._genomes = b""
        self._going = anyio.Lock()

    @property
    @override
    def label(self) -> str:
        return self.member.label

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        self._genomes = encode_genomes(genomes_G)
        await self._settle()
        await self._go_on()

    @override
    async def _ask(self, request: Request) -> Action | list[float]:
        while True:
            try:
                return await self.member.ask(request)
            except EngineLostError:
                await self._go_on()

    async def _go_on(self) -> None:
        """Borrow another engine in place of a lost one."""
        async with self._going:
            while isinstance(self.member.lost, EngineLostError):
                self.member = await self._pool.borrow()
                await self._settle()

    async def _settle(self) -> None:
        """Load the genomes on the engine, around their centre, unless it is lost."""
        with suppress(EngineLostError):
            if self._centre is not None:
                await self._pool.bring(self.member, self._centre)
            await self.member.load(self._genomes)


async def _each(
    move: Callable[[Member], Awaitable[int]], members: Sequence[Member]
) -> dict[Member, int]:
    """Return the fingerprints of those that are not lost; raise the first error of other kinds."""
    outcomes = await asyncio.gather(*map(move, members), return_exceptions=True)
    found: dict[Member, int] = {}
    for member, outcome in zip(members, outcomes, strict=True):
        if isinstance(outcome, int):
            found[member] = outcome
        elif not isinstance(outcome, EngineLostError):
            raise outcome
    return found
