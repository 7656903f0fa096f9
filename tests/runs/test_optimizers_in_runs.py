"""Every optimizer in a real run: it resumes to the same bytes, from a snapshot too, and replays.

The torch engine samples a tiny model; each optimizer is given by its name, as a user would.
"""

from pathlib import Path
from typing import Any

import chz
import pytest
import torch

from es_cookbook import Config, RLDatasetBuilder, SamplingParams
from es_cookbook.common.cli import run_cli
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.base import TrackerBuilder
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.fakes import SmallDatasetBuilder
from tests.quantised_models import How, quantise
from tests.runs.records import cut_run
from tests.tiny_run import write_tiny_model

BY_BEHAVIOUR = "genetic by behaviour"
WITH_GRADIENT = "genetic with a step of the policy gradient"
ITSELF = "es that finds its numbers"
SETTINGS: dict[str, list[str]] = {
    "momentum": ["optimizer.window=3"],
    "adam": ["optimizer.window=3", "optimizer.learning_rate=0.01"],
    "rmsprop": ["search_space=steering", "optimizer.moments=block", "optimizer.learning_rate=0.01"],
    "clip_up": ["optimizer.max_speed=0.01", "optimizer.learning_rate=0.01"],
    "muon": ["optimizer.window=3", "optimizer.weight_decay=0.1"],
    "cma": ["search_space=full_rank", "search_space.include=*norm*"],
    "sep_cma": ["search_space=soft_prompt", "search_space.text=ab", "search_space.num_tokens=3"],
    "fzoo": ["search_space.noise=rademacher", "fitness=raw"],
    "lozo": ["search_space=lazy_low_rank", "search_space.rank=2", "optimizer.interval=2"],
    "qes": ["search_space=quant_codes", "optimizer.sigma=2.0", "optimizer.learning_rate=1.0"],
    "genetic": [
        *("optimizer.tournament_size=2", "optimizer.num_elites=2", "optimizer.crossover_rate=0.5"),
        *("optimizer.es_weight=0.05", "optimizer.es_weight_schedule=warmup"),
        "optimizer.es_weight_schedule.over=3",
    ],
    BY_BEHAVIOUR: [
        *("optimizer.tournament_size=2", "optimizer.truncation=1.0"),
        *("optimizer.species_by=behaviour", "optimizer.species_distance=0.1"),
    ],
    WITH_GRADIENT: ["optimizer.es_weight=0.05", "surrogate.attempts=4"],
    ITSELF: ["optimizer.sigma=auto", "optimizer.learning_rate=auto", "fitness=raw"],
    "es": [
        "optimizer.evaluate_centre=True",
        "optimizer.antithetic=False",
        "optimizer.adaptive_sigma.rate=0.5",
    ],
}


@chz.chz
class SmallConfig(Config):
    """A run of few and short rollouts, with everything else as users have it."""

    dataset: RLDatasetBuilder = chz.field(default_factory=SmallDatasetBuilder, doc="problems")
    sampling: SamplingParams = chz.field(default=SamplingParams(max_tokens=4), doc="sampling")
    trackers: TrackerBuilder = chz.field(default_factory=JsonlTrackerBuilder, doc="trackers")


def parsed(name: str, model: Path, log_path: Path, *more: str) -> SmallConfig:
    found: list[SmallConfig] = []
    shared = ["optimizer.population_size=4", "optimizer.sigma=0.1", "num_generations=5"]
    argv = [f"model_name={model}", f"log_path={log_path}", f"optimizer={name.split()[0]}", *shared]
    argv += ["engine.num_lanes=1", *SETTINGS[name], *more]
    run_cli(found.append, SmallConfig, argv)
    return found[0]


@pytest.mark.daily
@pytest.mark.parametrize("name", [*OPTIMIZER_NAMES, BY_BEHAVIOUR, WITH_GRADIENT, ITSELF])
async def test_a_run_resumes_to_the_same_bytes_and_replays(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    if name == "qes":
        how = How("compressed-tensors", symmetric=False, dtype=torch.float32)
        quantise(model, tmp_path / "codes", tmp_path / "numbers", how)
        model = tmp_path / "codes"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    await train(parsed(name, model, whole))
    await train(parsed(name, model, broken, "snapshot_every=2"))
    lines = (whole / "history.jsonl").read_bytes().splitlines(keepends=True)
    assert (broken / "history.jsonl").read_bytes() == b"".join(lines)
    assert all((b'"rewards":' in line) == (name == BY_BEHAVIOUR) for line in lines[1:])
    cut_run(broken, 3)
    await train(parsed(name, model, broken, "behavior_if_log_dir_exists=resume"))
    assert (broken / "history.jsonl").read_bytes() == b"".join(lines)
    replay: Any = open_replay(whole)
    assert any(step.terms or step.rule for step in replay.steps), "it never moved"
    assert len(list(replay.centre_tensors())) == len(replay.space.shapes)  # which compares
