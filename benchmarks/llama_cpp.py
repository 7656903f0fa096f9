"""The engine on llama.cpp beside llama.cpp itself, with the chat model (`make chat-model`).

    python -m benchmarks.llama_cpp

The server of llama.cpp has one adapter fixed, and answers the same prompts as each genome: tokens
per processor second of both processes of the engine are compared with those of the server's. The
server keeps the template's tokens from one round to the next, a genome computes them anew. Then
greedy answers of the base and of one genome, which is exported as an adapter, are compared with the
server's, one at a time, since kernels may round differently in another batch; and the fingerprints
of two steps with those of the torch engine over the dequantised file. One thread each.
"""

import asyncio
import importlib
import math
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import chz
import psutil

from benchmarks.harness import CHAT_MODEL, Row, mirrored_pairs, ratios, report, row
from es_cookbook.engines.base import Engine, EngineBuilder, SampleRequest, Target
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.plugins.llama_cpp.engine import LlamaCppEngineBuilder
from es_cookbook.plugins.llama_cpp.model import load
from es_cookbook.rl.types import Observation, SamplingParams

FILE = str(CHAT_MODEL)
SPACE = Adapter(rank=1, alpha=2.0)
ROWS, TOKENS, REPEATS, GENOMES, ANSWERS = 32, 16, 3, 4, 100
GENOMES_G = mirrored_pairs(64, sigma=0.03)
STEPS = [Step((Term(5, 0.01), Term(6, -0.02))), Step((Term(7, 0.01),), decay=0.1)]
_server: dict[str, Any] = {}


def start_server(adapter: str | None, rows: int) -> None:
    """Load the file into a server, with an adapter or none."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = FILE, 1
    params.n_parallel, params.n_ctx = rows, max(rows, 4) * 128
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if adapter is not None:
        info = xllamacpp.CommonAdapterLoraInfo()
        info.path, info.scale = adapter, 1.0
        params.lora_adapters = [info]
    _server["server"] = xllamacpp.Server(params)


def ask_server(prompts_P: Sequence[Sequence[int]]) -> tuple[float, list[str]]:
    """Return tokens per processor second of greedy answers, all asked at once, and their texts."""
    from concurrent.futures import ThreadPoolExecutor

    options = {"max_tokens": TOKENS, "temperature": 0, "cache_prompt": True}
    requests = [{"prompt": list(prompt), **options} for prompt in prompts_P]
    spent = time.process_time()
    with ThreadPoolExecutor(ROWS) as threads:
        answers = list(threads.map(_server["server"].handle_completions, requests))
    tokens = sum(each["usage"]["completion_tokens"] for each in answers)
    return tokens / (time.process_time() - spent), [each["choices"][0]["text"] for each in answers]


def server(adapter: str | None, rows: int) -> ProcessPoolExecutor:
    """Return a process with a server: llama.cpp may end it."""
    process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    process.submit(start_server, adapter, rows).result()
    return process


def prompts(engine: Engine, number: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return sums as prompts of the chat template, which those of other seeds do not begin like."""
    tokenizer: Any = engine.tokenizer
    draw = random.Random(seed).randint
    return [
        tuple(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": f"What is {draw(100, 999)} + {draw(10, 99)}?"}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for _ in range(number)
    ]


async def answers(
    engine: Engine, targets: Sequence[Target], prompts_P: Sequence[tuple[int, ...]]
) -> tuple[int, list[str]]:
    """Return the number of sampled tokens, and texts."""
    params = SamplingParams(max_tokens=TOKENS)
    found = await asyncio.gather(
        *(
            engine.sample(SampleRequest(target, Observation(prompt), params))
            for target in targets
            for prompt in prompts_P
        )
    )
    return sum(len(action.tokens_T) for action in found), [action.text for action in found]


def processes() -> list[psutil.Process]:
    """Return this process and the engine's."""
    this = psutil.Process()
    kids = this.children(recursive=True)
    return [this, *(kid for kid in kids if any("llama_cpp.child" in a for a in kid.cmdline()))]


def processor_seconds() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes())


def megabytes() -> float:
    """Return memory of the engine's process that is not of files."""
    return sum(p.memory_info().rss - p.memory_info().shared for p in processes()[1:]) / 1e6


async def fingerprints(builder: EngineBuilder) -> list[int]:
    """Return those of two steps."""
    engine = await builder(model_name=FILE, search_space=SPACE)
    found = [await engine.apply(step) for step in STEPS]
    await engine.close()
    return found


async def measure(adapter: Path) -> list[Row]:
    model = load(FILE, SPACE)
    model.write_genome(adapter, GENOMES_G[1])
    builder = LlamaCppEngineBuilder(threads=1, max_batch_size=ROWS)
    engine = await builder(model_name=FILE, search_space=SPACE)
    await engine.load(GENOMES_G)
    fixed = server(str(adapter), ROWS)
    ours, theirs, shares = list[float](), list[float](), list[float]()
    for repeat in range(-1, REPEATS):
        # New ones every time: the server would have the old ones in its cache.
        asked = prompts(engine, ROWS, repeat + 2)
        targets = [(repeat * GENOMES + g) % len(GENOMES_G) for g in range(GENOMES)]
        spent, before, began = processor_seconds(), engine.stats(), time.perf_counter()
        tokens, _ = await answers(engine, targets, asked)
        seconds, spent = time.perf_counter() - began, processor_seconds() - spent
        loads = engine.stats()["load_seconds"] - before["load_seconds"]
        its, _ = await asyncio.wrap_future(fixed.submit(ask_server, asked))
        if repeat >= 0:
            ours.append(tokens / spent)
            theirs.append(its)
            shares.append(100 * loads / seconds)
    rows = [
        row("tokens per processor second, population", ours, "1/s"),
        row("the same, one adapter fixed, llama.cpp's server", theirs, "1/s"),
        row("population / one adapter fixed", ratios(ours, theirs), "x", at_least=0.9),
        row("setting adapters, share of a generation", shares, "%", at_most=2),
    ]
    cells = 2 ** math.ceil(math.log2(ROWS * (TOKENS + max(map(len, prompts(engine, ROWS))))))
    cache = cells * model.bytes_per_token / 1e6
    rows.append(row("memory of llama.cpp's process besides files", [megabytes()], "MB"))
    rows.append(row("of which keys and values, at least", [cache], "MB"))
    await engine.close()
    fixed.shutdown()
    single = await chz.replace(builder, max_batch_size=1)(model_name=FILE, search_space=SPACE)
    await single.load(GENOMES_G)
    more = prompts(single, ANSWERS)
    targets_and_adapters: list[tuple[Target, str | None]] = [("base", None), (1, str(adapter))]
    for target, file in targets_and_adapters:
        process = server(file, 1)
        _, wanted = process.submit(ask_server, more).result()
        process.shutdown()
        _, found = await answers(single, [target], more)
        same = sum(a == b for a, b in zip(found, wanted, strict=True))
        who = "base" if file is None else "genome"
        rows.append(row(f"greedy answers as llama.cpp's, {who}", [same], "", at_least=ANSWERS))
    await single.close()
    both = [await fingerprints(each) for each in (builder, TorchEngineBuilder(num_lanes=1))]
    rows.append(row("fingerprints as of engine=torch", [both[0] == both[1]], "", at_least=1))
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        report("llama_cpp", asyncio.run(measure(Path(directory) / "adapter.gguf")))


if __name__ == "__main__":
    main()
