"""The engine's centre moves as `Centre` does, and is written out as it samples."""

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from es_cookbook import FullRank, LowRank
from es_cookbook.common.errors import EngineError
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.runs.centre.snapshots import SnapshotWriter
from tests.engines.torch.reference import (
    Reference,
    request,
    running_engine,
    sample_all,
    wait_until_sampling,
)
from tests.runs.recorded_run import record_run
from tests.tiny_models import CONTEXT, TinyModel

STEPS = [Step((Term(1, 0.03), Term(2, -0.04))), Step((Term(3, 0.05),), decay=0.1), Step()]
GENOMES_G = [Genome((Term(7, 0.1),)), Genome((Term(7, -0.1),))]
PROMPTS = [(5, 6, 7), (8,), (9, 9, 9, 9, 9, 9, 9, 9, 9)]


@pytest.mark.daily
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "space", [LowRank(), FullRank(), Adapter(rank=2)], ids=["low rank", "full rank", "adapter"]
)
async def test_restoring_begins_at_a_snapshot_that_can_be_read(
    tiny_model: TinyModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    space: SearchSpaceBuilder,
    dtype: str,
) -> None:
    model = tiny_model("llama")
    recorded = record_run(tmp_path / "run", model, space, STEPS, dtype=dtype)
    writer = SnapshotWriter(recorded.path, 2)
    writer.recorded(2)
    writer.finish()
    (path,) = (recorded.path / "snapshots").iterdir()
    requests = [request("centre", prompt) for prompt in PROMPTS]
    async with running_engine(model, space, dtype=dtype) as engine:
        assert await engine.restore(STEPS) == recorded.fingerprints[3]
        expected = await sample_all(engine, requests)
    async with running_engine(model, space, dtype=dtype) as engine:
        assert await engine.restore(STEPS, path) == recorded.fingerprints[3]
        assert await sample_all(engine, requests) == expected
        assert await engine.restore(STEPS[:2], path) == recorded.fingerprints[2]
        # The steps before it are not looked at: it is the snapshot that was used.
        assert await engine.restore([Step(), Step(), STEPS[2]], path) == recorded.fingerprints[3]
        assert caplog.text == ""
        assert await engine.restore(STEPS[:1], path) == recorded.fingerprints[1]
        assert "of generation 2, beyond the 1 wanted; the centre is restored from" in caplog.text
        caplog.clear()
        assert await engine.restore(STEPS, tmp_path / "elsewhere") == recorded.fingerprints[3]
        assert "cannot be read as a snapshot" in caplog.text
    caplog.clear()
    other = LowRank(include=("model.layers.1.*",))
    async with running_engine(model, other, dtype=dtype) as engine:
        assert await engine.restore(STEPS, path) == await engine.restore(STEPS)
        assert "holds other parameters than the search space" in caplog.text


@pytest.mark.parametrize(
    ("space", "dtype", "generations"),
    [
        (LowRank(), "float32", 5),
        (FullRank(), "float32", 5),
        # Of the centre itself a thousand, of every space: tests/evolution/test_centre.py.
        pytest.param(FullRank(), "bfloat16", 250, marks=pytest.mark.slow),
    ],
    ids=["low rank", "full rank", "hundreds of times in bfloat16"],
)
async def test_perturbing_and_moving_without_signal_leaves_every_bit(
    tiny_model: TinyModel, tmp_path: Path, space: SearchSpaceBuilder, dtype: str, generations: int
) -> None:
    async with running_engine(tiny_model("qwen2"), space, dtype=dtype) as engine:
        await engine.save(tmp_path / "before")
        fingerprint = await engine.restore([])
        for generation in range(generations):
            await engine.load([Genome((Term(generation, 0.1),)), Genome((Term(generation, -0.1),))])
            await engine.sample(request(0, PROMPTS[0], max_tokens=1))
            assert await engine.apply(Step()) == fingerprint
        await engine.apply(STEPS[0])
        assert await engine.restore([]) == fingerprint
        await engine.save(tmp_path / "after")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("before", "after"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("family", ["qwen2", "llama"])
async def test_a_saved_centre_is_a_model_that_transformers_runs_alike(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    requests = [request("centre", prompt) for prompt in PROMPTS]
    async with running_engine(tiny_model(family), LowRank()) as engine:
        await engine.apply(STEPS[0])
        actions = await sample_all(engine, requests)
        await engine.save(tmp_path / "saved")
        text = engine.tokenizer.decode(PROMPTS[0])
        assert await sample_all(engine, requests) == actions
    saved = Reference(tmp_path / "saved", LowRank())
    saved.check_greedy("base", list(zip(requests, actions, strict=True)))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode(text) == list(PROMPTS[0])
    async with running_engine(tmp_path / "saved", LowRank()) as engine:
        assert await sample_all(engine, requests) == actions


async def test_genomes_and_the_centre_stay_while_requests_are_in_flight(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    async with running_engine(tiny_model("qwen2"), LowRank()) as engine:
        await engine.load(GENOMES_G)
        running = asyncio.ensure_future(engine.sample(request(0, (5,), max_tokens=CONTEXT - 1)))
        await wait_until_sampling(engine)
        for change in (
            engine.load(GENOMES_G),
            engine.apply(STEPS[0]),
            engine.restore([]),
            engine.save(tmp_path / "saved"),
        ):
            with pytest.raises(EngineError, match="with 1 request in flight"):
                await change
        await running
