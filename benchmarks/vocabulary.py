"""The cost of a vocabulary of 262,144 tokens, against the output head's products alone.

    python -m benchmarks.vocabulary

A llama-like model of random weights, with the width and the head of Gemma 3's smallest (640
features) and one layer, so that the head is nearly all of it. One lane, float32.

- Scoring and `tops`: 8 continuations of 128 tokens, of as many genomes. Seconds of the processor by
  those that the engine's product takes for as many rows of the head, 128 at a time; and the most
  memory beyond what was there before. All logits at once would be 1 GiB.
- Choosing a token: seconds by those of the head's product for a row.
- That product beside oneDNN's with a packed copy of the weight.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, mirrored_pairs, report, row
from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.engines.torch.kernels.products import multiply
from es_cookbook.engines.torch.slots import choose_tokens
from es_cookbook.evolution.spaces.low_rank import LowRank
from tools.bundled.countdown import CHARACTERS
from tools.small_model import build_tokenizer

VOCABULARY, WIDTH = 262_144, 640
GENOMES, PROMPT, CONTINUATION = 8, 8, 128
REPEATS = 5
_ROWS, _ROWS_CHOSEN = 128, 64
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def save_model(path: Path) -> None:
    """Write one layer of Gemma 3 270M's sizes, its head tied to its embedding."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2048, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **heads,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    build_tokenizer(CHARACTERS).save_pretrained(path)


def processor_seconds(run: Callable[[], object]) -> float:
    """Return processor seconds of all threads."""
    began = time.process_time()
    run()
    return time.process_time() - began


def head_products() -> tuple[Callable[[], None], Callable[[], None]]:
    """Multiply all scored rows by a head of this size, by the engine's kernel and oneDNN's."""
    weight, x = torch.randn(VOCABULARY, WIDTH), torch.randn(_ROWS, WIDTH)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def repeated(product: Callable[..., torch.Tensor], *arguments: object) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for _ in range(GENOMES * CONTINUATION // _ROWS):
                product(*arguments)

    packed_product = torch.ops.mkldnn._linear_pointwise
    return (
        partial(repeated, multiply, x, weight),
        partial(repeated, packed_product, x, packed, None, "none", [], ""),
    )


def _status(key: str) -> float:
    """Return an entry of this process's status, in MiB; Linux only."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


async def scoring(engine: TorchEngine, product: Callable[[], object]) -> list[Row]:
    """Measure logprobs and tops, by turns with the product."""
    await engine.load(mirrored_pairs(GENOMES))
    rng = np.random.default_rng(0)

    def requests() -> list[LogprobsRequest]:
        tokens = rng.integers(0, VOCABULARY, (GENOMES, PROMPT + CONTINUATION)).tolist()
        return [
            LogprobsRequest(g, tuple(own[:PROMPT]), tuple(own[PROMPT:]))
            for g, own in enumerate(tokens)
        ]

    rows: list[Row] = []
    for name, score in (("scoring", engine.logprobs), ("tops", engine.tops)):
        ratios: list[float] = []
        for repeat in range(-1, REPEATS):
            began = time.process_time()
            await asyncio.gather(*map(score, requests()))
            spent = time.process_time() - began
            alone = await asyncio.to_thread(processor_seconds, product)
            if repeat >= 0:
                ratios.append(spent / alone)
        rows.append(row(f"{name} / the head's product", ratios, "x", at_most=1.2))
    if _CLEAR.exists():
        before = _status("VmRSS")
        _CLEAR.write_text("5")
        await asyncio.gather(*map(engine.tops, requests()))
        grown = _status("VmHWM") - before
        rows.append(row("most memory of tops, of 1,024 tokens", [grown], "MiB", at_most=256))
    return rows


def choosing(product: Callable[[], object]) -> list[Row]:
    """Measure each way to choose, by turns with the product, whose rows are 1,024."""
    logits = 3 * torch.randn(_ROWS_CHOSEN, VOCABULARY)
    every, uniform = np.arange(_ROWS_CHOSEN), np.linspace(0, 0.99, _ROWS_CHOSEN)
    ways = {
        "greedy": (0.0, 1.0, 0.05),
        "temperature 1": (1.0, 1.0, 0.1),
        "top-p 0.9": (1.0, 0.9, 0.5),
    }
    rows: list[Row] = []
    for name, (temperature, top_p, goal) in ways.items():
        options = np.full(_ROWS_CHOSEN, temperature), np.full(_ROWS_CHOSEN, top_p), uniform
        ratios: list[float] = []
        for repeat in range(-1, REPEATS):
            chosen = processor_seconds(partial(choose_tokens, logits, *options, every))
            alone = processor_seconds(product) * _ROWS_CHOSEN / (GENOMES * CONTINUATION)
            if repeat >= 0:
                ratios.append(chosen / alone)
        rows.append(row(f"a token, {name} / its row of the head", ratios, "x", at_most=goal))
    return rows


async def scored(model: Path, product: Callable[[], object]) -> list[Row]:
    """Score with a separate engine."""
    builder = TorchEngineBuilder(device="cpu", dtype="float32", num_lanes=1)
    engine = await builder(model_name=str(model), search_space=LowRank())
    try:
        return await scoring(engine, product)
    finally:
        await engine.close()


def main() -> None:
    """Measure, and report."""
    product, packed = head_products()
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory))
        rows = asyncio.run(scored(Path(directory), product))
    rows += choosing(product)
    pairs = [(processor_seconds(product), processor_seconds(packed)) for _ in range(REPEATS)]
    rows.append(
        row("the head's product / oneDNN's, packed", [own / its for own, its in pairs], "x")
    )
    report("vocabulary", rows)


if __name__ == "__main__":
    main()
