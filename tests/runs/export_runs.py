"""Short training runs on tiny models, to be exported, and the engine that they are held against."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.rl.types import Action
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.program import train
from tests.engines.torch.reference import request, running_engine, sample_all
from tests.tiny_models import GROUPED, new_model, save_with_tokenizer
from tests.tiny_run import TinyConfig, tiny

_SHAPE = GROUPED | {"vocab_size": 95, "max_position_embeddings": 64}
PROMPTS = tuple((3 + i % 90, 3 + 7 * i % 89, 3 + i * i % 83) for i in range(100))


def make_base(path: Path, family: str = "llama", dtype: str = "float32", shards: int = 1) -> Path:
    """An untied Llama, a tied Qwen2 with biases (or heads for vLLM), or a Mixtral; its path."""
    if family == "llama":
        model = new_model("llama", **_SHAPE)
    elif family == "mixtral":
        model = new_model("mixtral", **_SHAPE, num_local_experts=3)
    elif family == "vllm":  # its CPU attention takes heads of 32 dimensions
        model = new_model("qwen2", **_SHAPE | {"hidden_size": 128})
    else:
        model = new_model("qwen2", **_SHAPE, tie_word_embeddings=True)
    save_with_tokenizer(model, path)
    if dtype != "float32" or shards > 1:
        (path / "model.safetensors").unlink()
        size = sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize
        model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=size // shards)
    return path


def config(
    log_path: Path, model: Path, space: SearchSpaceBuilder, dtype: str = "auto", **fields: Any
) -> TinyConfig:
    """Three generations of four genomes."""
    settings: dict[str, Any] = {
        "engine": TorchEngineBuilder(device="cpu", num_lanes=1, dtype=dtype, kv_cache_gib=0.01),
        "num_generations": 3,
        "eval_every": 0,
        "model_name": str(model),
        "search_space": space,
    }
    return tiny(log_path, **settings | fields)


async def make_run(
    log_path: Path, model: Path, space: SearchSpaceBuilder, dtype: str = "auto", **fields: Any
) -> Path:
    """Train; gives the run directory."""
    await train(config(log_path, model, space, dtype, **fields))
    return log_path


@asynccontextmanager
async def engine_at(
    run: Path,
    model: Path,
    space: SearchSpaceBuilder,
    generation: int | None = None,
    dtype: str = "auto",
) -> AsyncIterator[TorchEngine]:
    """The engine with the centre after so many generations."""
    steps = [record.step for record in read_history(run / "history.jsonl")][:generation]
    assert any(step.terms for step in steps) or generation == 0, "the run moved"
    async with running_engine(model, space, dtype=dtype, kv_cache_gib=0.01) as engine:
        await engine.restore(steps)
        yield engine


async def greedy(engine: TorchEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Action]:
    """The centre's answers."""
    return await sample_all(engine, [request("centre", prompt) for prompt in prompts])


@torch.no_grad()
def check_same_answers(model: Any, actions: Sequence[Action]) -> None:
    """Assert that these are a loaded model's own greedy answers to the prompts, all of them."""
    for prompt, action in zip(PROMPTS, actions, strict=True):
        logits = model(torch.tensor([[*prompt, *action.tokens_T]])).logits[0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == action.tokens_T
