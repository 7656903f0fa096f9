"""A training run as a program, small enough to be killed and begun again in a test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import chz

from es_cookbook import ES, Config, RLDatasetBuilder, SamplingParams, run
from es_cookbook.common.cli import run_cli
from es_cookbook.common.registry import Registered
from es_cookbook.evolution.optimizers.base import OptimizerBuilder
from es_cookbook.runs.presets import Preset
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.fakes import FakeEngine, FakeEngineBuilder, SmallDatasetBuilder

FILES_ALONE: Mapping[str, None] = {"live": None, **dict.fromkeys(Registered("default_trackers"))}
"""Fields of a `TrackersBuilder` that writes `metrics.jsonl` and `rollouts.jsonl` and nothing else.
"""
BASE = Path(__file__).parent / "data/base"
"""A model directory that a fake engine takes for its own."""


@chz.chz
class TinyConfig(Config):
    """A tiny run."""

    presets: ClassVar[Mapping[str, Preset]] = {"rank_2": Preset({"search_space.rank": "2"}, "")}

    dataset: RLDatasetBuilder = chz.field(default_factory=SmallDatasetBuilder, doc="problems")
    optimizer: OptimizerBuilder = chz.field(
        default=ES(population_size=4, sigma=0.1, learning_rate=0.05), doc="how it moves"
    )
    sampling: SamplingParams = chz.field(
        default=SamplingParams(max_tokens=4, temperature=1.0), doc="how tokens are drawn"
    )
    num_generations: int = chz.field(default=12, doc="length")
    eval_every: int = chz.field(default=5, doc="evaluations")


def tiny(log_path: Path, **fields: Any) -> TinyConfig:
    """Return a run on a fake engine, which resumes if its directory exists."""
    settings: dict[str, Any] = {
        "model_name": str(BASE),
        "engine": FakeEngineBuilder(capacity=3),
        "trackers": JsonlTrackerBuilder(),
        "behavior_if_log_dir_exists": "resume",
    }
    return TinyConfig(log_path=str(log_path), **settings | fields)


def write_tiny_model(path: Path, seed: int = 0, vocab_size: int = 95, context: int = 32) -> Path:
    """Write a model for a tiny run's problems, and return the path; the seed decides its weights.

    The end of sequence is token 95.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
    )
    with torch.random.fork_rng():  # transformers initialises from torch's global generator
        torch.manual_seed(seed)
        Qwen2ForCausalLM(shape).save_pretrained(path)
    FakeEngine().tokenizer.save_pretrained(path)
    return path


def untimed(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file without timings, which differ between runs."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    varying = ("time/", "throughput/")
    return [{k: v for k, v in row.items() if not k.startswith(varying)} for row in rows]


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two run directories hold the same, the histories byte for byte."""
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert untimed(one / name) == untimed(other / name)
    assert (one / "history.jsonl").read_bytes() == (other / "history.jsonl").read_bytes()


def contents(log_path: Path) -> dict[Path, bytes]:
    """Return the contents of the files of a run directory."""
    return {path: path.read_bytes() for path in log_path.iterdir()}


if __name__ == "__main__":
    run_cli(run, TinyConfig)
