"""The engines beside each other: the same bits, and what each costs.

    python -m benchmarks.engines

64 genomes × 32 Countdown problems × 24 tokens, float32, the bundled model without its
end-of-sequence token, greedy. Speed, all by turns in one run:

- plain vLLM: `AsyncLLM` without worker extension or adapters, the same 2,048 requests. On the CPU
  it runs in one process as the engine does, which is faster than as it comes;
- the vLLM engine's low-rank generation: 64 slots filled, sampled, a step applied;
- the same vLLM with full weights perturbed, one genome after the other (16 of the 64, to save
  time; a generation's step is applied once);
- plain vLLM as a plain loop perturbs it, likewise 16 of them (`benchmarks.plain_loop`);
- the torch engine's low-rank generation, in float32 and in bfloat16. What a Ray pool costs beside
  it: `benchmarks.ray_pool`.

On a busy machine the clock says little; two ratios are given of processor time as well.

Parity, from one history of three steps: the torch engine, the vLLM engine in three search spaces
and a Ray pool of two have the same fingerprint; greedy tokens and the centre's log-probabilities
are compared with the torch engine's.
"""

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
from transformers import AutoTokenizer

from benchmarks.harness import Row, mirrored_pairs, ratios, report, row
from benchmarks.sampling import endless_model, first_prompt
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.engines.base import (
    Engine,
    EngineBuilder,
    Host,
    LogprobsRequest,
    SampleRequest,
    Target,
)
from es_cookbook.engines.ray.pool import RayPoolBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import rare_garbage_collection
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import Action, Observation, SamplingParams

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

GENOMES, PROBLEMS, TOKENS = 64, 32, 24
GENOMES_ONE_BY_ONE = 16
SIGMA = 0.005
MOST_OF_THE_WEIGHTS = 800_000
"""Parameters, for the bundled model; norms and embeddings are a small part of them."""
REPEATS = 5
PARAMS = SamplingParams(max_tokens=TOKENS, logprobs=False)
STEP = Step(tuple(Term(1000 + i, 1e-4) for i in range(GENOMES // 2)))
HISTORY = (STEP, Step((Term(7, 0.002), Term(8, -0.001)), decay=0.01), Step((Term(9, 0.001),)))
GENOMES_G = mirrored_pairs(GENOMES)


async def sample(
    engine: Host,
    targets: Sequence[Target],
    prompts_P: Sequence[tuple[int, ...]],
    params: SamplingParams = PARAMS,
) -> list[Action]:
    """Return every target's greedy answer to every prompt."""
    requests = [SampleRequest(t, Observation(p), params) for t in targets for p in prompts_P]
    return list(await asyncio.gather(*map(engine.sample, requests)))


async def generation(
    engine: Engine,
    blocks: Sequence[Sequence[Genome]],
    prompts_P: Sequence[tuple[int, ...]],
    params: SamplingParams = PARAMS,
) -> dict[str, float]:
    """Return seconds of loading, sampling and stepping, for genomes hosted block after block."""
    seconds = {"load": 0.0, "sample": 0.0, "apply": 0.0}

    async def timed(what: str, work: Awaitable[object]) -> None:
        began = time.perf_counter()
        await work
        seconds[what] += time.perf_counter() - began

    for block in blocks:
        async with engine.lend() as host:
            await timed("load", host.load(block))
            await timed("sample", sample(host, range(len(block)), prompts_P, params))
    await timed("apply", engine.apply(STEP))
    return seconds | {"total": sum(seconds.values())}


def start_plain(
    path: str,
    dtype: str = "float32",
    kv_cache_bytes: int = 1 << 30,
    *,
    eager: bool = True,
    extension: str = "",
    more: Mapping[str, object] | None = None,
) -> "AsyncLLM":
    """Start vLLM without adapters, with packed weights unless an extension changes that.

    `more`: other arguments of vLLM.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments = AsyncEngineArgs(
        model=path,
        dtype=cast("Any", dtype),
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=1024,
        kv_cache_memory_bytes=kv_cache_bytes,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=extension,
        distributed_executor_backend=UniProcExecutor if current_platform.is_cpu() else None,
        **cast("dict[str, Any]", dict(more or {})),
    )
    # As many threads as the engine gives vLLM, which leaves this process a core.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(max(1, num_cores() - 1)))
        return AsyncLLM.from_engine_args(arguments)


async def shut_down(llm: "AsyncLLM") -> None:
    """Shut it down once: its destructor's attempt fails while Python exits."""
    if llm.output_handler is not None:  # it would take the end for a failure
        llm.output_handler.cancel()
    await asyncio.to_thread(llm.shutdown)
    vars(llm)["shutdown"] = lambda: None


async def plain_generation(
    llm: "AsyncLLM",
    ids: "itertools.count[int]",
    prompts_P: Sequence[tuple[int, ...]],
    genomes: int = GENOMES,
    tokens: int = TOKENS,
    prompt_logprobs: int | None = None,
) -> dict[str, float]:
    """Return seconds of the same requests on plain vLLM, with a new salt as after a step."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    params = VLLMParams(
        temperature=0.0,
        max_tokens=tokens,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    generation_salt = str(next(ids))

    async def one(genome: int, prompt: tuple[int, ...]) -> None:
        # A salt a genome: its prompts are its own, as they are with adapters.
        salt = f"{generation_salt}.{genome}"
        asked = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": salt}
        async for _ in llm.generate(cast(Any, asked), params, str(next(ids))):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(one(g, p) for g in range(genomes) for p in prompts_P))
    return {"total": time.perf_counter() - began}


def processor_seconds() -> float:
    """Return processor seconds of this process and of those that it started, as vLLM's."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def plain_loop(
    llm: "AsyncLLM", ids: "itertools.count[int]", prompts_P: Sequence[tuple[int, ...]]
) -> dict[str, float]:
    """Return seconds of one genome after the other: add noise, answer every prompt, subtract it."""
    began = time.perf_counter()
    for seed in range(GENOMES_ONE_BY_ONE):
        await llm.collective_rpc("add_noise", args=(seed, SIGMA))
        await plain_generation(llm, ids, prompts_P, genomes=1)
        await llm.collective_rpc("add_noise", args=(seed, -SIGMA))
    return {"total": time.perf_counter() - began}


async def speed(path: str, prompts_P: Sequence[tuple[int, ...]]) -> list[Row]:
    """Measure generations of every engine, by turns."""
    plain = await asyncio.to_thread(start_plain, path)
    noisy = "benchmarks.plain_loop.NoisyWorker"
    looped = await asyncio.to_thread(partial(start_plain, path, extension=noisy))
    (elements,) = await looped.collective_rpc("num_elements")
    assert elements > MOST_OF_THE_WEIGHTS, "vLLM packed the weights that noise is to be added to"
    vllm = VLLMEngineBuilder(kv_cache_gib=1.0, max_genomes=GENOMES)
    engines = {
        "vllm": await vllm(model_name=path, search_space=LowRank()),
        "one by one": await vllm(model_name=path, search_space=FullRank()),
        "torch": await TorchEngineBuilder()(model_name=path, search_space=LowRank()),
        "bfloat16": await TorchEngineBuilder(dtype="bfloat16")(
            model_name=path, search_space=LowRank()
        ),
    }
    ids = itertools.count()
    whole = [GENOMES_G]
    single = [[genome] for genome in GENOMES_G[:GENOMES_ONE_BY_ONE]]
    contestants: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
        "plain": lambda: plain_generation(plain, ids, prompts_P),
        "vllm": lambda: generation(engines["vllm"], whole, prompts_P),
        "one by one": lambda: generation(engines["one by one"], single, prompts_P),
        "plain loop": lambda: plain_loop(looped, ids, prompts_P),
        "torch": lambda: generation(engines["torch"], whole, prompts_P),
        "bfloat16": lambda: generation(engines["bfloat16"], whole, prompts_P),
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    with rare_garbage_collection():  # as in a run
        for repeat in range(-1, REPEATS):
            for name, run in contestants.items():
                before = processor_seconds()
                seconds = await run()
                if repeat >= 0:
                    times[name].append(seconds | {"processor": processor_seconds() - before})
    for engine in engines.values():
        await engine.close()
    for llm in (plain, looped):
        await shut_down(llm)

    def rate(name: str, by: str = "total") -> list[float]:
        genomes = GENOMES_ONE_BY_ONE if name in ("one by one", "plain loop") else GENOMES
        return [genomes * PROBLEMS * TOKENS / seconds[by] for seconds in times[name]]

    def of_processor(name: str) -> list[float]:
        return ratios(rate(name, "processor"), rate("plain loop", "processor"))

    def share(name: str, what: str) -> list[float]:
        return [seconds[what] / seconds["total"] for seconds in times[name]]

    ours, on_torch, loop = rate("vllm"), rate("torch"), rate("plain loop")
    return [
        row("plain vLLM, no adapters", rate("plain"), "tokens/s"),
        row("vLLM engine, 64 rank-1 genomes, slots and step included", ours, "tokens/s"),
        row(
            "vLLM engine, full weights, one genome after the other", rate("one by one"), "tokens/s"
        ),
        row("plain vLLM, noise added and subtracted, one genome after the other", loop, "tokens/s"),
        row("torch engine, 64 rank-1 genomes, tables and step included", on_torch, "tokens/s"),
        row("torch engine in bfloat16, the same", rate("bfloat16"), "tokens/s"),
        row("population / plain vLLM", ratios(ours, rate("plain")), "x", at_least=0.95),
        row("population / one by one", ratios(ours, rate("one by one")), "x", at_least=1.7),
        row("population / plain loop", ratios(ours, loop), "x", at_least=2),
        row("population on torch / plain loop on vLLM", ratios(on_torch, loop), "x", at_least=6),
        row("population / plain loop, tokens by processor time", of_processor("vllm"), "x"),
        row("the same for a population on torch", of_processor("torch"), "x"),
        row("filling 64 slots", share("vllm", "load"), "of a generation", at_most=0.05),
        row("a step of 32 terms", share("vllm", "apply"), "of a generation", at_most=0.05),
    ]


async def parity(path: str, prompts_P: Sequence[tuple[int, ...]]) -> list[Row]:
    """Compare each engine with the torch engine, search space by search space."""
    spaces: dict[str, SearchSpaceBuilder] = {
        "low rank": LowRank(),
        "full rank": FullRank(),
        "adapter": Adapter(rank=4),
    }
    rows: list[Row] = []
    for name, space in spaces.items():
        others: dict[str, EngineBuilder] = {"vLLM": VLLMEngineBuilder(kv_cache_gib=1.0)}
        if name == "low rank":
            others["Ray pool of two"] = RayPoolBuilder(num_engines=2)
        expected = await _answers(TorchEngineBuilder(), path, space, prompts_P)
        for other, builder in others.items():
            found = await _answers(builder, path, space, prompts_P)
            same = float(found[0] == expected[0])
            agreeing = [
                sum(a == b for a, b in zip(x, y, strict=False)) / max(len(x), len(y))
                for x, y in zip(found[1], expected[1], strict=True)
            ]
            tokens = sum(agreeing) / len(agreeing)
            off = max(abs(a - b) for a, b in zip(found[2], expected[2], strict=True))
            what = f"{other}, {name}"
            rows += [
                row(f"{what}: same fingerprint", [same], "", at_least=1),
                row(f"{what}: greedy tokens that agree", [tokens], "", at_least=0.995),
                row(f"{what}: log-probabilities, largest difference", [off], "", at_most=1e-4),
            ]
    return rows


async def _answers(
    builder: EngineBuilder,
    path: str,
    space: SearchSpaceBuilder,
    prompts_P: Sequence[tuple[int, ...]],
) -> tuple[int, list[tuple[int, ...]], list[float]]:
    """Return fingerprint, greedy tokens of genomes and centre, log-probabilities of the centre."""
    engine = await builder(model_name=path, search_space=space)
    fingerprint = await engine.restore(HISTORY)
    tokens: list[tuple[int, ...]] = []
    genomes_G = GENOMES_G[: GENOMES if engine.traits.capacity >= GENOMES else 4]
    genomes_G = genomes_G[:4] if isinstance(space, FullRank) else genomes_G
    size = min(engine.traits.capacity, len(genomes_G))
    for first in range(0, len(genomes_G), size):
        async with engine.lend() as host:
            block = genomes_G[first : first + size]
            await host.load(block)
            actions = await sample(host, range(len(block)), prompts_P)
            tokens += [action.tokens_T for action in actions]
    centre = await sample(engine, ["centre"], prompts_P)
    tokens += [action.tokens_T for action in centre]
    continuation = tuple(range(8, 20))  # the same for all, regardless of their samples
    requests = [LogprobsRequest("centre", prompt, continuation) for prompt in prompts_P]
    scored = await asyncio.gather(*map(engine.logprobs, requests))
    await engine.close()
    return fingerprint, tokens, [logprob for of_prompt in scored for logprob in of_prompt]


async def run() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(endless_model(Path(directory)))
        tokenizer = AutoTokenizer.from_pretrained(path)
        data = await CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(tokenizer)
        prompts_P = [await first_prompt(problem) for problem in data.train.get_batch(0)]
        report("engines", [*await speed(path, prompts_P), *await parity(path, prompts_P)])


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asyncio.run(run())
