"""Time that the torch engine's check of a model adds to loading it.

    python -m benchmarks.load

A random model in bfloat16 of Qwen2.5-0.5B's shape, on the disk (1 GB, in a temporary directory),
with the bundled tokenizer. Each of several processes builds an engine
from it; the check is timed within.
"""

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import ratios, report, row
from es_cookbook.engines.torch import self_check
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL

REPEATS = 5
KV_CACHE_GIB = 8.0


def make_model(directory: Path) -> None:
    """Write the model. Its weights are outer products of noise, which are quick to make."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        columns = torch.randn(parameter.shape[-1], generator=generator)
        if parameter.dim() > 1:
            rows = torch.randn(len(parameter), 1, generator=generator)
            parameter.data = (rows * columns * 0.02).bfloat16()
        else:
            parameter.data.fill_(1)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(directory)


def timed(function: Callable[..., object], seconds: list[float]) -> Callable[..., object]:
    """Return the function, noting what each call takes."""

    def call(*args: object) -> object:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            seconds.append(time.perf_counter() - started)

    return call


def load(path: str) -> tuple[float, float]:
    """Return seconds to build an engine, and of these to check its path."""

    async def build() -> float:
        started = time.perf_counter()
        builder = TorchEngineBuilder(kv_cache_gib=KV_CACHE_GIB)
        built = await builder(model_name=path, search_space=LowRank())
        seconds = time.perf_counter() - started
        await built.close()
        return seconds

    checks: list[float] = []
    with mock.patch.object(self_check, "right_path", timed(self_check.right_path, checks)):
        return asyncio.run(build()), checks[0]


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        new_process = multiprocessing.get_context("spawn")
        with new_process.Pool(1, maxtasksperchild=1) as pool:
            loads, checks = zip(
                *(pool.apply(load, (directory,)) for _ in range(REPEATS)), strict=True
            )
    report(
        "load",
        [
            row("load 0.5 B parameters in a new process", loads, "s"),
            row("the check of its path", checks, "s"),
            row("check / load", ratios(checks, loads), "x", at_most=0.05),
        ],
    )


if __name__ == "__main__":
    main()
