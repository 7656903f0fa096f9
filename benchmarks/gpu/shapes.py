"""Models of billions in shape: random weights, made on the GPU, against what `plan` says."""

import asyncio
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.engines import STEP, plain_generation, shut_down, start_plain
from benchmarks.gpu.sizes import Emit, Shape, Sizes, architecture, wait
from benchmarks.gpu.torch_engine import Population
from benchmarks.gpu.vllm_engine import builder_of, prepare
from benchmarks.harness import ratios, row
from es_cookbook.checkpoints.models import load_tokenizer, parameter_infos
from es_cookbook.common.terminal import GIB
from es_cookbook.engines.base import Engine, ModelEngineBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.memory import CENTRE_WORK_BYTES
from es_cookbook.engines.wire import encode_genomes, encode_step
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.plan.plan import Plan, PlanConfig, read_architecture
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL

_VOCABULARY = 152_064
"""Of Qwen2.5 from 7 B on."""
_CONTEXT = 256
_ALONE = 0.92
"""Share of the GPU's memory for an engine that has it alone."""


def write_shape(directory: Path, shape: Shape, sizes: Sizes) -> Path:
    """Write a model directory with a file of weights that has none: engines make them up."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.save_pretrained(directory)
    vocabulary = len(tokenizer) if sizes.dry else _VOCABULARY
    architecture(shape.model, sizes.dtype, vocabulary, tied=False).save_pretrained(directory)
    (directory / "model.safetensors").touch()
    return directory


class _Case:
    """A generation on a model of a shape, with the same genomes and prompts for every engine."""

    def __init__(self, name: str, sizes: Sizes, directory: str) -> None:
        shape = sizes.shapes[name]
        self.sizes = replace(
            sizes,
            **{"genomes": shape.genomes, "problems": shape.problems, "prompt": shape.prompt},
            **{"tokens": shape.tokens, "kv_gib": shape.kv_gib, "share": _ALONE},
        )
        self.path = write_shape(Path(directory), shape, sizes)
        self.contest = Population(self.sizes, self.path)
        # vLLM has no LoRA slot for an output head that is not the embeddings too.
        self.space = LowRank(include=shape.include, exclude=("lm_head.weight",))
        self.device = torch.device(sizes.device)

    def used(self) -> int:
        """Return the bytes of the GPU that are taken by all; in a dry run, of these processes."""
        if self.device.type == "cuda":
            wait(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        own = psutil.Process()
        return sum(each.memory_info().rss for each in (own, *own.children(recursive=True)))

    def planned(self, builder: ModelEngineBuilder) -> int:
        """Return the bytes that `plan` counts for the engine, with its whole cache."""
        total = 4e9 if self.sizes.dry else torch.cuda.mem_get_info(self.device)[1]
        plan = Plan(
            PlanConfig(
                model_name=str(self.path),
                machine=f"{total / 1e9:.3f}gb",
                engine=builder,
                search_space=self.space,
                population_size=self.sizes.genomes,
                problems_per_generation=self.sizes.problems,
                prompt_tokens=self.sizes.prompt,
                sampled_tokens=self.sizes.tokens,
            ),
            read_architecture(str(self.path)),
        )
        cuda = GIB + CENTRE_WORK_BYTES  # what the plan keeps for CUDA and temporaries
        return plan.fixed + round(self.sizes.kv_gib * GIB) + cuda

    async def measure(
        self, what: str, engine: Engine, builder: ModelEngineBuilder, taken: int, emit: Emit
    ) -> list[float]:
        """Emit memory, a step, bytes sent, and the speed of a population. Returns its rates."""
        sizes, planned = self.sizes, self.planned(builder)
        moved, times = 0, list[float]()
        for _ in range(sizes.warmups + sizes.repeats):
            began = time.perf_counter()
            moved = await engine.apply(STEP)
            times.append(time.perf_counter() - began)
        emit(row(f"{what}: a step of {len(STEP.terms)} terms", times[1:] or times, "s", at_most=2))
        steps = [STEP] * (sizes.warmups + sizes.repeats)
        same = float(await engine.restore(steps) == moved)
        emit(row(f"{what}: restored with the same fingerprint", [same], "", at_least=1))
        rates: list[float] = []
        turns = {"population": lambda: self.contest.generation(engine, [self.contest.genomes_G])}
        async for found in self.contest.by_turns(turns):
            rates = self.contest.rates(found["population"], sizes.genomes)
            emit(row(f"{what}: {sizes.genomes} rank-1 genomes", rates, "tokens/s"))
        used = self.used() - taken
        emit(row(f"{what}: memory", [used / GIB], "GiB"))
        emit(row(f"{what}: memory, plan / measured", [planned / used], "x", at_least=0.9))
        emit(row(f"{what}: memory, measured / plan", [used / planned], "x", at_least=0.9))
        sent = len(encode_genomes(self.contest.genomes_G)) + len(encode_step(STEP))
        emit(row(f"{what}: sent to an engine for a generation, but prompts", [sent], "bytes"))
        return rates


def on_vllm(name: str, sizes: Sizes, _: Path, emit: Emit) -> None:
    """Measure a shape on vLLM: a population, then plain vLLM in its place."""
    prepare(sizes)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_on_vllm(_Case(name, sizes, directory), f"vLLM, {name} shape", emit))


async def _on_vllm(case: _Case, what: str, emit: Emit) -> None:
    sizes, ids = case.sizes, itertools.count()
    requests = sizes.genomes * sizes.problems
    more: dict[str, Any] = {"load_format": "dummy"}
    if not sizes.dry:
        # Graphs of decoding alone, for as many requests: without compiling it starts in time.
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        sizes_of_graphs = {"cudagraph_capture_sizes": [requests // 4, requests // 2, requests]}
        more["compilation_config"] = graphs | sizes_of_graphs
    builder = builder_of(sizes, max_model_len=_CONTEXT, extra=more)
    taken, began = case.used(), time.perf_counter()
    engine = await builder(model_name=str(case.path), search_space=case.space)
    emit(row(f"{what}: start", [time.perf_counter() - began], "s"))
    ours = await case.measure(what, engine, builder, taken, emit)
    await engine.close()
    cache, of_gpu = round(sizes.kv_gib * GIB), {"gpu_memory_utilization": sizes.share}
    plain = await asyncio.to_thread(
        lambda: start_plain(str(case.path), sizes.dtype, cache, eager=sizes.dry, more=of_gpu | more)
    )
    contest = case.contest
    async for found in contest.by_turns(
        {
            "plain": lambda: plain_generation(
                plain, ids, contest.prompts_P, sizes.genomes, sizes.tokens
            )
        }
    ):
        theirs = contest.rates(found["plain"], sizes.genomes)
        emit(row(f"{what}: plain vLLM", theirs, "tokens/s"))
        of_plain = ratios(ours[: len(theirs)], theirs)
        emit(row(f"{what}: population / plain vLLM", of_plain, "x", at_least=0.85))
    await shut_down(plain)


def on_torch(name: str, sizes: Sizes, _: Path, emit: Emit) -> None:
    """Measure a shape on the torch engine: a population, and the centre alone."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_on_torch(_Case(name, sizes, directory), f"torch, {name} shape", emit))


async def _on_torch(case: _Case, what: str, emit: Emit) -> None:
    sizes = case.sizes
    builder = TorchEngineBuilder(
        dtype=sizes.dtype,
        device=sizes.device,
        max_model_len=_CONTEXT,
        kv_cache_gib=sizes.kv_gib,
        prefix_cache_gib=0,
    )
    taken, began = case.used(), time.perf_counter()
    engine = await asyncio.to_thread(_made_here, case, builder)
    emit(row(f"{what}: start", [time.perf_counter() - began], "s"))
    ours = await case.measure(what, engine, builder, taken, emit)
    async for found in case.contest.by_turns({"centre": lambda: case.contest.centre(engine)}):
        centre = case.contest.rates(found["centre"], sizes.genomes)
        emit(row(f"{what}: the centre alone", centre, "tokens/s"))
        of_centre = ratios(ours[: len(centre)], centre)
        emit(row(f"{what}: population / centre", of_centre, "x", at_least=0.85))
    await engine.close()


def _made_here(case: _Case, builder: TorchEngineBuilder) -> Engine:
    """Return an engine of a model whose weights are made on the device, without a file."""
    from es_cookbook.engines.torch.self_check import right_path

    config = read_architecture(str(case.path)).config
    dtype = getattr(torch, case.sizes.dtype)
    with case.device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.eval().requires_grad_(False)
    space = case.space(parameter_infos(model))
    found = right_path(model, space, builder.context_length(model), dtype)
    return builder.around(model, load_tokenizer(str(case.path)), space, *found)
