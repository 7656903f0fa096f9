"""What a generation needs on llama.cpp: memory, and seconds from a short measurement."""

import asyncio
import time
from pathlib import Path

from es_cookbook.common.terminal import plural
from es_cookbook.engines.base import Requests, SampleRequest
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.plugins.llama_cpp.child import PASS_TOKENS
from es_cookbook.plugins.llama_cpp.host import LlamaCppEngine
from es_cookbook.rl.types import Observation, SamplingParams
from es_cookbook.runs.tracking.jsonl import duration_in_words

_AT_ONCE, _TOKENS = 8, 8
"""Requests of the measurement, and tokens that each samples."""
_SIGMA = 0.01


async def measured(
    engine: LlamaCppEngine, file: Path, requests: Requests
) -> list[tuple[str, int | str]]:
    """Return labels with bytes or text, for a running engine."""
    genomes, per_genome, prompt, sampled = requests
    await engine.load([Genome((Term(seed, _SIGMA),)) for seed in range(2)])
    await _seconds(engine, 0, 1)
    before = engine.stats()["load_seconds"]
    short, whole = await _seconds(engine, 1, 1), await _seconds(engine, 0, _TOKENS)
    load = (engine.stats()["load_seconds"] - before) / 2
    of_token = max(whole - short, 0.0) / (_AT_ONCE * (_TOKENS - 1))
    of_prompt = (short - load) / PASS_TOKENS
    seconds = genomes * (load + per_genome * (prompt * of_prompt + sampled * of_token))
    took = duration_in_words(seconds) if seconds >= 10 else f"{seconds:.2g} s"
    memory = engine.memory(prompt + sampled)
    return [
        (f"{file.name} on llama.cpp, {plural(genomes, 'genome')} one after the other", ""),
        ("a generation on this machine, measured, about", took),
        ("tokens sampled a second, measured", f"{1 / max(of_token, 1e-9):,.0f}"),
        ("Memory", ""),
        ("the file, mapped", file.stat().st_size),
        *memory.items(),
    ]


async def _seconds(engine: LlamaCppEngine, target: int, tokens: int) -> float:
    """Return the seconds of requests with a pass of prompts between them."""
    params, length = SamplingParams(max_tokens=tokens), PASS_TOKENS // _AT_ONCE
    prompts = [[(i + 1) * (t + 3) % 97 for t in range(length)] for i in range(_AT_ONCE)]
    began = time.perf_counter()
    await asyncio.gather(
        *(engine.sample(SampleRequest(target, Observation(tuple(p)), params)) for p in prompts)
    )
    return time.perf_counter() - began
