"""A pool of engines in processes of their own gives what one engine in this process gives.

Whatever is done to the processes meanwhile: killed, hung, made to fail or to disagree.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio
import chz
import pytest

from es_cookbook import LowRank, Observation, RayPoolBuilder, SamplingParams, TorchEngineBuilder
from es_cookbook.common.errors import EngineError, ModelError, RequestError
from es_cookbook.engines.base import EngineBuilder, SampleRequest
from es_cookbook.engines.ray.pool import RayPool
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.ray_fakes import NEVER, LightEngine, LightEngineBuilder
from tests.tiny_run import tiny, write_tiny_model

# As the pool sets it for a Ray of its own, before Ray is imported: listen on 127.0.0.1 only.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.50'")

pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests/data/base"
CPUS = 3
"""More than there are: engines of these tests mostly wait."""
GENOMES = [Genome((Term(seed, 0.5),)) for seed in range(4)]
STEP = Step((Term(7, 0.25),))
WARM = SamplingParams(max_tokens=4, temperature=1.0)


@pytest.fixture(scope="module", autouse=True)
def shared_ray() -> Iterator[None]:
    """One Ray for all pools of this module, on this machine alone."""
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=128 << 20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@asynccontextmanager
async def light_pool(**settings: Any) -> AsyncIterator[RayPool]:
    """A pool of two light engines, unless settings say otherwise."""
    fields = {"num_engines": 2, "engine": LightEngineBuilder(), "request_timeout": 30.0} | settings
    pool = await RayPoolBuilder(**fields)(model_name="none", search_space=LowRank())
    try:
        yield pool
    finally:
        await pool.close()


def requests(target: Any, count: int = 12) -> list[SampleRequest]:
    return [SampleRequest(target, Observation((p % 5 + 1,)), WARM, p) for p in range(count)]


async def texts(engine: Any, asked: Sequence[SampleRequest]) -> list[str]:
    return [action.text for action in await asyncio.gather(*map(engine.sample, asked))]


async def expected(steps: Sequence[Step], target: Any, genomes_G: Sequence[Genome]) -> list[str]:
    """What an engine in this process says."""
    engine = LightEngine("", "")
    await engine.restore(steps)
    await engine.load(genomes_G)
    return await texts(engine, requests(target))


# Whole runs with the torch engine.


@chz.chz
class PoolBuilder(RayPoolBuilder):
    """Remembers its pools."""

    made: ClassVar[list[RayPool]] = []

    async def __call__(self, **where: Any) -> RayPool:
        pool = await super().__call__(**where)
        self.made.append(pool)
        return pool


async def history(log_path: Path, model: Path, engine: EngineBuilder, **fields: Any) -> bytes:
    settings = {"model_name": str(model), "num_generations": 4, "eval_every": 3}
    await train(tiny(log_path, engine=engine, **settings | fields))
    return (log_path / "history.jsonl").read_bytes()


def metric(log_path: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(log_path / "metrics.jsonl") if key in row]


async def test_a_run_that_began_on_one_engine_goes_on_over_a_pool_of_which_one_is_killed(
    tmp_path: Path,
) -> None:
    """The pool's generations overlap."""
    model = write_tiny_model(tmp_path / "model")
    torch_engine = TorchEngineBuilder(num_lanes=1)
    fields: dict[str, Any] = {"max_staleness": 1, "num_generations": 6}
    unbroken = await history(tmp_path / "unbroken", model, torch_engine, **fields)
    begun = await history(tmp_path / "run", model, torch_engine, **fields | {"num_generations": 2})
    assert unbroken.startswith(begun) and begun.count(b"\n") == 1 + 2

    async def kill_one() -> None:
        """In the middle of a generation, a process with requests."""
        recorded = tmp_path / "run" / "history.jsonl"
        while recorded.read_bytes().count(b"\n") != 1 + 3:
            await asyncio.sleep(0.001)
        victim = PoolBuilder.made[-1].members[1]
        while not victim.num_unanswered:
            await asyncio.sleep(0.0001)
        os.kill(victim.pid, signal.SIGKILL)

    pool = PoolBuilder(num_engines=2, engine=torch_engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_one)
        assert await history(tmp_path / "run", model, pool, **fields) == unbroken
    assert unbroken.count(b'"centre":') == 4
    for key in ("test/env/all/correct", "reward/mean", "progress/tokens"):
        assert metric(tmp_path / "run", key) == metric(tmp_path / "unbroken", key)
    assert sum(metric(tmp_path / "unbroken", "engines/restarted")) == 0
    assert sum(metric(tmp_path / "run", "engines/restarted")) == 1


# Faults that a process has, with engines that need no model; `engines/ray/test_pool.py` has others.


async def test_a_rollout_is_cancelled_where_it_runs_and_errors_arrive_as_themselves() -> None:
    never = SampleRequest("centre", Observation((NEVER,)), WARM)
    too_long = SampleRequest("centre", Observation((1,) * 65), WARM)
    async with light_pool(num_engines=1) as pool, pool.lend() as host:
        for _ in range(3):
            waiting = [asyncio.create_task(host.sample(never)) for _ in range(3)]
            await asyncio.sleep(0.05)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await host.load(GENOMES)  # The engine refuses while requests are in flight.
        assert await texts(host, requests(2)) == await expected([], 2, GENOMES)
        with pytest.raises(RequestError, match=r"^the prompt is too long$"):
            await pool.sample(too_long)
        assert pool.stats()["restarted"] == 0
    with pytest.raises(ModelError, match=r"^none has no weights$"):
        async with light_pool(num_engines=1, engine=LightEngineBuilder(fault="model")):
            pass
    with pytest.raises(EngineError, match="the engine is closed"):
        await pool.sample(requests("centre")[0])


# Clusters that are not what was asked for.


ALONE = """
import asyncio
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.ray.pool import RayPoolBuilder
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.rl.types import Observation, SamplingParams
from tests.listening import listening
from tests.ray_fakes import LightEngineBuilder

async def use(**settings):
    builder = RayPoolBuilder(num_engines=2, engine=LightEngineBuilder(), **settings)
    pool = await builder(model_name="none", search_space=LowRank())
    await pool.sample(SampleRequest("centre", Observation((1,)), SamplingParams()))
    return pool

for settings in ({"address": "127.0.0.1:1"}, {"address": "auto"}, {"num_gpus": 1000}):
    try:
        asyncio.run(use(**settings))
    except ConfigError as error:
        print(error)
pools = [asyncio.run(use()), asyncio.run(use())]
print([pool.num_engines for pool in pools])
ports, elsewhere = listening()
print(ports > 0, elsewhere)
raise RuntimeError("none of them is closed")
"""


def test_a_pool_in_a_fresh_process_says_what_is_missing_and_starts_and_ends_its_ray() -> None:
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:2"}
    command = [sys.executable, "-c", ALONE]
    said = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    given, from_environment, no_gpus, at_last, reached = said.stdout.splitlines()
    assert given.startswith(
        "engine.address=127.0.0.1:1: no Ray cluster can be used there ([Errno 111] Connection "
        "refused); start one with `ray start --head`, "
    )
    assert from_environment.startswith("engine.address=auto (127.0.0.1:2): no Ray cluster can be")
    assert re.fullmatch(
        r"engine.num_engines=2 with engine.num_gpus=1000 needs 2000 GPUs, and this machine has "
        r"\d+; lower one of them \(engines can share a GPU: 0.5\), or join a cluster that has more "
        "with engine.address",
        no_gpus,
    )
    assert at_last == "[2, 2]", "the Ray outlives the event loop in which it was started"
    assert reached == "True set()", "a Ray of one's own listens on this machine alone"
    assert said.stderr.endswith("RuntimeError: none of them is closed\n")
