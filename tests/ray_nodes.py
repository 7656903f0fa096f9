"""A run over a Ray cluster of two hosts, between which the link is cut and heals again.

    python -m tests.ray_nodes LOG_PATH

runs it inside namespaces of its own (`tests.links`), with engines without a model, and prints as
JSON what it saw. The cluster is started with `ray start`, as docs/multi_gpu.md says.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import anyio
import chz
import psutil

from es_cookbook import train
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.engines.ray.member import Member
from es_cookbook.engines.ray.pool import RayPool, RayPoolBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.types import SamplingParams
from es_cookbook.train.setup import rare_garbage_collection
from tests.fakes import SmallDataset
from tests.links import HERE, THERE, Link, inside
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
LOCAL_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""The variable that tells Ray to listen on 127.0.0.1 only, if it is 0."""


def start_head(num_engines: int = 1, **system: object) -> None:
    """The head, on the host HERE, with room for engines; `system` is Ray's configuration."""
    os.environ.pop(LOCAL_ONLY, None)
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
    return os.readlink(f"/proc/{member.built.pid}/ns/net") != own


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
    await train.main(config)
    return (log_path / "history.jsonl").read_bytes()


def num_recorded(log_path: Path) -> int:
    """Generations in a run's history."""
    recorded = log_path / "history.jsonl"
    return recorded.read_bytes().count(b"\n") - 1 if recorded.exists() else 0


async def cut_twice(log_path: Path, link: Link, node: "subprocess.Popen[bytes]") -> list[int]:
    """Cut the link in the middle of the second and of the third generation.

    First for a moment, then until Ray gives the node up, after which another is started there.

    Returns:
        The pool's engines after the first cut, after the second, and with the new node.
    """

    async def cut_in(generation: int) -> None:
        while num_recorded(log_path) != generation:
            await asyncio.sleep(0.001)
        (far,) = filter(is_there, members)
        while not far.mailbox.num_unanswered:
            await asyncio.sleep(0.0001)
        link.set(0)

    while not PoolBuilder.made:
        await asyncio.sleep(0.01)
    members = PoolBuilder.made[-1].members
    await cut_in(1)
    await asyncio.sleep(SHORT)
    link.set()
    while num_recorded(log_path) == 1:
        await asyncio.sleep(0.001)
    seen = [len(members)]
    await cut_in(2)
    while len(members) == 2:
        await asyncio.sleep(0.01)
    link.set()
    seen.append(len(members))
    await asyncio.to_thread(node.wait)  # Told that it was given up.
    start_there(link)
    while len(members) == 1:
        await asyncio.sleep(0.01)
    return [*seen, len(members)]


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
        head = next(p for p in psutil.process_iter() if p.name() == "gcs_server")
        nodes = [node for node in ray.nodes() if node["Alive"]]
        stores = [
            internal_api.node_stats(
                node["NodeManagerAddress"], node["NodeManagerPort"], False
            ).store_stats
            for node in nodes
        ]
        return {
            "driver": psutil.Process().memory_info().rss / 1e6,
            "head": head.memory_info().rss / 1e6,
            "references": len(core.get_all_reference_counts()),
            "stored": sum(store.cumulative_created_objects for store in stores),
            "bytes stored": sum(store.object_store_bytes_used for store in stores),
        }


async def over_a_link(log_path: Path) -> dict[str, Any]:
    """The run whose link is cut, then some hundred generations in the same cluster."""
    link = Link()
    start_head(**QUICK_CHECKS)
    node = start_there(link)
    where: dict[str, Any] = {"address": ADDRESS, "strategy": "STRICT_SPREAD", "max_restarts": 0}
    builder = PoolBuilder(num_engines=2, engine=LightEngineBuilder(), **where)
    found: dict[str, Any] = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(history, log_path, builder)
        found["engines"] = await cut_twice(log_path, link, node)
    pool = await builder(model_name=str(BASE), search_space=TinyConfig.search_space)
    with rare_garbage_collection():
        generations = Generations(pool)
        await generations.run(100)
        found["before"] = generations.left()
        await generations.run(200)
        found["after"] = generations.left()
    await pool.close()
    return found


if __name__ == "__main__":
    if os.getpid() != 1:  # The first process of its namespace.
        os.execvp("unshare", inside(sys.executable, "-m", "tests.ray_nodes", *sys.argv[1:]))
    print(json.dumps(asyncio.run(over_a_link(Path(sys.argv[1])))))
