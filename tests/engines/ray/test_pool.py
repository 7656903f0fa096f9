"""What a pool does when engines die at the wrong moment, without Ray: actors in this process."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from es_cookbook import LowRank, Observation, RayPoolBuilder, SamplingParams
from es_cookbook.common.errors import ConfigError, EngineError, ModelError, RequestError
from es_cookbook.engines.base import LogprobsRequest, SampleRequest
from es_cookbook.engines.ray.cluster import Cluster
from es_cookbook.engines.ray.member import Ledger
from es_cookbook.engines.ray.pool import DisagreementError, RayPool
from es_cookbook.evolution.genome import Genome, Step, Term
from tests.ray_fakes import NEVER, LightEngine, LightEngineBuilder, NearCluster

GENOMES = [Genome((Term(seed, 0.5),)) for seed in range(4)]
STEPS = [Step((Term(7, 0.25),)), Step((Term(8, -0.5),), decay=0.5)]


@asynccontextmanager
async def near_pool(
    cluster: NearCluster, engines: int = 1, **fields: Any
) -> AsyncIterator[RayPool]:
    settings: dict[str, Any] = {
        "builder": LightEngineBuilder(),
        "max_restarts": 2,
        "request_timeout": 1.0,
        "start_timeout": 5.0,
    }
    where = {"model_name": "none", "search_space": LowRank(), "cluster": cast(Cluster, cluster)}
    pool = RayPool(Ledger(**where | settings | fields))
    try:
        await pool.add_engines(engines)
        yield pool
    finally:
        await pool.close()


def asked(target: Any, count: int = 8) -> list[SampleRequest]:
    return [SampleRequest(target, Observation((p + 1,)), SamplingParams(), p) for p in range(count)]


async def texts(engine: Any, requests: Sequence[SampleRequest]) -> list[str]:
    return [action.text for action in await asyncio.gather(*map(engine.sample, requests))]


async def expected(steps: Sequence[Step], target: Any) -> list[str]:
    engine = LightEngine("", "")
    await engine.restore(steps)
    await engine.load(GENOMES)
    return await texts(engine, asked(target))


@pytest.mark.parametrize(
    "dies_in",
    [
        ["load"],
        ["apply"],
        ["fetch"],
        ["apply", "build"],
        ["apply", "restore"],
        ["fetch", "load"],
        ["load", "fetch"],
    ],
    ids="+".join,
)
async def test_whenever_an_engine_dies_the_answers_are_the_same(dies_in: list[str]) -> None:
    cluster = NearCluster()
    async with near_pool(cluster) as pool:
        cluster.dies_in = list(dies_in)
        fingerprint = await pool.apply(STEPS[0])
        async with pool.lend() as host:
            await host.load(GENOMES)
            assert await texts(host, asked(2)) == await expected(STEPS[:1], 2)
        assert fingerprint == await LightEngine("", "").restore(STEPS[:1])
        assert await pool.apply(STEPS[1]) == await LightEngine("", "").restore(STEPS)
        assert await texts(pool, asked("centre")) == await expected(STEPS, "centre")
        assert cluster.dies_in == []
        assert pool.stats()["restarted"] == len(dies_in)


@pytest.mark.parametrize("fault", ["fail", "hang", "unforeseen"])
async def test_an_engine_that_fails_once_is_restarted_and_answers_are_the_same(
    tmp_path: Path, fault: str
) -> None:
    builder = LightEngineBuilder(fault=fault, flag=str(tmp_path / "flag"))
    async with near_pool(NearCluster(), engines=2, builder=builder) as pool:
        await pool.apply(STEPS[0])
        async with pool.lend() as host:
            await host.load(GENOMES)
            assert await texts(host, asked(1)) == await expected(STEPS[:1], 1)
        assert pool.stats()["restarted"] == 1
        assert await pool.apply(STEPS[1]) == await LightEngine("", "").restore(STEPS)


async def test_the_centre_is_answered_for_by_all_engines_and_logprobs_too() -> None:
    async with near_pool(NearCluster(), engines=2) as pool:
        await pool.apply(STEPS[0])
        assert await texts(pool, asked("centre")) == await expected(STEPS[:1], "centre")
        scored = LogprobsRequest("base", (1, 2), (3, 4))
        assert await pool.logprobs(scored) == await LightEngine("", "").logprobs(scored)
        many = [asyncio.create_task(pool.sample(r)) for r in asked("base", 40)]
        await asyncio.sleep(0)
        assert [host.num_unanswered for host in pool.members] == [20, 20]
        await asyncio.gather(*many)
        with pytest.raises(RequestError, match="genome 1 was requested from a pool"):
            await texts(pool, asked(1))
        with pytest.raises(EngineError, match="use its `lend`"):
            await pool.load(GENOMES)
        assert (pool.traits.capacity, pool.num_engines, pool.traits.context_length) == (4, 2, 64)
        assert pool.traits.max_terms == 8
        assert pool.stats()["requests"] == 8 + 1 + 40


async def test_requests_wait_while_the_engine_is_being_changed_and_changes_for_requests() -> None:
    async with near_pool(NearCluster()) as pool, pool.lend() as host:
        await host.load(GENOMES)
        before = asyncio.create_task(texts(host, asked(1)))
        await asyncio.sleep(0)
        moving = asyncio.create_task(pool.restore(STEPS[:1]))
        await asyncio.sleep(0)
        after = asyncio.create_task(texts(pool, asked("centre")))
        assert await before == await expected([], 1)
        await moving
        assert await after == await expected(STEPS[:1], "centre")


async def test_restarts_are_counted_from_step_to_step() -> None:
    cluster = NearCluster()
    async with near_pool(cluster) as pool:
        for step in STEPS * 2:
            cluster.dies_in = ["fetch", "fetch"]
            await texts(pool, asked("centre"))
            await pool.apply(step)
        assert pool.stats()["restarted"] == 8
        cluster.dies_in = ["fetch"] * 3
        with pytest.raises(EngineError) as caught:
            await texts(pool, asked("centre"))
        assert re.fullmatch(
            r"no engine of the pool is left \(engine \d+ of the pool is lost: its process died\); "
            "what a run has recorded stays, and it can be resumed",
            str(caught.value),
        )
        with pytest.raises(EngineError, match="no engine of the pool is left"):
            await pool.apply(STEPS[0])


async def test_an_engine_that_cannot_be_restarted_is_left_out_until_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def build(**_: Any) -> LightEngine:
        engine = LightEngine("", "")
        if 2 < cluster.calls.count("build") < 5:
            raise ModelError("the disk is gone")
        engine.drifts_on = cluster.calls.count("build") == 5
        return engine

    cluster = NearCluster()
    async with near_pool(cluster, engines=2, builder=build) as pool:
        await pool.apply(STEPS[0])
        cluster.dies_in = ["fetch"]
        assert await texts(pool, asked("centre")) == await expected(STEPS[:1], "centre")
        await asyncio.sleep(0.02)
        assert caplog.text.count("could not join the pool: the disk is gone") == 2
        assert pool.num_engines == 1
        await pool.apply(STEPS[1])
        with anyio.fail_after(5):
            while pool.num_engines < 2:
                await asyncio.sleep(0)
        assert "need the same model files" in caplog.text, "of the first after the step"
        assert await texts(pool, asked("centre")) == await expected(STEPS, "centre")


# Engines that are not all at the same step.


async def test_a_step_goes_to_engines_that_are_free_and_to_others_before_their_next_block() -> None:
    cluster = NearCluster()
    async with near_pool(cluster, engines=2) as pool:
        async with pool.lend(0) as busy:
            await busy.load(GENOMES)
            right = await LightEngine("", "").restore(STEPS[:1])
            assert await pool.apply(STEPS[0]) == right
            assert cluster.calls.count("apply") == 1
            assert await texts(busy, asked(2)) == await expected([], 2)
            assert await texts(busy, asked("centre")) == await expected([], "centre")
            async with pool.lend(1) as other:
                await other.load(GENOMES)
                assert await texts(other, asked(2)) == await expected(STEPS[:1], 2)
        async with pool.lend(1) as first, pool.lend(1) as second:
            for host in (first, second):
                await host.load(GENOMES)
                assert await texts(host, asked(1)) == await expected(STEPS[:1], 1)
        assert cluster.calls.count("apply") == 2


async def test_a_block_that_loses_its_engine_continues_on_another_at_its_own_centre() -> None:
    cluster = NearCluster()
    async with near_pool(cluster, engines=2, max_restarts=0) as pool:
        async with pool.lend(0) as behind:
            await behind.load(GENOMES)
            await pool.apply(STEPS[0])
            cluster.dies_in = ["fetch"]
            assert await texts(behind, asked(3)) == await expected([], 3)
        async with pool.lend(1) as host:
            await host.load(GENOMES)
            assert await texts(host, asked(3)) == await expected(STEPS[:1], 3)


async def test_a_snapshot_goes_to_every_engine_and_to_those_that_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Path | None] = []

    async def restore(self: LightEngine, steps: Any, snapshot: Path | None = None) -> int:
        seen.append(snapshot)
        return await plain(self, steps)

    plain = LightEngine.restore
    monkeypatch.setattr(LightEngine, "restore", restore)
    cluster, path = NearCluster(), Path("snapshots/000001.safetensors")
    async with near_pool(cluster, engines=2) as pool:
        assert seen == [None, None]
        assert await pool.restore(STEPS, path) == await plain(LightEngine("", ""), STEPS)
        assert seen[2:] == [path.absolute()] * 2
        cluster.dies_in = ["apply"]
        await pool.apply(STEPS[0])
        with anyio.fail_after(5):
            while pool.num_engines < 2:
                await asyncio.sleep(0)
        assert seen[4:] == [path.absolute()]
        await pool.restore(STEPS)
        assert seen[5:] == [None, None]


async def test_an_engine_that_a_snapshot_leads_astray_is_restored_from_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file may be there on every machine, and be another one on some."""

    async def restore(self: LightEngine, steps: Any, snapshot: Path | None = None) -> int:
        is_astray = snapshot is not None and self is astray[0]
        return await plain(self, [STEPS[1]] if is_astray else steps)

    astray: list[LightEngine] = []
    plain, built = LightEngine.restore, LightEngine.__init__
    monkeypatch.setattr(LightEngine, "restore", restore)
    monkeypatch.setattr(
        LightEngine, "__init__", lambda self, *a: (built(self, *a), astray.append(self))[0]
    )
    async with near_pool(NearCluster(), engines=3) as pool:
        found = await pool.restore(STEPS, Path("snapshots/000001.safetensors"))
        assert found == await plain(LightEngine("", ""), STEPS)
        assert await texts(pool, asked("centre")) == await expected(STEPS, "centre")


@pytest.mark.parametrize("engines", [2, 3, 5])
async def test_an_engine_that_differs_is_restored_and_named_if_it_differs_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engines: int
) -> None:
    right = await LightEngine("", "").restore(STEPS[:1])
    once = LightEngineBuilder(fault="drift", flag=str(tmp_path / "once"))
    async with near_pool(NearCluster(), engines=engines, builder=once) as pool:
        assert await pool.apply(STEPS[0]) == right
        # With two there is no majority.
        assert caplog.text.count("it is restored") == (2 if engines == 2 else 1)
        assert await texts(pool, asked("centre")) == await expected(STEPS[:1], "centre")
    again = LightEngineBuilder(fault="drifts on", flag=str(tmp_path / "again"))
    async with near_pool(NearCluster(), engines=engines, builder=again) as pool:
        with pytest.raises(DisagreementError) as caught:
            await pool.apply(STEPS[0])
        wrong = await LightEngine("", "").restore(STEPS[:1] * 2)
        assert f"{right:016x}" in str(caught.value) and f"{wrong:016x}" in str(caught.value)


async def test_an_engine_that_joins_takes_the_steps_made_meanwhile() -> None:
    may_restore = asyncio.Event()

    class Slow(LightEngine):
        async def restore(self, steps: Any, snapshot: Path | None = None) -> int:
            fingerprint = await super().restore(steps, snapshot)
            await may_restore.wait()
            return fingerprint

    async def build(**_: Any) -> LightEngine:
        return (LightEngine if cluster.calls.count("build") == 1 else Slow)("", "")

    cluster = NearCluster()
    async with near_pool(cluster, builder=build) as pool:
        joining = asyncio.create_task(pool.add_engines(1))
        while "restore" not in cluster.calls[2:]:
            await asyncio.sleep(0)
        for step in STEPS:
            await pool.apply(step)
        assert pool.num_engines == 1
        may_restore.set()
        await joining
        async with pool.lend(), pool.lend() as newcomer:
            await newcomer.load(GENOMES)
            assert await texts(newcomer, asked(1)) == await expected(STEPS, 1)


async def test_closing_ends_requests_in_flight_and_twice_is_harmless() -> None:
    async with near_pool(NearCluster(), request_timeout=60) as pool:
        never = SampleRequest("centre", Observation((NEVER,)), SamplingParams())
        waiting = asyncio.create_task(pool.sample(never))
        await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(EngineError, match="closed while this request was in flight"):
            await waiting
        await pool.close()
        for use in (pool.sample(never), pool.apply(STEPS[0])):
            with pytest.raises(EngineError, match=r"^the engine is closed$"):
                await use


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_engines": 0}, "engine.num_engines must be above 0, found 0"),
        (
            {"num_gpus": 1.5},
            "engine.num_gpus must be 0, a share of one GPU or a whole number, found 1.5",
        ),
        (
            {"engine": RayPoolBuilder()},
            "engine.engine must be an engine, not a pool again; accepted: llama_cpp, torch, vllm",
        ),
    ],
)
def test_wrong_options_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayPoolBuilder(**fields)
    assert str(caught.value) == sentence


async def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        await RayPoolBuilder()(model_name=".", search_space=LowRank())
    assert str(caught.value) == (
        "engine=ray needs ray, which is not installed: pip install 'ray>=2.50'"
    )


@pytest.mark.parametrize(
    ("products", "own"), [("bfloat16", "bfloat16"), (None, "the dtype of the weights")]
)
async def test_engines_with_products_of_different_dtypes_are_refused(
    products: str | None, own: str
) -> None:
    fastest = iter(["float32", products])

    async def build(**_: Any) -> LightEngine:
        return LightEngine("", "", next(fastest))

    with pytest.raises(ConfigError, match=rf"products in {own}, .* float32; .*products=float32"):
        async with near_pool(NearCluster(), engines=2, builder=build):
            pass
