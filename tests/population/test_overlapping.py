"""Generations that overlap: where genomes stand, what is exact about it, and what is refused."""

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar, cast

import anyio
import chz
import pytest
from typing_extensions import override

from es_cookbook import ES, LowRank, Observation, SamplingParams, open_run
from es_cookbook.common.errors import ConfigError, RequestError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.engines.base import Engine, EngineBuilder, SampleRequest
from es_cookbook.engines.ray.cluster import Cluster
from es_cookbook.engines.ray.member import Ledger
from es_cookbook.engines.ray.pool import RayPool
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.plugins.genetic.optimizer import Genetic
from es_cookbook.population.group import Attempt, EnginePolicy, ResidentBlock
from es_cookbook.rl.surrogate import Surrogate
from es_cookbook.rl.timeouts import Clock, Watch
from es_cookbook.rl.types import Action
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import rebuild
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from tests.fakes import FakeEngine, FakeEngineBuilder, Following
from tests.ray_fakes import LightEngine, LightEngineBuilder, NearCluster
from tests.runs.records import cut_run
from tests.tiny_run import TinyConfig, tiny, untimed, write_tiny_model


def config(log_path: Path, engine: EngineBuilder, **fields: Any) -> TinyConfig:
    settings: dict[str, Any] = {
        "trackers": JsonlTrackerBuilder(rollouts_per_generation=16),
        "optimizer": ES(population_size=8, sigma=0.1, learning_rate=0.05),
        "max_staleness": 1,
    }
    return tiny(log_path, engine=engine, **settings | fields)


async def history(log_path: Path, engine: EngineBuilder, **fields: Any) -> bytes:
    await train(config(log_path, engine, **fields))
    return (log_path / "history.jsonl").read_bytes()


@chz.chz
class NearPoolBuilder(EngineBuilder):
    """Builds a pool of light engines in this process."""

    num_engines: int = chz.field(default=2, doc="engines")
    dies: bool = chz.field(default=False, doc="an engine dies in a generation")
    made: ClassVar[list[RayPool]] = []

    @override
    def tokenizer(self, model_name: str) -> Any:
        return LightEngineBuilder().tokenizer(model_name)

    async def __call__(self, *, model_name: str, search_space: Any) -> Engine:
        cluster = NearCluster()
        settings = Ledger(
            *(LightEngineBuilder(), "none", LowRank(), cast(Cluster, cluster), 2, 5.0, 5.0)
        )
        pool = RayPool(settings)
        await pool.add_engines(self.num_engines)
        self.made.append(pool)
        cluster.dies_in = ["fetch", "apply", "load"] if self.dies else []
        return pool


@pytest.mark.parametrize("engine", [NearPoolBuilder(), NearPoolBuilder(num_engines=3, dies=True)])
async def test_the_history_is_the_same_on_one_engine_and_on_many(
    tmp_path: Path, engine: NearPoolBuilder
) -> None:
    alone = await history(tmp_path / "alone", LightEngineBuilder())
    assert await history(tmp_path / "many", engine) == alone
    assert await history(tmp_path / "apart", LightEngineBuilder(), max_staleness=0) != alone
    recorded = [record.centre for record in read_history(tmp_path / "many" / "history.jsonl")]
    assert recorded == [None, 0, 1, 2, 3, None, 5, 6, 7, 8, None, 10]
    if engine.dies:
        assert engine.made[-1].stats()["restarted"] >= 1


async def test_an_engine_that_is_done_begins_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine does not end a generation before another has begun the next, twice."""

    async def load(self: LightEngine, genomes_G: Any) -> None:
        await plain_load(self, genomes_G)
        if len(self.steps) == 1:
            begun[2].set()

    async def sample(self: LightEngine, request: SampleRequest) -> Action:
        generation = seeds.index(request.seed) // 2 if request.seed in seeds else 2
        if generation < 2:
            held[generation].append(self)
            begun[generation].set()
            if self is held[generation][0]:
                with anyio.fail_after(20):
                    await begun[generation + 1].wait()
        return await plain_sample(self, request)

    begun, held = [anyio.Event() for _ in range(3)], [list[LightEngine](), list[LightEngine]()]
    seeds = [derive_seed(0, "sampling", g, p, 0, 0) for g in range(2) for p in range(2)]
    alone = await history(tmp_path / "alone", LightEngineBuilder(), num_generations=4)
    plain_load, plain_sample = LightEngine.load, LightEngine.sample
    monkeypatch.setattr(LightEngine, "load", load)
    monkeypatch.setattr(LightEngine, "sample", sample)
    assert await history(tmp_path / "many", NearPoolBuilder(), num_generations=4) == alone
    assert len(set(held[1])) == 2


@pytest.mark.daily
@pytest.mark.parametrize("recorded", [1, 2, 4, 5, 6, 11])
async def test_a_run_that_stopped_anywhere_goes_on_as_if_it_had_not(
    tmp_path: Path, recorded: int
) -> None:
    whole = await history(tmp_path / "whole", LightEngineBuilder())
    shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    cut_run(tmp_path / "torn", recorded)
    assert await history(tmp_path / "torn", NearPoolBuilder()) == whole
    metrics = [untimed(tmp_path / name / "metrics.jsonl") for name in ("whole", "torn")]
    assert metrics[0] == metrics[1]


async def test_evaluations_measure_the_newest_centre(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sample(self: FakeEngine, request: SampleRequest) -> Action:
        if request.target == "centre":
            evaluated.append(len(self.steps))
        return await plain(self, request)

    evaluated: list[int] = []
    plain = FakeEngine.sample
    monkeypatch.setattr(FakeEngine, "sample", sample)
    await history(tmp_path, FakeEngineBuilder(capacity=3))
    assert evaluated == [0] * 4 + [5] * 4 + [10] * 4 + [12] * 4


@pytest.mark.slow
async def test_every_rollout_comes_back_around_the_centre_where_its_genome_stood(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    await train(
        TinyConfig(
            model_name=str(model),
            log_path=str(tmp_path / "run"),
            trackers=JsonlTrackerBuilder(rollouts_per_generation=8),
            num_generations=5,
            eval_every=3,
            max_staleness=1,
        )
    )
    recorded = open_run(tmp_path / "run", trust=["tests"])
    assert [recorded.centre_of(g) for g in range(5)] == [0, 0, 1, 3, 3]
    rebuilt = await rebuild(recorded)
    rows = (tmp_path / "run/rollouts.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        await rebuilt.go_to(row["generation"])
        played = await rebuilt.play(row["genome"], "train", row["problem"], {})
        assert played.reward == row["reward"]
    measured = read_metrics(tmp_path / "run/metrics.jsonl")[3]["test/reward/mean"]
    rewards = [(await rebuilt.play("centre", "test", p, {})).reward for p in range(4)]
    await rebuilt.close()
    assert rebuilt.generation == 4
    assert measured != sum(rewards) / 4, "generation 4's centre answers again, not generation 3's"


async def test_a_run_that_is_cancelled_leaves_no_task_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    held = tmp_path / "held"
    held.touch()
    with anyio.move_on_after(0.5) as scope:
        await history(tmp_path / "run", FakeEngineBuilder(held_by=str(held)))
    assert scope.cancelled_caught
    assert asyncio.all_tasks() == before
    assert FakeEngineBuilder.made[-1].closed
    held.unlink()
    whole = await history(tmp_path / "whole", FakeEngineBuilder())
    assert await history(tmp_path / "run", FakeEngineBuilder()) == whole


async def test_the_centre_that_an_env_asks_is_that_of_its_genomes() -> None:
    pool = await NearPoolBuilder()(model_name="none", search_space=LowRank())
    observation, watch = Observation((1,)), Watch(5)
    base = await LightEngine("", "").sample(SampleRequest("centre", observation, SamplingParams()))
    with watch:
        async with pool.lend(0) as host:
            await host.load([Genome()])
            await pool.apply(Step((Term(7, 0.25),)))
            block = ResidentBlock(range(1), [0], host, has_own_centre=True)
            clock = Clock(watch)
            with clock.running():
                attempt = Attempt(pool, SamplingParams(), block, lambda _: 0, clock)
                policy = EnginePolicy(attempt, 0)
                assert (await policy.centre.sample(observation)).text == base.text
                block.host = None
                with pytest.raises(RequestError, match=r"may have moved: .* max_staleness=0"):
                    await policy.centre.sample(observation)
    await pool.close()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_staleness": 2}, "max_staleness must be in [0, 1], found 2"),
        ({"objective": Following()}, "this objective follows them: leave one of them out"),
        ({"surrogate": Surrogate(attempts=2)}, "it needs max_staleness=0"),
        ({"batch_per_pair": True}, "must be a multiple of"),
        ({"optimizer": Genetic(population_size=4)}, "max_staleness=1: Genetic asks for genomes by"),
    ],
)
async def test_what_depends_on_the_generation_before_is_refused(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        await history(tmp_path, FakeEngineBuilder(), **fields)
    assert not (tmp_path / "history.jsonl").exists()
