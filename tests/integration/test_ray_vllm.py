"""Two vLLM engines in Ray actors: one is killed under way, and the other does its work."""

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from es_cookbook import LowRank, RayPoolBuilder, VLLMEngineBuilder
from es_cookbook.evolution.genome import AdamRule, Genome, Step, Term
from es_cookbook.rl.types import Action
from tests.engines.torch.reference import Reference, request
from tests.integration.vllm_models import make_vllm_model

pytest.importorskip("ray", reason="Ray is not installed, and could not be: see the Makefile")
pytestmark = pytest.mark.xdist_group("vllm")

STEPS = (
    Step((Term(1, 0.02), Term(2, -0.03))),
    Step(
        (Term(2, -0.03), Term(4, 0.05)),
        decay=0.25,
        rule=AdamRule((1, 1), (0.2, 0.8), (0.5, 0.5), rate=0.02, epsilon=1e-8),
    ),
)
PROMPTS = ((5, 7, 9), (11,), (5, 7, 9, 12, 30))
TEMPERATURES = (0.0, 1.0)
BLOCKS = [[Genome((Term(seed, 0.05),)) for seed in seeds] for seeds in ((1, 2, 3), (4, 5, 6))]


async def test_a_killed_engine_changes_no_answer_and_no_fingerprint(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: see the Makefile")
    path = make_vllm_model("qwen2", tmp_path / "model")
    reference = Reference(path, LowRank())
    builder = RayPoolBuilder(
        num_engines=2,
        num_cpus=1,
        max_restarts=0,
        engine=VLLMEngineBuilder(max_genomes=3, kv_cache_gib=0.05, gpu_memory_utilization=0.3),
        env={
            **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
            "TORCHDYNAMO_DISABLE": "1",  # Compiling how ranks of tokens are counted takes a second.
        },
    )
    pool = await builder(model_name=str(path), search_space=LowRank())
    try:
        assert await pool.apply(STEPS[0]) == reference.centre.apply(STEPS[0])
        answers: list[list[tuple[Any, Action]]] = [[], []]

        async def block(b: int) -> None:
            async with pool.lend() as host:
                await host.load(BLOCKS[b])
                asked = [
                    request(g, prompt, max_tokens=40, temperature=t, seed=9)
                    for t, g, prompt in itertools.product(TEMPERATURES, range(3), PROMPTS)
                ]
                tasks = [asyncio.create_task(host.sample(one)) for one in asked]
                await asyncio.sleep(0.05)
                if b == 0:
                    os.kill(pool.members[0].pid, signal.SIGKILL)
                answers[b] = list(zip(asked, await asyncio.gather(*tasks), strict=True))

        await asyncio.gather(block(0), block(1))
        assert pool.num_engines == 1
        for genomes_G, pairs in zip(BLOCKS, answers, strict=True):
            greedy, hot = (
                [pair for pair in pairs if pair[0].params.temperature == t] for t in TEMPERATURES
            )
            for g, genome in enumerate(genomes_G):
                reference.check_greedy(genome, [pair for pair in greedy if pair[0].target == g])
            async with pool.lend() as host:
                await host.load(genomes_G)
                again = await asyncio.gather(*(host.sample(asked) for asked, _ in hot))
            assert [action.tokens_T for action in again] == [found.tokens_T for _, found in hot]
        assert await pool.apply(STEPS[1]) == reference.centre.apply(STEPS[1])
        centre = [request("centre", prompt) for prompt in PROMPTS]
        found = await asyncio.gather(*map(pool.sample, centre))
        reference.check_greedy(Genome(), list(zip(centre, found, strict=True)))
    finally:
        await pool.close()
