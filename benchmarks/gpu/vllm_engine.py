"""vLLM: a population in LoRA slots against plain vLLM, one by one, without graphs, and torch.

All engines of a part stand side by side on one GPU and start at once, since each start takes tens
of seconds; the sizes leave room for that on a GPU of 40 GB.
"""

import asyncio
import contextlib
import importlib
import itertools
import os
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz
from transformers import AutoTokenizer

from benchmarks.engines import HISTORY, plain_generation, sample, shut_down, start_plain
from benchmarks.gpu.sizes import SIGMA, Emit, Sizes
from benchmarks.gpu.torch_engine import Population, Seconds, restored_on_cpu
from benchmarks.harness import mirrored_pairs, ratios, row
from benchmarks.sampling import endless_model, first_prompt
from es_cookbook.engines.base import Engine, Host, LogprobsRequest, Top
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import SamplingParams
from tests.warm_vllm import warm_context

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Set once: of engines that start at the same time each would set and unset it."""
_COMPARED = 8
"""Genomes whose answers are compared with the torch engine's."""
_TOGETHER = (1, 8, 64, 1024)
"""Numbers of requests that are answered at a time where no answer may depend on the others."""
Answers = list[tuple[int, ...]]


def prepare(sizes: Sizes) -> None:
    """Set this process's environment for engines of vLLM."""
    os.environ.update(ENVIRONMENT)
    if sizes.dry:
        os.environ["OMP_NUM_THREADS"] = "1"
        # From a process that has imported vLLM, which is most of a start on the CPU.
        vars(importlib.import_module("vllm.v1.engine.utils"))["get_mp_context"] = warm_context


def builder_of(sizes: Sizes, **options: object) -> VLLMEngineBuilder:
    """Return the builder of an engine that takes its share of the GPU."""
    builder = VLLMEngineBuilder(
        dtype=sizes.dtype,
        max_genomes=sizes.genomes,
        kv_cache_gib=sizes.kv_gib,
        gpu_memory_utilization=sizes.share,
    )
    return chz.replace(builder, **options)


class Engines:
    """Engines that start at the same time, by name."""

    def __init__(self, contest: Population, endless: Path) -> None:
        sizes, path = contest.sizes, contest.model
        self._stack = contextlib.AsyncExitStack()
        builder = builder_of(sizes)
        self._starts: Mapping[str, Callable[[], Awaitable[Any]]] = {
            "bundled": lambda: self._start(builder_of(sizes, max_genomes=_COMPARED), str(endless)),
            "plain": lambda: self._start_plain(sizes, path),
            "population": lambda: self._start(builder, path),
            "eager": lambda: self._start(builder_of(sizes, enforce_eager=True), path),
            "one by one": lambda: self._start(builder, path, FullRank()),
        }

    async def __aenter__(self) -> "Engines":
        importlib.import_module("vllm.v1.engine.async_llm")  # once, before threads do

        self._tasks = {n: asyncio.ensure_future(start()) for n, start in self._starts.items()}
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._stack.aclose()

    async def get(self, name: str) -> Engine:
        """Return an engine once it has started."""
        return await self._tasks[name]

    async def plain(self) -> "AsyncLLM":
        """Return vLLM without a population, once it has started."""
        return await self._tasks["plain"]

    async def _start(
        self, builder: VLLMEngineBuilder, path: str, space: LowRank | FullRank | None = None
    ) -> Engine:
        engine = await builder(model_name=path, search_space=space or LowRank())
        self._stack.push_async_callback(engine.close)
        return engine

    async def _start_plain(self, sizes: Sizes, path: str) -> "AsyncLLM":
        cache, more = round(sizes.kv_gib * 2**30), {"gpu_memory_utilization": sizes.share}
        llm = await asyncio.to_thread(
            lambda: start_plain(path, sizes.dtype, cache, eager=sizes.dry, more=more)
        )
        self._stack.push_async_callback(shut_down, llm)
        return llm


def vllm_engine(sizes: Sizes, model: Path, emit: Emit) -> None:
    """Measure generations of the vLLM engine, and compare its answers.

    Raises:
        RuntimeError: Some of it failed; the rest is measured all the same.
    """
    prepare(sizes)
    asyncio.run(_vllm_engine(Population(sizes, model), emit))


async def _vllm_engine(contest: Population, emit: Emit) -> None:
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        endless = endless_model(Path(directory) / "bundled")
        async with Engines(contest, endless) as engines:
            for measure in (_answers_of_torch, _population, _other_slots, _reading):
                try:
                    await measure(contest, engines, emit)
                except Exception as error:  # of any kind
                    traceback.print_exc()
                    failed.append(f"{measure.__name__.strip('_')}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))


async def _answers_of_torch(contest: Population, engines: Engines, emit: Emit) -> None:
    """Ask the torch engine on the CPU which tokens it would have chosen, and how probable they are.

    Of the bundled model's genomes, which have fewer near-ties than random weights.
    """
    engine = await engines.get("bundled")
    path = engine.tokenizer.name_or_path
    reference = await TorchEngineBuilder(dtype=contest.sizes.dtype, device="cpu")(
        model_name=path, search_space=LowRank()
    )
    same = await engine.restore(HISTORY) == await reference.restore(HISTORY)
    emit(row("vLLM, bundled model: the CPU's fingerprint", [float(same)], "", at_least=1))
    data = await CountdownDatasetBuilder(problems_per_generation=contest.sizes.problems)(
        AutoTokenizer.from_pretrained(path)
    )
    prompts_P = [await first_prompt(problem) for problem in data.train.get_batch(0)]
    first, others = _two_populations(_COMPARED)
    equal: list[bool] = []
    differences: list[float] = []
    for genomes_G in (first, others, first):  # the same slots again and again
        answers = await _answered(engine, genomes_G, prompts_P, contest.params)
        prompts = [(g, p) for g in range(len(genomes_G)) for p in prompts_P]
        asked = [LogprobsRequest(*of, a) for of, a in zip(prompts, answers, strict=True)]
        scored = await _scored(engine, genomes_G, asked)
        expected = await _scored(reference, genomes_G, asked)
        for answer, found, right in zip(answers, scored, expected, strict=True):
            equal += [top.best == token for top, token in zip(right, answer, strict=True)]
            differences += [abs(a.logprob - b.logprob) for a, b in zip(found, right, strict=True)]
    await reference.close()
    what = f"vLLM, bundled model, {_COMPARED} slots filled three times"
    share = sum(equal) / len(equal)
    emit(row(f"{what}: tokens that torch would choose", [share], "", at_least=0.99))
    # As `surrogate=gold` asks for them: log-probabilities of prompts, with LoRA.
    mean, most = sum(differences) / len(differences), max(differences)
    emit(row(f"{what}: difference of scores, mean", [mean], "nats", at_most=0.01))
    emit(row(f"{what}: difference of scores, largest", [most], "nats"))


async def _population(contest: Population, engines: Engines, emit: Emit) -> None:
    """Measure generations by turns."""
    sizes, ids = contest.sizes, itertools.count()
    population = await engines.get("population")
    same = float(await population.restore(HISTORY) == restored_on_cpu(contest))
    emit(row("vLLM engine: the CPU's fingerprint", [same], "", at_least=1))
    plain, eager = await engines.plain(), await engines.get("eager")
    single = await engines.get("one by one")
    whole = [contest.genomes_G]
    async for found in contest.by_turns(
        {
            "plain": lambda: plain_generation(
                plain, ids, contest.prompts_P, sizes.genomes, sizes.tokens
            ),
            "population": lambda: contest.generation(population, whole),
            "eager": lambda: contest.generation(eager, whole),
            "one by one": lambda: contest.generation(single, contest.blocks_one_by_one),
        }
    ):
        ours = contest.rates(found["population"], sizes.genomes)
        theirs = contest.rates(found["plain"], sizes.genomes)
        without = contest.rates(found["eager"], sizes.genomes)
        one_by_one = contest.rates(found["one by one"], sizes.one_by_one)
        of_plain, of_one = ratios(ours, theirs), ratios(ours, one_by_one)
        what = f"vLLM engine, {sizes.genomes} rank-1 genomes, slots and step included"
        emit(row("plain vLLM", theirs, "tokens/s"))
        emit(row(what, ours, "tokens/s"))
        emit(row("vLLM engine, population / plain vLLM", of_plain, "x", at_least=0.9))
        emit(row("vLLM engine, full weights, one genome after the other", one_by_one, "tokens/s"))
        emit(row("vLLM engine, population / one by one", of_one, "x", at_least=1.7))
        emit(row("vLLM engine, population without CUDA graphs", without, "tokens/s"))
        emit(row("vLLM engine, with CUDA graphs / without", ratios(ours, without), "x"))
        for stage, name in {"load": "filling slots", "apply": "a step"}.items():
            shares = [seconds[stage] / seconds["total"] for seconds in found["population"]]
            emit(row(f"vLLM engine: {name}", shares, "of a generation", at_most=0.05))


async def _other_slots(contest: Population, engines: Engines, emit: Emit) -> None:
    """Ask genomes again after others had their slots; random weights have many near-ties."""
    first, others = _two_populations(contest.sizes.genomes)
    for name, what in {"population": "with CUDA graphs", "eager": "without"}.items():
        engine = await engines.get(name)
        before, between, after = [
            await _answered(engine, genomes_G, contest.prompts_P, contest.params)
            for genomes_G in (first, others, first)
        ]
        again, other = share_equal(before, after), share_equal(before, between)
        emit(row(f"vLLM engine {what}: a genome's tokens, asked again", [again], "equal"))
        emit(row(f"vLLM engine {what}: another genome's in its slot", [other], "equal"))


async def _reading(contest: Population, engines: Engines, emit: Emit) -> None:
    """Measure prompts without answers, and log-probabilities of their second halves."""
    sizes, ids = contest.sizes, itertools.count()
    plain, population = await engines.plain(), await engines.get("population")
    prompts_P, half = contest.prompts(sizes.read), sizes.read // 2
    targets, one = range(sizes.genomes), SamplingParams(max_tokens=1)
    asked = [LogprobsRequest(g, p[:half], p[half:]) for g in targets for p in prompts_P]

    async def read(host: Host) -> None:
        await sample(host, targets, prompts_P, one)

    async def score(host: Host) -> None:
        await asyncio.gather(*map(host.logprobs, asked))

    async def loaded(work: Callable[[Host], Awaitable[None]]) -> Seconds:
        began = time.perf_counter()
        async with population.lend() as host:
            await host.load(contest.genomes_G)  # Or prompts would be found in the cache.
            await work(host)
        return {"total": time.perf_counter() - began}

    async for found in contest.by_turns(
        {
            "read": lambda: loaded(read),
            "plain read": lambda: plain_generation(plain, ids, prompts_P, sizes.genomes, 1),
            "score": lambda: loaded(score),
            "plain score": lambda: plain_generation(
                plain, ids, prompts_P, sizes.genomes, 1, prompt_logprobs=0
            ),
        }
    ):
        tokens = sizes.genomes * sizes.problems * sizes.read
        for name, what in {"read": "reading prompts", "score": "scores of prompts"}.items():
            ours = [tokens / seconds["total"] for seconds in found[name]]
            theirs = [tokens / seconds["total"] for seconds in found[f"plain {name}"]]
            emit(row(f"vLLM engine, {what}, population", ours, "tokens/s"))
            emit(row(f"vLLM engine, {what}, population / plain", ratios(ours, theirs), "x"))


def invariant(sizes: Sizes, model: Path, emit: Emit) -> None:
    """Ask the same of different batches, with vLLM's kernels that do not depend on them."""
    prepare(sizes)
    if not sizes.dry:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    asyncio.run(_invariant(Population(sizes, model), emit))


async def _invariant(contest: Population, emit: Emit) -> None:
    """Compare answers of one, a few, many and all requests at a time, each with those of fewer."""
    sizes = contest.sizes
    engine = await builder_of(sizes, enforce_eager=True)(
        model_name=contest.model, search_space=LowRank()
    )
    asked = [(g, p) for g in range(sizes.genomes) for p in contest.prompts_P]
    fewer, before = 0, Answers()
    for together in _TOGETHER:
        some = asked[: max(16, 8 * together)]  # a batch of one takes as long as one of many
        began, found = time.perf_counter(), Answers()
        async with engine.lend() as host:
            await host.load(contest.genomes_G)  # Nothing is found in the cache.
            for first in range(0, len(some), together):
                found += await _greedy(host, some[first : first + together], contest.params)
        seconds = time.perf_counter() - began
        what = f"vLLM, batch invariant, {together} requests at a time"
        if before:
            equal = share_equal(found[: len(before)], before)
            emit(row(f"{what}: tokens as with {fewer}", [equal], "", at_least=1))
        emit(row(what, [len(some) * sizes.tokens / seconds], "tokens/s"))
        fewer, before = together, found
    await engine.close()


async def _greedy(
    host: Host,
    asked: Iterable[tuple[int, tuple[int, ...]]],
    params: SamplingParams,
) -> Answers:
    answers = await asyncio.gather(*(sample(host, [g], [p], params) for g, p in asked))
    return [answer.tokens_T for (answer,) in answers]


async def _answered(
    engine: Engine,
    genomes_G: Sequence[Genome],
    prompts_P: Sequence[tuple[int, ...]],
    params: SamplingParams,
) -> Answers:
    """Return greedy answers of genomes, one after the other."""
    async with engine.lend() as host:
        await host.load(genomes_G)
        answers = await sample(host, range(len(genomes_G)), prompts_P, params)
    return [answer.tokens_T for answer in answers]


async def _scored(
    engine: Engine, genomes_G: Sequence[Genome], asked: Sequence[LogprobsRequest]
) -> list[list[Top]]:
    async with engine.lend() as host:
        await host.load(genomes_G)
        return await asyncio.gather(*map(host.tops, asked))


def _two_populations(size: int) -> tuple[list[Genome], list[Genome]]:
    genomes_G = mirrored_pairs(2 * size, SIGMA)
    return genomes_G[:size], genomes_G[size:]


def share_equal(found: Answers, expected: Answers) -> float:
    """Return the share of equal tokens, place by place."""
    pairs = [pair for x, y in zip(found, expected, strict=True) for pair in zip(x, y, strict=False)]
    longest = sum(max(len(x), len(y)) for x, y in zip(found, expected, strict=True))
    return sum(a == b for a, b in pairs) / longest
