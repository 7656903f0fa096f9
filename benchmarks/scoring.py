"""Zeroth-order tuning as an inference workload (arXiv:2605.28760): vLLM beside a loop of passes.

    python -m benchmarks.scoring            # the bundled model
    python -m benchmarks.scoring chat       # that of `make chat-model`, with smaller sizes

A generation of MeZO (two genomes) and of ES (a population) on gold answers: genomes score the same
answers to the same problems, a step is applied. Three ways to do it, by turns in one process:

- vLLM: genomes are adapters in slots, and all their requests are one workload;
- loop: the torch engine does one genome after the other, as a plain implementation does, each with
  one batch of all problems;
- together: the torch engine does all genomes at once.

All three read the same tokens and have the same genomes, and the scores are compared. Ratios are of
processor time, because other programs share the machine; those by the clock stand beside them.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.engines import processor_seconds
from benchmarks.harness import CHAT_MODEL, Row, mirrored_pairs, ratios, report, row
from benchmarks.sampling import first_prompt
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.engines.base import Engine, EngineBuilder, LogprobsRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import rare_garbage_collection
from es_cookbook.recipes.chat.dataset import ChatDatasetBuilder
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.data.generated import GeneratedDatasetBuilder
from es_cookbook.rl.rollouts import gold_of

REPEATS = 3
_STEP = Step((Term(1, 1e-6),))
Dtype: TypeAlias = Literal["float32", "bfloat16"]
Pairs: TypeAlias = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
"""Tokens of prompts and of gold answers."""


async def scores(
    engine: Engine, blocks: Sequence[Sequence[Genome]], pairs_P: Pairs
) -> tuple[list[float], float, float]:
    """Score the answers by block after block of genomes, and apply a step.

    Returns:
        Scores by genome and problem; seconds by the clock and of processors.
    """
    found: list[float] = []
    processor, began = processor_seconds(), time.perf_counter()
    for genomes in blocks:
        async with engine.lend() as host:
            await host.load(genomes)
            requests = [LogprobsRequest(g, *pair) for g in range(len(genomes)) for pair in pairs_P]
            found += map(sum, await asyncio.gather(*map(host.logprobs, requests)))
    await engine.apply(_STEP)
    return found, time.perf_counter() - began, processor_seconds() - processor


async def contest(path: str, pairs_P: Pairs, genomes: int, dtype: Dtype) -> list[Row]:
    """Run a pair and a population of so many genomes on each engine, by turns."""
    builders: dict[str, EngineBuilder] = {
        "torch": TorchEngineBuilder(dtype=dtype),
        "vLLM": VLLMEngineBuilder(dtype=dtype, kv_cache_gib=1.0, max_genomes=genomes),
    }
    engines = {
        name: await builder(model_name=path, search_space=LowRank())
        for name, builder in builders.items()
    }
    rows: list[Row] = []
    for what, number in (("MeZO, 2 genomes", 2), (f"ES, {genomes} genomes", genomes)):
        genomes_G = mirrored_pairs(number)
        ways = {
            "vLLM": ("vLLM", [genomes_G]),
            "loop": ("torch", [[genome] for genome in genomes_G]),
            "together": ("torch", [genomes_G]),
        }
        clock: dict[str, list[float]] = {way: [] for way in ways}
        processor: dict[str, list[float]] = {way: [] for way in ways}
        last: dict[str, list[float]] = {}
        with rare_garbage_collection():
            for repeat in range(-1, REPEATS):
                for way, (name, blocks) in ways.items():
                    last[way], seconds, used = await scores(engines[name], blocks, pairs_P)
                    if repeat >= 0:
                        clock[way].append(seconds)
                        processor[way].append(used)
        rows += [row(f"{what}: {way}", processor[way], "s of processors") for way in ways]
        for way in ("vLLM", "together"):
            by_processor = ratios(processor["loop"], processor[way])
            rows += [
                row(f"{what}: loop / {way}, processor time", by_processor, "x"),
                row(f"{what}: loop / {way}, by the clock", ratios(clock["loop"], clock[way]), "x"),
            ]
        off = np.abs(np.subtract(last["vLLM"], last["loop"])).max()
        rows.append(row(f"{what}: largest difference of a score", [float(off)], "nats"))
    for engine in engines.values():
        await engine.close()
    return rows


async def gold_pairs(builder: GeneratedDatasetBuilder, tokenizer: PreTrainedTokenizerBase) -> Pairs:
    """Return the tokens of a batch's prompts and gold answers."""
    problems = (await builder(tokenizer)).train.get_batch(0)
    answers = [tokenizer(gold_of(problem), add_special_tokens=False) for problem in problems]
    prompts = [await first_prompt(problem) for problem in problems]
    return [(prompt, tuple(a["input_ids"])) for prompt, a in zip(prompts, answers, strict=True)]


async def main(names: Sequence[str]) -> None:
    """Measure and report."""
    builder: GeneratedDatasetBuilder = CountdownDatasetBuilder(problems_per_generation=32)
    path, genomes, dtype = str(BUNDLED_MODEL), 64, "float32"
    if names == ["chat"]:
        builder = ChatDatasetBuilder(problems_per_generation=8)
        path, genomes, dtype = str(model_directory(str(CHAT_MODEL))), 8, "bfloat16"
    elif names:
        raise SystemExit(f"python -m benchmarks.scoring [chat]; found {' '.join(names)}")
    pairs_P = await gold_pairs(builder, AutoTokenizer.from_pretrained(path))
    report("scoring", await contest(path, pairs_P, genomes, dtype), " ".join(names))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asyncio.run(main(sys.argv[1:]))
