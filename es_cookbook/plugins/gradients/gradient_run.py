"""A run of gradients: an ordinary run with a learner in place of a population.

There are two copies of the model. The learner's is trained, in float32. The engine's samples, and
is given the new weights after each generation as a snapshot, a file that every engine can load. So
rollouts, Envs, time-outs, evaluations and sampling seeds are those of evolution strategies, and
vLLM can sample.

Gradients have no short history: a checkpoint is the weights and AdamW's moments, several times the
model's size (`checkpoints`). Only the last one is kept. A resumed run continues from it, and
repeats later generations with the same results.

The learner is given by the caller (`Learns`): our `Learner`, or TRL's trainer.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import anyio
import chz
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from typing_extensions import override

from es_cookbook import EnvGroupBuilder, PopulationSampler, RLDataset
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.checkpoints.models import load_causal_lm, no_progress_bar
from es_cookbook.checkpoints.quantised import is_quantised
from es_cookbook.checkpoints.tensors import metadata
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, DivergedError, EngineError, RunDirectoryError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.engines.base import Engine
from es_cookbook.engines.torch.memory import trim
from es_cookbook.evolution.exact import MODULUS, fingerprint_of
from es_cookbook.plugins.gradients.checkpoints import (
    STATE,
    Checkpoint,
    latest_checkpoint,
    next_checkpoint,
    state_json,
)
from es_cookbook.plugins.gradients.gradient_config import MAY_DIFFER, GradientConfig
from es_cookbook.plugins.gradients.learner import learn_tokens_alone
from es_cookbook.rl.rollouts import answer_lengths, env_metrics, mean_of, mean_rewards
from es_cookbook.rl.types import Metrics, ProblemResult, TrajectoryGroup
from es_cookbook.runs.directory.directory import (
    CHECKPOINTS,
    CONFIG,
    GENERATION_KEYS,
    HISTORY,
    MODEL,
    TRAINED_ON,
    Recorded,
    checked_names,
    cut_lines,
)
from es_cookbook.runs.directory.opening import decided, delete_run, rows_before
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.recorder import Recorder
from es_cookbook.runs.setup import Mover, begin_recording, libraries_quiet, open_engine
from es_cookbook.runs.tracking.base import RunInfo


class Learns(Protocol):
    """A model, some of whose weights are trained."""

    model: PreTrainedModel

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The trained weights by name."""
        ...

    def save_moments(self, directory: Path) -> None:
        """Write the state of the optimizer; the weights are in the model's files."""

    def load_moments(self, directory: Path) -> None:
        """Load what `save_moments` wrote."""


_Learner = TypeVar("_Learner", bound=Learns)


@dataclasses.dataclass(eq=False, kw_only=True)
class GradientRun(Generic[_Learner]):
    """An open run; `generations` are those still to do."""

    config: GradientConfig
    generations: range
    engine: Engine
    dataset: RLDataset
    sampler: PopulationSampler
    learner: _Learner
    recorder: Recorder
    results: list[Sequence[ProblemResult]]

    async def rollout(
        self, generation: int, problems_P: Sequence[EnvGroupBuilder]
    ) -> list[TrajectoryGroup]:
        """Sample the model's attempts at every problem, with logprobs: one genome a group.

        Then the engine is idle until it takes the new weights.
        """
        sampling = chz.replace(self.config.sampling_at(generation), logprobs=True)
        attempts = self.config.attempts
        found = await self.sampler.rollout_centre(problems_P, sampling, attempts, generation)
        self.recorder.rolled_out(generation, self.sampler.seconds)
        await self.engine.rest()
        return found

    async def learn(self, generation: int, learn: Callable[[_Learner], Metrics]) -> Metrics:
        """Train the learner, in a thread, and give its weights to the engine."""
        with self.recorder.timed(generation, "learn"):
            measured = await anyio.to_thread.run_sync(_on_all_cores, learn, self.learner)
        await self.learned(generation)
        return measured

    async def learned(self, generation: int) -> None:
        """Give the learner's weights to the engine."""
        for weight in self.learner.weights.values():
            weight.grad = None  # The engine needs the memory.
        with self.recorder.timed(generation, "apply"):
            await take_weights(self.engine, self.learner.weights, Path(self.config.log_path))

    async def record(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], measured: Metrics
    ) -> None:
        """Write the metrics of a generation, and a checkpoint if one is due."""
        results_P = self.dataset.results(generation, groups_P)
        self.dataset.tell(generation, results_P)
        self.results.append(results_P)
        metrics = {
            "reward/mean": mean_of(mean_rewards(groups_P).ravel().tolist()),
            **env_metrics(groups_P),
            **answer_lengths(groups_P),
            **measured,
            "policy/nats_per_token": _nats_per_token(groups_P),
        }

        async def keep() -> None:
            done, every = generation + 1, self.config.checkpoint_every
            if done == self.config.num_generations or (every and done % every == 0):
                await anyio.to_thread.run_sync(self._write_checkpoint, done)

        await self.recorder.record(generation, groups_P, metrics, keep)

    def _write_checkpoint(self, generation: int) -> None:
        tokenizer, dtype = self.engine.tokenizer, self.engine.traits.base_dtype
        with next_checkpoint(Path(self.config.log_path), generation) as path:
            with no_progress_bar():
                self.learner.model.save_pretrained(path / MODEL)
            # It should sample as the run did, with rounded weights. The files stay float32, to
            # continue training.
            config = path / MODEL / "config.json"
            plain = json.loads(config.read_text("utf-8"))
            if plain.get("dtype") != dtype:
                config.write_text(json.dumps({**plain, "dtype": dtype}, indent=2), "utf-8")
            tokenizer.save_pretrained(path / MODEL)
            self.learner.save_moments(path)
            (path / STATE).write_text(state_json(generation, self.results), "utf-8")


class Gradients(Mover[GradientRun[_Learner]], Generic[_Learner]):
    """Gradients, which move the weights of a learner.

    `make_learner` is given a model, and the engine whose space has the weights that are to learn.
    """

    def __init__(
        self, config: GradientConfig, make_learner: Callable[[PreTrainedModel, Engine], _Learner]
    ) -> None:
        if not config.log_path:  # Commands make one up.
            raise ConfigError("log_path must name the directory of the run, found ''")
        self.log_path = Path(config.log_path)
        self._config = config
        self._config_json = config_to_json(config)
        self._make_learner = make_learner
        self._checkpoint: Checkpoint | None = None
        self._measured: Sequence[Mapping[str, float]] = ()

    @override
    async def find(self, recorded: Recorded) -> str:
        config, log_path, last = self._config, self.log_path, self._config.num_generations
        names = checked_names(log_path)
        checkpoint = latest_checkpoint(log_path)
        is_new = not names or (checkpoint is None and names <= {CONFIG, TRAINED_ON})
        if not is_new and self._goes_on(recorded, names):
            self._checkpoint, self._measured = checkpoint, recorded.metrics
            is_done = checkpoint is not None and checkpoint.generation == last
            if is_done and recorded.num_measured > last:
                return f"{log_path} is complete, with {last} generations"
        if is_quantised(config.model_name):
            raise ConfigError(
                f"model_name: {config.model_name!r} is quantised, and gradients move plain "
                "weights; take the model that it was made of, or train an adapter with sft"
            )
        config.trackers.check()
        config.dataset.check()
        model_directory(config.model_name)
        return ""

    def _goes_on(self, recorded: Recorded, names: set[str]) -> bool:
        """Return whether the recorded run continues; delete it if asked to."""
        log_path, behavior = self.log_path, self._config.behavior_if_log_dir_exists
        if behavior != "delete" and HISTORY in names:
            raise RunDirectoryError(
                f"log_path {log_path} holds a run of evolution strategies, which gradients cannot "
                "continue; give another log_path"
            )
        elsewhere = f"begin from its weights: model_name={log_path}"
        if decided(recorded, self._config_json, behavior, MAY_DIFFER, elsewhere) == "resume":
            return True
        delete_run(log_path)
        return False

    @override
    async def open(self, stack: contextlib.AsyncExitStack) -> GradientRun[_Learner]:
        config, checkpoint, log_path = self._config, self._checkpoint, self.log_path
        engine, datasets = await open_engine(config, stack)
        with libraries_quiet():
            learner = await self._learner(engine)
        results = [*checkpoint.results] if checkpoint else []
        for generation, results_P in enumerate(results):
            datasets.train.tell(generation, results_P)
        start = checkpoint.generation if checkpoint else 0
        replace_file(log_path / CONFIG, [self._config_json.encode()])
        for name in GENERATION_KEYS:  # Later generations are run again.
            cut_lines(log_path / name, start)
        sampler = config.sampler(engine, log_path)
        info = RunInfo(
            log_path,
            self._config_json,
            config.seed,
            config.num_generations,
            start,
            rows_before(self._measured, start),
            underway=sampler.underway,
            learns="model",
        )
        return GradientRun(
            config=config,
            generations=range(start, config.num_generations),
            engine=engine,
            dataset=datasets.train,
            sampler=sampler,
            learner=learner,
            recorder=begin_recording(config, info, sampler, datasets, stack),
            results=results,
        )

    async def _learner(self, engine: Engine) -> _Learner:
        """Make the learner; a checkpoint is loaded into it and the engine."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        name, checkpoint = self._config.model_name, self._checkpoint
        model = await anyio.to_thread.run_sync(load_causal_lm, name, "float32", device)
        learn_tokens_alone(model, engine.tokenizer)
        learner = self._make_learner(model, engine)
        if checkpoint is not None:
            stored = stored_weights(checkpoint, learner.weights)
            with torch.no_grad():
                for weight_name, weight in learner.weights.items():
                    weight.copy_(stored[weight_name])
            learner.load_moments(checkpoint.path)
            await take_weights(engine, learner.weights, self.log_path)
        return learner


def _on_all_cores(learn: Callable[[_Learner], Metrics], learner: _Learner) -> Metrics:
    """Learn on all cores; threads other than torch's first use one core by default."""
    torch.set_num_threads(num_cores())
    measured = learn(learner)
    trim()
    return measured


def stored_weights(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return weights of a checkpoint by name, float32 on the CPU."""
    model = load_causal_lm(str(checkpoint.model), "float32", torch.device("cpu"))
    return {name: model.get_parameter(name) for name in names}


async def take_weights(engine: Engine, weights: Mapping[str, torch.Tensor], log_path: Path) -> None:
    """Make weights, all of the engine's search space, its centre.

    They pass through a file in the run directory, which engines on other machines may read.

    Raises:
        DivergedError: Some are not finite.
        EngineError: The engine reports another fingerprint.
    """
    taken = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    for name, weight in taken.items():
        if not weight.sum().isfinite():
            raise DivergedError(
                f"training has diverged: {name} has numbers that are not finite; lower "
                "learning_rate"
            )
    spans = (fingerprint_of(name, weight) for name, weight in taken.items())
    fingerprint = sum(spans) % MODULUS
    path = log_path / CHECKPOINTS / "centre.safetensors"
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(taken, path, metadata(0, fingerprint))
        if await engine.restore([], path) != fingerprint:
            raise EngineError(f"the engine could not take the new weights from {path}")
    finally:
        path.unlink(missing_ok=True)


def _nats_per_token(groups_P: Sequence[TrajectoryGroup]) -> float:
    """Return the mean -log-probability of sampled tokens: an estimate of the entropy."""
    logprobs = [
        logprob
        for group in groups_P
        for _, trajectory in group.finished
        for transition in trajectory.transitions
        for logprob in transition.action.logprobs_T or ()
    ]
    return -mean_of(logprobs)
