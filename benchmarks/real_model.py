"""Sampling speed of a population of a real chat model whose prompts begin alike.

    python -m benchmarks.real_model SmolLM2-135M-Instruct.Q4_1.gguf
    python -m benchmarks.real_model SmolLM2-135M-Instruct.Q4_1.gguf sums       # or examples
    python -m benchmarks.real_model SmolLM2-135M-Instruct.Q4_1.gguf vllm       # both, on vLLM too

SmolLM2-135M-Instruct in bfloat16. Its GGUF file is no part of this repository: where it is missing
nothing is measured. 32 rank-1 genomes answer 16 problems, and 16 genomes those with examples, which
take `generate` long; greedily, always 16 tokens each:

- sums: "What is 17 + 25? Answer with just the number.", by the model's chat template: 46 tokens, of
  which the first half is the same for all;
- examples: an instruction with 4 worked examples before the problem: some 200 tokens, of which all
  but 30 are the same.

Measured as in `benchmarks.sampling`: against transformers' `generate`, against the same requests of
the centre, and against the floor, which includes the common start of a genome's prompts
once.
"""

import asyncio
import dataclasses
import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.engines import generation, processor_seconds
from benchmarks.harness import Row, mirrored_pairs, ratios, report, row, share_cached
from benchmarks.sampling import Case, Contest, endless_model, rows_of
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import rare_garbage_collection
from es_cookbook.rl.types import SamplingParams

TOKENS, PROBLEMS = 16, 16
_INSTRUCTION = (
    "You are given two whole numbers to add. Add the units first, carry what is above nine, then "
    "add the tens. Write no working, no sentence and no unit: answer with the sum alone, as a "
    "number of two or three digits. Four examples show what is wanted.\n"
)
_EXAMPLES = ((23, 58), (41, 17), (66, 29), (12, 75))


def _sum_of(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with just the number."


def _prompts(
    before: str, tokenizer: PreTrainedTokenizerBase, problems: int
) -> list[tuple[int, ...]]:
    """Return sums of two numbers of two digits, after the same text, as a chat's first message."""
    rng = random.Random(0)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(problems)]
    chats = [[{"role": "user", "content": before + _sum_of(*pair)}] for pair in pairs]
    options = {"add_generation_prompt": True, "tokenize": False}
    texts = [str(tokenizer.apply_chat_template(chat, **options)) for chat in chats]
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def cases_of(file: str) -> dict[str, Case]:
    """Return both cases, of the model of a GGUF file."""
    directory = model_directory(file)
    examples = "".join(f"{_sum_of(a, b)}\n{a + b}\n" for a, b in _EXAMPLES)
    sums = Case(
        "sums",
        partial(endless_model, source=directory),
        "bfloat16",
        genomes=32,
        problems=PROBLEMS,
        tokens=TOKENS,
        repeats=3,
        generate=3,
        unperturbed=0.95,
        share=0.8,
        prompts=partial(_prompts, ""),
    )
    with_examples = dataclasses.replace(
        sums,
        name="examples",
        genomes=16,
        generate=8,
        prompts=partial(_prompts, _INSTRUCTION + examples),
    )
    return {case.name: case for case in (sums, with_examples)}


def _rows_of(loop: asyncio.AbstractEventLoop, case: Case) -> list[Row]:
    contest = Contest(loop, case)
    rows = rows_of(contest)
    stats = contest.engine.stats()
    shared = share_cached(stats)
    longest = max(map(len, contest.prompts))
    contest.close()
    return [
        *rows,
        row(f"{case.name}: longest prompt", [longest], "tokens"),
        row(f"{case.name}: prompt tokens that were shared", [100 * shared], "%"),
    ]


async def _beside_vllm(case: Case, at_least: float) -> list[Row]:
    """Measure generations of both engines, by turns, after one that does not count."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(case.make(Path(directory)))
        builders: dict[str, EngineBuilder] = {
            "torch": TorchEngineBuilder(dtype=case.dtype),
            # Blocks of 128 tokens, as they are otherwise, hold more than is shared.
            "vllm": VLLMEngineBuilder(
                dtype=case.dtype,
                kv_cache_gib=2.0,
                max_genomes=case.genomes,
                extra={"block_size": 32},
            ),
        }
        space = LowRank(rank=1)
        engines = {
            name: await builder(model_name=path, search_space=space)
            for name, builder in builders.items()
        }
        prompts_P = case.prompts(AutoTokenizer.from_pretrained(path), case.problems)
    genomes_G = mirrored_pairs(case.genomes)
    params = SamplingParams(max_tokens=case.tokens, logprobs=False)
    clock: dict[str, list[float]] = {name: [] for name in engines}
    processor: dict[str, list[float]] = {name: [] for name in engines}
    with rare_garbage_collection():
        for repeat in range(-1, case.repeats):
            for name, engine in engines.items():
                before = processor_seconds()
                seconds = await generation(engine, [genomes_G], prompts_P, params)
                if repeat >= 0:
                    processor[name].append(processor_seconds() - before)
                    clock[name].append(seconds["total"])
    shared = share_cached(engines["vllm"].stats())
    for engine in engines.values():
        await engine.close()
    tokens = case.genomes * case.problems * case.tokens
    by_clock = ratios(clock["vllm"], clock["torch"])
    by_processor = ratios(processor["vllm"], processor["torch"])
    return [
        row(f"{case.name}: on torch", [tokens / each for each in clock["torch"]], "tokens/s"),
        row(f"{case.name}: on vLLM", [tokens / each for each in clock["vllm"]], "tokens/s"),
        row(f"{case.name}: torch / vLLM, by the clock", by_clock, "x", at_least=at_least),
        row(f"{case.name}: torch / vLLM, by processor time", by_processor, "x"),
        row(f"{case.name}: prompt tokens that vLLM shared", [100 * shared], "%"),
    ]


def main() -> None:
    """Measure and report."""
    file, *names = sys.argv[1:] or ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    if not Path(file).is_file():
        raise SystemExit(f"{file} is not there: name the GGUF file of SmolLM2-135M-Instruct")
    cases = cases_of(file)
    loop = asyncio.new_event_loop()
    if names == ["vllm"]:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        goals = {"sums": 1.5, "examples": 1.2}
        rows = [
            found
            for name, case in cases.items()
            for found in loop.run_until_complete(_beside_vllm(case, goals[name]))
        ]
    else:
        rows = [found for name in names or cases for found in _rows_of(loop, cases[name])]
    loop.close()
    report("real_model", rows, " ".join(names))


if __name__ == "__main__":
    main()
