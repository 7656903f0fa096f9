"""The engine on llama.cpp beside llama.cpp itself, with the chat model (`make chat-model`).

    python -m benchmarks.llama_cpp
    python -m benchmarks.llama_cpp memory

The server of llama.cpp has one adapter fixed, and answers the same prompts as each genome: tokens
per processor second of both processes of the engine are compared with those of the server's. The
server keeps the template's tokens from one round to the next, a genome computes them anew. Then
greedy answers of the base and of one genome, which is exported as an adapter, are compared with the
server's, one at a time, since kernels may round differently in another batch; and the fingerprints
of two steps with those of the torch engine over the dequantised file. One thread each.

`memory`: a whole run of the recipe `chat`, 64 genomes on a question, over a file with the shape of
a larger model and random weights. Resident memory of both processes, all libraries included, is
read several times a second, without pages of models' files, which the system may take back. Linux
only.
"""

import asyncio
import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import chz
import numpy as np
import psutil

from benchmarks.harness import CHAT_MODEL, Row, mirrored_pairs, ratios, report, row
from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.engines.base import Engine, EngineBuilder, SampleRequest, Target
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.plugins.gguf.header import import_gguf
from es_cookbook.plugins.llama_cpp.engine import LlamaCppEngineBuilder
from es_cookbook.plugins.llama_cpp.model import load
from es_cookbook.rl.types import Observation, SamplingParams
from tests.llama_server import started

FILE = str(CHAT_MODEL)
SPACE = Adapter(rank=1, alpha=2.0)
ROWS, TOKENS, REPEATS, GENOMES, ANSWERS = 32, 16, 3, 4, 100
GENOMES_G = mirrored_pairs(64, sigma=0.03)
STEPS = [Step((Term(5, 0.01), Term(6, -0.02))), Step((Term(7, 0.01),), decay=0.1)]
RUN = (
    *("engine=llama_cpp", "search_space=adapter", "optimizer.sigma=0.028"),
    *("optimizer.learning_rate=0.075", "optimizer.population_size=64", "num_generations=1"),
    *("dataset.problems_per_generation=1", "dataset.num_test=4", "sampling.max_tokens=2"),
)
_server: dict[str, Any] = {}


def start_server(adapter: str | None, rows: int) -> None:
    """Load the file into a server, with an adapter or none."""
    _server["server"] = started(FILE, adapter, rows, max(rows, 4) * 128)


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


def processes(driver: int | None = None) -> list[psutil.Process]:
    """Return a process, by default this one, and those of its engine."""
    this = psutil.Process(driver)
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


def write_random(file: Path, width: int, inner: int, layers: int) -> None:
    """Write a Llama with random weights in 8 bits (Q8_0) and the chat model's tokenizer."""
    gguf = import_gguf()
    writer, heads = gguf.GGUFWriter(file, "llama"), width // 64
    fields = gguf.GGUFReader(FILE).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:])
    for name, value in (
        *(("context_length", 2048), ("embedding_length", width), ("feed_forward_length", inner)),
        *(("block_count", layers), ("head_count", heads), ("head_count_kv", heads // 4)),
        ("layer_norm_rms_eps", 1e-5),
    ):
        getattr(writer, f"add_{name}")(value)
    keys = width // 4
    of_layer = {"attn_q": (width, width), "attn_k": (keys, width), "attn_v": (keys, width)}
    of_layer |= {"attn_output": (width, width), "attn_norm": (width,), "ffn_norm": (width,)}
    of_layer |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    vocabulary = len(fields["tokenizer.ggml.tokens"].contents())
    shapes = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            stored, kind = (shape[0], shape[1] // 32 * 34), gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(0).integers
    for shape in shapes.values():
        if len(shape) == 1:
            writer.write_tensor_data(np.ones(shape, np.float32))
            continue
        blocks = draw(0, 256, (shape[0], shape[1] // 32, 34), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.01 / shape[1] ** 0.5).tobytes(), np.uint8)
        writer.write_tensor_data(blocks.reshape(shape[0], -1))
    writer.close()


def memory(directory: Path) -> list[Row]:
    """Watch a run; its processes are found by name."""
    file = directory / "random.gguf"
    write_random(file, width=1024, inner=2816, layers=24)
    command = [sys.executable, "-m", "es_cookbook", "chat", f"model_name={file}", *RUN]
    where = {CACHE: str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    began, peak = time.monotonic(), [0.0, 0.0]
    run = subprocess.Popen([*command, f"log_path={directory / 'run'}"], env=os.environ | where)
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):  # One that has just ended.
            both = [beside_models(each) for each in processes(run.pid)]
            peak = [max(peak[0], sum(both)), max(peak[1], sum(both[1:]))]
        time.sleep(0.05)
    rows = [
        row("the run ended well", [run.returncode == 0], "", at_least=1),
        row("the file", [file.stat().st_size / 1e6], "MB"),
        row("both processes besides models' files", [peak[0]], "MB", at_most=1000),
        row("of which llama.cpp's process", [peak[1]], "MB"),
        row("the run's time", [time.monotonic() - began], "s", at_most=180),
    ]
    return rows


def beside_models(process: psutil.Process) -> float:
    """Return resident memory without models' files, in MB."""
    files = (".gguf", ".safetensors")
    maps = process.memory_maps()
    return sum(each.rss for each in maps if not each.path.endswith(files)) / 1e6


def main(part: str = "") -> None:
    with tempfile.TemporaryDirectory() as directory:
        if part == "memory":
            report("llama_cpp", memory(Path(directory)), part)
        else:
            report("llama_cpp", asyncio.run(measure(Path(directory) / "adapter.gguf")))


if __name__ == "__main__":
    main(*sys.argv[1:])
