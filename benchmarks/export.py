"""Exports beside the engine: do transformers, PEFT and vLLM answer as the run did?

    python -m benchmarks.export

Two short runs on Countdown problems: the bundled model trained in low rank, and its export trained
on with adapters. What they export is loaded by the three libraries as it is and asked 100 held-out
problems, greedy, 32 tokens; an answer counts when all of its tokens are the engine's. In bfloat16
the libraries' kernels round in other places than the engine's, and where two tokens are all but
equally probable the other one may be taken; so there the number is shown without a goal, beside
that of the base itself, with which no export has anything to do.

The low-rank run is also exported as adapters of several ranks: how much of what it changed they
leave out, and how many answers stay the same.
"""

import asyncio
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.harness import Row, report, row
from benchmarks.sampling import first_prompt
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, CLIConfig
from es_cookbook.rl.types import Observation, SamplingParams
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder

PROMPTS, TOKENS = 100, 32
GENERATIONS, GENOMES = 8, 32
RANKS = (1, 8, 32, 128)
Answers: TypeAlias = list[tuple[int, ...]]
"""Sampled tokens, prompt by prompt."""


async def train_run(log_path: Path, model: Path, space: SearchSpaceBuilder) -> Path:
    """Train a short run of the main job; returns its directory."""
    config = CLIConfig(
        model_name=str(model),
        log_path=str(log_path),
        search_space=space,
        dataset=CountdownDatasetBuilder(num_test=PROMPTS, problems_per_generation=16),
        optimizer=ES(population_size=GENOMES, sigma=0.01, learning_rate=0.02),
        num_generations=GENERATIONS,
        eval_every=0,
        trackers=JsonlTrackerBuilder(),
    )
    await train(config)
    return log_path


async def engine_answers(
    run: Path | None, model: Path, space: SearchSpaceBuilder, prompts_P: Sequence[Sequence[int]]
) -> Answers:
    """Return the torch engine's answers with the centre of the run's history, or the base's."""
    engine = await TorchEngineBuilder(device="cpu")(model_name=str(model), search_space=space)
    if run is not None:
        await engine.restore([record.step for record in read_history(run / "history.jsonl")])
    params = SamplingParams(max_tokens=TOKENS, logprobs=False)
    requests = [SampleRequest("centre", Observation(tuple(p)), params) for p in prompts_P]
    actions = await asyncio.gather(*map(engine.sample, requests))
    await engine.close()
    return [action.tokens_T for action in actions]


@torch.no_grad()
def transformers_answers(
    model: PreTrainedModel | PeftModel, prompts_P: Sequence[Sequence[int]]
) -> Answers:
    """Return answers of `generate`, one prompt after the other, until the end of sequence."""
    answers: Answers = []
    for prompt in prompts_P:
        asked = torch.tensor([list(prompt)])
        mask = torch.ones_like(asked)
        sampled = cast(Any, model).generate(
            asked, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS
        )
        answers.append(tuple(sampled[0, len(prompt) :].tolist()))
    return answers


def vllm_answers(
    model: Path,
    adapters: Mapping[str, Path],
    prompts_P: Sequence[Sequence[int]],
    dtype: str,
    max_tokens: int = TOKENS,
) -> dict[str, Answers]:
    """Return answers of plain vLLM: the model's own under "", and with each adapter.

    Args:
        model: a model directory.
        adapters: name -> PEFT adapter over it.
        prompts_P: tokens.
        dtype: dtype to sample in.
        max_tokens: limit on the tokens of an answer.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    from vllm import LLM
    from vllm import SamplingParams as VLLMParams
    from vllm.lora.request import LoRARequest

    slots: dict[str, Any] = {}
    if adapters:
        slots = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 256}
    llm = LLM(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,
        max_num_seqs=128,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **slots,
    )
    ask = functools.partial(
        llm.generate,
        [{"prompt_token_ids": list(prompt)} for prompt in prompts_P],
        VLLMParams(temperature=0.0, max_tokens=max_tokens, detokenize=False),
        use_tqdm=False,
    )
    found: dict[str, Answers] = {}
    for number, (name, path) in enumerate({"": None, **adapters}.items()):
        request = None if path is None else LoRARequest(name, number, str(path))
        found[name] = [tuple(o.outputs[0].token_ids) for o in ask(lora_request=request)]
    llm.llm_engine.engine_core.shutdown()
    return found


def write(run: Path, output: Path, *, merge: bool = False, rank: int | None = None) -> str:
    """Write an export; returns its messages."""
    config = ExportConfig(log_path=str(run), output=str(output), merge=merge, rank=rank)
    return export(config)


async def compare(root: Path, base: Path, dtype: str) -> list[Row]:
    """Compare all exports of a low-rank run, and of an adapter run over what it exported."""
    data = await CountdownDatasetBuilder(num_test=PROMPTS)(AutoTokenizer.from_pretrained(base))
    prompts_P = [await first_prompt(problem) for problem in data.test_P]
    rows: list[Row] = []

    def count(what: str, found: Answers, expected: Answers) -> None:
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        goal = PROMPTS if dtype == "float32" else None
        rows.append(row(f"{dtype}, {what}", [same], "of 100 answers", at_least=goal))

    run = await train_run(root / "low rank", base, LowRank())
    write(run, root / "model")
    expected = await engine_answers(run, base, LowRank(), prompts_P)
    load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype="auto")
    of_base = await engine_answers(None, base, LowRank(), prompts_P)
    count("the base itself: transformers", transformers_answers(load(base), prompts_P), of_base)
    what = "low rank as a model"
    count(f"{what}: transformers", transformers_answers(load(root / "model"), prompts_P), expected)
    for rank in RANKS if dtype == "float32" else ():
        said = write(run, root / f"rank {rank}", rank=rank)
        error = re.search(r"relative error ([\d.e+-]+)", said)
        assert error is not None
        rows.append(row(f"rank {rank}: left out", [float(error[1])], "of the change"))
        peft = PeftModel.from_pretrained(load(base), root / f"rank {rank}")
        same = sum(
            a == b for a, b in zip(transformers_answers(peft, prompts_P), expected, strict=True)
        )
        rows.append(row(f"rank {rank}: PEFT", [same], "of 100 answers"))

    space = Adapter(rank=8)
    second = await train_run(root / "adapter", root / "model", space)
    write(second, root / "peft")
    write(second, root / "merged", merge=True)
    of_adapter = await engine_answers(second, root / "model", space, prompts_P)
    peft = PeftModel.from_pretrained(load(root / "model"), root / "peft")
    count("adapter: PEFT", transformers_answers(peft, prompts_P), of_adapter)
    whole = load(root / "peft")
    count("adapter: transformers", transformers_answers(whole, prompts_P), of_adapter)
    merged = load(root / "merged")
    count("adapter merged: transformers", transformers_answers(merged, prompts_P), of_adapter)

    adapters = {"peft": root / "peft"}
    of_vllm = await asyncio.to_thread(vllm_answers, root / "model", adapters, prompts_P, dtype)
    count(f"{what}: vLLM", of_vllm[""], expected)
    count("adapter: vLLM", of_vllm["peft"], of_adapter)
    of_vllm = await asyncio.to_thread(vllm_answers, root / "merged", {}, prompts_P, dtype)
    count("adapter merged: vLLM", of_vllm[""], of_adapter)
    return rows


def in_bfloat16(path: Path) -> Path:
    """Write the bundled model rounded to bfloat16; returns the path."""
    shutil.copytree(BUNDLED_MODEL, path)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


async def run() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "float32").mkdir()
        (root / "bfloat16").mkdir()
        rows = await compare(root / "float32", BUNDLED_MODEL, "float32")
        narrow = in_bfloat16(root / "base")
        report("export", [*rows, *await compare(root / "bfloat16", narrow, "bfloat16")])


if __name__ == "__main__":
    asyncio.run(run())
