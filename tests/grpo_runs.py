"""Runs of gradients that are small enough for tests: real steps on a tiny model."""

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import chz
import torch
from safetensors.torch import load_file
from typing_extensions import override

from es_cookbook import (
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    SamplingParams,
    StepResult,
    TorchEngineBuilder,
)
from es_cookbook.engines.base import Engine, EngineBuilder, SampleRequest
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.gradients.checkpoints import latest_checkpoint
from es_cookbook.plugins.gradients.gradient_config import GradientConfig
from es_cookbook.plugins.gradients.grpo.config import Config
from es_cookbook.rl.types import Action, Datasets, EnvGroup, Tokenizer
from es_cookbook.runs.tracking.base import RunInfo, Tracker, TrackerBuilder, Trackers
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.fakes import SmallDatasetBuilder
from tests.tiny_run import untimed

C = TypeVar("C", bound=GradientConfig)


def grpo_config(model: Path, log_path: Path, **changes: object) -> Config:
    """Return a run of four generations with two problems each and 16 attempts at each problem."""
    return gradient_config(Config, model, log_path, **changes)


def gradient_config(of: type[C], model: Path, log_path: Path, **changes: object) -> C:
    """Return the same for any config of a run with gradients."""
    fields: dict[str, Any] = {
        "model_name": str(model),
        "dataset": SmallDatasetBuilder(),
        "log_path": str(log_path),
        "engine": TorchEngineBuilder(device="cpu", num_lanes=1),
        "sampling": SamplingParams(max_tokens=4, temperature=1.0),
        "attempts": 16,
        "num_generations": 4,
        "learning_rate": 0.01,
        "eval_every": 2,
        "checkpoint_every": 2,
        "trackers": JsonlTrackerBuilder(),
        **changes,
    }
    return of(**fields)


async def check_resumed_as_if_never_stopped(
    main: Callable[[C], Awaitable[None]], whole: C, directory: Path
) -> C:
    """Run `whole` in `directory`, and on from its checkpoint after two of four generations.

    Returns the Config that goes on, in `copy`.
    """
    copier = CopierBuilder(generations=3)
    await main(chz.replace(whole, log_path=str(directory / "whole"), trackers=copier))
    resumed = chz.replace(
        whole, log_path=str(directory / "copy"), behavior_if_log_dir_exists="resume"
    )
    copied = latest_checkpoint(directory / "copy")
    assert copied is not None and copied.generation == 2
    assert len(metrics_of(directory / "copy")) == 3, "one more than the checkpoint has"
    await main(resumed)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert untimed(directory / "copy" / name) == untimed(directory / "whole" / name)
    weights, others = weights_of(directory / "whole"), weights_of(directory / "copy")
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    return resumed


def weights_of(log_path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    checkpoint = latest_checkpoint(log_path)
    assert checkpoint is not None
    return load_file(checkpoint.model / "model.safetensors")


def metrics_of(log_path: Path) -> list[dict[str, float]]:
    """Return the rows of `metrics.jsonl`."""
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


@chz.chz
class Listening(EngineBuilder):
    """A torch engine of which every request is kept."""

    heard: ClassVar[list[SampleRequest]] = []

    @override
    async def __call__(self, *, model_name: str, search_space: SearchSpaceBuilder) -> Engine:
        builder = TorchEngineBuilder(device="cpu", num_lanes=1)
        engine = await builder(model_name=model_name, search_space=search_space)
        sample = engine.sample

        async def listening(request: SampleRequest) -> Action:
            self.heard.append(request)
            return await sample(request)

        engine.sample = listening
        return engine


class Echo(Env):
    """Some turns: what is said comes back with a comma behind it; odd tokens earn rewards.

    Where it `forgets`, a turn's prompt is another one than that before.
    """

    def __init__(self, prompt: tuple[int, ...], turns: int, forgets: bool = False) -> None:
        self.said = prompt
        self.turns = turns
        self.forgets = forgets

    @override
    async def initial_observation(self) -> Observation:
        return Observation(self.said)

    @override
    async def step(self, action: Action) -> StepResult:
        self.turns -= 1
        self.said = (*(() if self.forgets else self.said), *action.tokens_T, 12)
        reward = sum(token % 2 for token in action.tokens_T) / len(action.tokens_T)
        done = self.turns == 0
        metrics = {"correct": float(reward > 0.5)}
        return StepResult(reward, done, None if done else Observation(self.said), metrics)


@chz.chz
class Echoes(RLDatasetBuilder):
    """Two problems of different lengths in each generation."""

    turns: int = chz.field(default=2, doc="of a rollout")
    forgets: bool = chz.field(default=False, doc="what was said before")

    @override
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        return Datasets(_EchoDataset(self))


class _EchoDataset(RLDataset):
    def __init__(self, config: Echoes) -> None:
        self.config = config

    @override
    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        prompts = (7, 8, generation + 1), (9,)
        return [EchoGroup(prompt, self.config.turns, self.config.forgets) for prompt in prompts]

    @override
    def __len__(self) -> int:
        return 2

    @override
    async def validate(self, context_length: int) -> None:
        pass


class EchoGroup(EnvGroupBuilder):
    """A prompt, the turns, and whether it forgets."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([Echo(*self.how) for _ in range(num_envs)])


class Copier(Tracker):
    """Keeps the run directory as it stands after so many generations, as a crash would leave it."""

    def __init__(self, run: RunInfo, generations: int) -> None:
        self.run, self.generations = run, generations

    def log(self, generation: int, metrics: object) -> None:
        pass

    @override
    def recorded(self, generations: int) -> None:
        if generations == self.generations:
            shutil.copytree(self.run.path, self.run.path.parent / "copy")

    def close(self) -> None:
        pass


@chz.chz
class CopierBuilder(TrackerBuilder):
    """Builds it, beside the files."""

    generations: int = chz.field(doc="after which it is copied")

    @override
    def __call__(self, run: RunInfo) -> Tracker:
        return Trackers([JsonlTrackerBuilder()(run), Copier(run, self.generations)])
