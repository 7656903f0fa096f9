"""Runs over a Ray cluster of two hosts that lose the link, a node and the head.

    python -m tests.ray_nodes DIRECTORY

runs them inside namespaces of its own (`tests.links`), with engines without a model, and prints as
JSON what it saw. The cluster is started with `ray start`, as docs/multi_gpu.md says. At its end it
is killed, since the head is.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import anyio
import chz
import psutil

from es_cookbook.engines.base import EngineBuilder
from es_cookbook.engines.ray.member import Member
from es_cookbook.engines.ray.pool import RayPool, RayPoolBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.rl.types import SamplingParams
from es_cookbook.runs.program import train
from tests.fakes import SmallDataset
from tests.links import HERE, THERE, Link, inside
from tests.programs import num_recorded
from tests.ray_fakes import LightEngineBuilder
from tests.tiny_run import TinyConfig

ADDRESS = f"{HERE}:6379"
BASE = Path(__file__).parent / "data/base"
QUICK_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
SHORT = 1.0
"""Seconds without a link, in which no three of those checks can fail."""


def start_head(num_engines: int = 1, **system: object) -> None:
    """The head, on the host HERE, with room for engines; `system` is Ray's configuration."""
    os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # Not on 127.0.0.1 only.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    options = ["--head", f"--node-ip-address={HERE}", "--port=6379", "--include-dashboard=false"]
    _start(num_engines, [*options, f"--system-config={json.dumps(system)}"])
    for _ in range(1200):
        with suppress(OSError):
            socket.create_connection((HERE, 6379)).close()
            return
        time.sleep(0.05)
    raise TimeoutError("Ray's head does not answer")


def start_there(link: Link) -> "subprocess.Popen[bytes]":
    """A node on the host THERE, with room for one engine; the process ends with the node."""
    return _start(1, [f"--address={ADDRESS}", f"--node-ip-address={THERE}"], link.there())


def _start(
    num_cpus: int, options: Sequence[str], where: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    start = [sys.executable, "-m", "ray.scripts.scripts", "start"]  # As `ray start`.
    ours = ["--block", "--disable-usage-stats", f"--num-cpus={num_cpus}"]
    return subprocess.Popen(
        [*where, *start, *ours, f"--object-store-memory={80 << 20}", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def is_there(member: Member) -> bool:
    """Whether an engine runs on the host THERE."""
    own = os.readlink("/proc/self/ns/net")
    return os.readlink(f"/proc/{member.pid}/ns/net") != own


@chz.chz
class PoolBuilder(RayPoolBuilder):
    """Remembers its pool, which after its fourth step waits until it has all engines again."""

    made: ClassVar[list[RayPool]] = []

    async def __call__(self, **where: Any) -> RayPool:
        pool = await super().__call__(**where)
        self.made.append(pool)
        apply, steps = pool.apply, list[Step]()

        async def apply_and_wait(step: Step) -> int:
            steps.append(step)
            fingerprint = await apply(step)
            while len(steps) == 4 and len(pool.members) < self.num_engines:
                await asyncio.sleep(0.01)
            return fingerprint

        pool.apply = apply_and_wait  # pyright: ignore[reportAttributeAccessIssue]
        return pool


async def history(log_path: Path, engine: EngineBuilder, num_generations: int = 6) -> bytes:
    """What a tiny run records."""
    config = TinyConfig(
        model_name=str(BASE),
        log_path=str(log_path),
        engine=engine,
        num_generations=num_generations,
        eval_every=0,
        behavior_if_log_dir_exists="resume",
    )
    await train(config)
    return (log_path / "history.jsonl").read_bytes()


async def lose_nodes(
    log_path: Path, link: Link, node: "subprocess.Popen[bytes]"
) -> AsyncIterator[int]:
    """Cut the link for a moment, kill the far node, start another, cut until Ray gives that up.

    Each in the middle of a generation: the second, the third and the fifth.

    Yields:
        The pool's engines after each.
    """

    async def far_in(generation: int) -> Member:
        """The far engine when it has requests in a generation."""
        while num_recorded(log_path) != generation:
            await asyncio.sleep(0.001)
        (far,) = filter(is_there, members)
        while not far.mailbox.num_unanswered:
            await asyncio.sleep(0.0001)
        return far

    async def members_are(count: int) -> int:
        while len(members) != count:
            await asyncio.sleep(0.01)
        return count

    num_pools = len(PoolBuilder.made)
    while len(PoolBuilder.made) == num_pools:
        await asyncio.sleep(0.01)
    members = PoolBuilder.made[-1].members
    await far_in(1)
    link.set(0)
    await asyncio.sleep(SHORT)
    link.set()
    while num_recorded(log_path) == 1:
        await asyncio.sleep(0.001)
    yield len(members)
    far = await far_in(2)
    os.kill(psutil.Process(far.pid).ppid(), signal.SIGKILL)
    os.kill(far.pid, signal.SIGKILL)
    yield await members_are(1)
    await asyncio.to_thread(node.wait)
    node = start_there(link)
    yield await members_are(2)
    await far_in(4)
    link.set(0)
    yield await members_are(1)
    link.set()
    await asyncio.to_thread(node.wait)  # Told that it was given up.


def head() -> psutil.Process:
    """Of Ray's cluster."""
    return next(p for p in psutil.process_iter() if p.name() == "gcs_server")


class Generations:
    """Generations of a pool one after the other, and what is left of them in memory."""

    def __init__(self, pool: RayPool) -> None:
        sampling = SamplingParams(max_tokens=4, temperature=1.0)
        self._sampler = PopulationSampler(pool, sampling=sampling)
        self._pool = pool
        self._next = 0

    async def run(self, count: int) -> None:
        """So many more."""
        for generation in range(self._next, self._next + count):
            terms = [Term(100 * generation + i, 0.1) for i in range(8)]
            genomes_G = [Genome((term,)) for term in terms]
            await self._sampler.rollout(generation, SmallDataset().get_batch(generation), genomes_G)
            await self._pool.apply(Step(tuple(terms)))
        self._next += count

    def left(self) -> Mapping[str, float]:
        """MB of the driver and the head, objects the driver refers to, and all ever stored."""
        import ray
        from ray._private import internal_api, worker

        core = cast(Any, worker.global_worker).core_worker
        nodes = [node for node in ray.nodes() if node["Alive"]]
        stores = [
            internal_api.node_stats(
                node["NodeManagerAddress"], node["NodeManagerPort"], False
            ).store_stats
            for node in nodes
        ]
        return {
            "driver": psutil.Process().memory_info().rss / 1e6,
            "head": head().memory_info().rss / 1e6,
            "references": len(core.get_all_reference_counts()),
            "stored": sum(store.cumulative_created_objects for store in stores),
            "bytes stored": sum(store.object_store_bytes_used for store in stores),
        }


async def over_a_link(directory: Path) -> None:
    """Some hundred generations, a run that loses nodes, and one that loses the head."""
    link = Link()
    start_head(**QUICK_CHECKS)
    node = start_there(link)
    os.environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
    where: dict[str, Any] = {"address": ADDRESS, "strategy": "STRICT_SPREAD", "max_restarts": 0}
    builder = PoolBuilder(num_engines=2, engine=LightEngineBuilder(), **where)
    pool = await builder(model_name=str(BASE), search_space=TinyConfig.search_space)
    with rare_garbage_collection():
        generations = Generations(pool)
        await generations.run(100)
        before = generations.left()
        await generations.run(200)
        after = generations.left()
    await pool.close()
    engines: list[int] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(history, directory / "many", builder)
        engines = [count async for count in lose_nodes(directory / "many", link, node)]
    print(json.dumps({"before": before, "after": after, "engines": engines}), flush=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(history, directory / "lost", chz.replace(builder, num_engines=1), 100_000)
        while num_recorded(directory / "lost") < 3:
            await asyncio.sleep(0.001)
        head().kill()  # Ray ends whoever has lost it.


if __name__ == "__main__":
    if os.getpid() != 1:  # The first process of its namespace.
        os.execvp("unshare", inside(sys.executable, "-m", "tests.ray_nodes", *sys.argv[1:]))
    asyncio.run(over_a_link(Path(sys.argv[1])))
