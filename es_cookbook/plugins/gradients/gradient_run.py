"""What a run of gradients opens, records and closes; its directory is read by the same tools.

The model is there twice. A learner has the one that gradients move, in float32. The engine has
the one that answers, and is given the moved weights after each generation, as a snapshot: a file
that every engine can begin at. So rollouts, Envs, time-outs, evaluations and their sampling seeds
are those of evolution strategies, and vLLM samples where it is chosen.

A gradient has no short history: the checkpoint is the weights and AdamW's moments, several times
the model's own size, in `checkpoints/<generation>/`. Only the last one is kept. A resumed run goes
on from it, and generations after it are done again and come out the same.

    config.json  metrics.jsonl  rollouts.jsonl  log.txt
    checkpoints/<generation>/model       a Hugging Face model directory
    checkpoints/<generation>/optimizer.safetensors, state.json

What a learner is, is the caller's to say (`_Learns`): our own `Learner`, or TRL's trainer.
"""

import contextlib
import functools
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import anyio
import chz
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from typing_extensions import override

from es_cookbook.checkpoints.models import load_causal_lm, no_progress_bar
from es_cookbook.checkpoints.snapshots import metadata
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import EngineError
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.common.machine.scratch import scratch
from es_cookbook.common.terminal import done_saying, no_silence
from es_cookbook.engines.base import Engine
from es_cookbook.engines.torch.memory import trim
from es_cookbook.engines.vocabulary import learn_tokens_alone
from es_cookbook.evolution.exact import MODULUS, fingerprint_span
from es_cookbook.plugins.gradients.checkpoints import begin
from es_cookbook.plugins.gradients.gradient_config import GradientConfig
from es_cookbook.population.evaluate import evaluate
from es_cookbook.rl.rollouts import (
    answer_lengths,
    count_answers,
    count_tokens,
    env_metrics,
    mean_of,
    mean_rewards,
)
from es_cookbook.rl.types import (
    Datasets,
    EnvGroupBuilder,
    Metrics,
    ProblemResult,
    Trajectory,
    TrajectoryGroup,
)
from es_cookbook.runs.centre.checkpoints import STATE, Checkpoint, next_checkpoint, state_json
from es_cookbook.runs.directory.directory import (
    LOG,
    MODEL,
    keep_trained_on,
)
from es_cookbook.runs.recorder import BaseRecorder
from es_cookbook.runs.setup import open_engine, tell_evaluation
from es_cookbook.runs.tracking.base import RunInfo, Tracker
from es_cookbook.runs.tracking.log import libraries_quiet, library_log


class _Learns(Protocol):
    """A model, some of whose weights learn."""

    model: PreTrainedModel

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Those that learn, by name, as they are now."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Go on from weights, and from what `save_moments` wrote."""
        ...

    def save_moments(self, directory: Path) -> None:
        """Write what the optimizer remembers; the weights are the model's own files."""
        ...


_Learner = TypeVar("_Learner", bound=_Learns)


class GradientRun(BaseRecorder[GradientConfig], Generic[_Learner]):
    """A run, open: what its loop works with; `generations` are those that are still to come."""

    def __init__(
        self,
        config: GradientConfig,
        learner: _Learner,
        engine: Engine,
        datasets: Datasets,
        tracker: Tracker,
        checkpoint: Checkpoint | None,
    ) -> None:
        start = checkpoint.generation if checkpoint else 0
        self._sampler = config.sampler(engine, Path(config.log_path))
        how = config.eval_attempts, config.eval_temperature
        held_out = functools.partial(evaluate, self._sampler, datasets.test_P, *how)
        super().__init__(
            config=config,
            engine=engine,
            dataset=datasets.train,
            tracker=tracker,
            evaluate=held_out,
        )
        self.generations = range(start, config.num_generations)
        self.learner = learner
        self._results = [*checkpoint.results] if checkpoint else list[Sequence[ProblemResult]]()
        self._took: dict[str, float] = {}

    async def rollout(
        self, generation: int, problems_P: Sequence[EnvGroupBuilder], attempts: int
    ) -> list[TrajectoryGroup]:
        """The model's attempts at every problem: a group of one genome each, with logprobs.

        Then the engine rests, until it takes the weights that were learned.
        """
        sampling = chz.replace(self.config.sampling_at(generation), logprobs=True)
        found = await self._sampler.rollout_centre(problems_P, sampling, attempts, generation)
        await self.engine.rest()
        return found

    async def learn(self, learn: Callable[[_Learner], Metrics]) -> Metrics:
        """Let the learner learn, in a thread, and the engine take its weights."""
        began = time.perf_counter()
        measured = await anyio.to_thread.run_sync(_on_all_cores, learn, self.learner)
        await self.learned(time.perf_counter() - began)
        return measured

    async def learned(self, seconds: float) -> None:
        """The learner has learned for so many seconds: let the engine take its weights."""
        began = time.perf_counter()
        for weight in self.learner.weights.values():
            weight.grad = None  # its memory is for the engine now
        await take_weights(self.engine, self.learner.weights)
        self._took = {"learn": seconds, "load": time.perf_counter() - began}

    async def record(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], measured: Metrics
    ) -> None:
        """Write what a generation measured, a checkpoint where it is due; begin the next one."""
        results_P = self.dataset.results(generation, groups_P)
        self.dataset.tell(generation, results_P)
        self._results.append(results_P)
        self.progress.rolled_out(groups_P)
        seconds, total = self._sampler.seconds, time.perf_counter() - self.began
        metrics = {
            **self.usual_metrics(groups_P),
            "reward/mean": mean_of(mean_rewards(groups_P).ravel().tolist()),
            **env_metrics(groups_P),
            **answer_lengths(groups_P),
            **measured,
            "policy/nats_per_token": _nats_per_token(groups_P),
            "time/load": self._took["load"],
            "time/learn": self._took["learn"],
            "time/sample": seconds.sample,
            "time/score": seconds.score,
            "time/total": total,
            "throughput/answers_per_second": count_answers(groups_P) / total,
            "throughput/tokens_per_second": count_tokens(groups_P) / total,
        }
        self.log(generation, groups_P, metrics)
        done, every = generation + 1, self.config.checkpoint_every
        if done == self.config.num_generations or (every and done % every == 0):
            await anyio.to_thread.run_sync(self._write_checkpoint, done)
        self.tracker.recorded(done)
        done_saying()
        await self.begin(done)

    @override
    def counted(self) -> Metrics:
        counts = self.progress.metrics()
        return {key: counts[key] for key in ("progress/rollouts", "progress/tokens")}

    def _write_checkpoint(self, generation: int) -> None:
        tokenizer, dtype = self.engine.tokenizer, self.engine.traits.base_dtype
        with next_checkpoint(Path(self.config.log_path), generation) as path:
            with no_progress_bar():
                self.learner.model.save_pretrained(path / MODEL)
            # Whoever loads it is to sample as the run did: what was learned of rounded weights may
            # be lost without the rounding. The weights themselves stay float32, to go on from.
            config = path / MODEL / "config.json"
            plain = json.loads(config.read_text("utf-8"))
            if plain.get("dtype") != dtype:
                config.write_text(json.dumps({**plain, "dtype": dtype}, indent=2), "utf-8")
            tokenizer.save_pretrained(path / MODEL)
            self.learner.save_moments(path)
            state = state_json(generation, dtype, self._results)
            (path / STATE).write_text(state, "utf-8")


def _on_all_cores(learn: Callable[[_Learner], Metrics], learner: _Learner) -> Metrics:
    """Learn; a thread that is not torch's first has but one core for products unless it says so."""
    torch.set_num_threads(num_cores())
    measured = learn(learner)
    trim()
    return measured


@contextlib.asynccontextmanager
async def opened(
    config: GradientConfig,
    checkpoint: Checkpoint | None,
    make_learner: Callable[[PreTrainedModel, Engine], _Learner],
) -> AsyncGenerator[GradientRun[_Learner]]:
    """Open a run at the checkpoint that `run_directory` found; closes all of it in the end.

    `make_learner` is given a model, and the engine whose space has the weights that are to learn.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    log_path = Path(config.log_path)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(library_log(log_path / LOG))
        stack.enter_context(no_silence())
        engine, datasets = await open_engine(config, stack)
        with libraries_quiet():
            learner = await _learner(config, checkpoint, engine, make_learner)
        for generation, results_P in enumerate(checkpoint.results if checkpoint else ()):
            datasets.train.tell(generation, results_P)
        start = checkpoint.generation if checkpoint else 0
        begin(log_path, config, start)
        keep_trained_on(log_path, datasets, start)
        info = RunInfo(
            log_path,
            config_to_json(config),
            config.seed,
            config.num_generations,
            start,
            learns="model",
        )
        tracker = config.trackers(info)
        stack.callback(tracker.close)
        tell_evaluation(config, start, datasets)
        run = GradientRun(config, learner, engine, datasets, tracker, checkpoint)
        await run.begin(start)
        yield run
        await run.finish()


async def _learner(
    config: GradientConfig,
    checkpoint: Checkpoint | None,
    engine: Engine,
    make_learner: Callable[[PreTrainedModel, Engine], _Learner],
) -> _Learner:
    """The model that learns; a checkpoint, if given, is loaded into it and the engine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = await anyio.to_thread.run_sync(load_causal_lm, config.model_name, "float32", device)
    learn_tokens_alone(model, engine.tokenizer)
    learner = make_learner(model, engine)
    if checkpoint is not None:
        stored = load_causal_lm(str(checkpoint.model), "float32", torch.device("cpu"))
        learner.load(dict(stored.named_parameters()), checkpoint.path)
        await take_weights(engine, learner.weights)
    return learner


async def take_weights(engine: Engine, weights: Mapping[str, torch.Tensor]) -> None:
    """Make weights, all of the engine's search space, its centre.

    Raises:
        EngineError: It has others in the end.
    """
    taken = {name: weight.detach().float().cpu().contiguous() for name, weight in weights.items()}
    spans = (fingerprint_span(name, weight.view(-1), 0) for name, weight in taken.items())
    fingerprint = sum(spans) % MODULUS
    with scratch() as directory:
        path = directory / "weights.safetensors"
        save_file(taken, path, metadata(0, fingerprint))
        if await engine.restore([], path) != fingerprint:
            raise EngineError(f"the engine could not take the moved weights from {path}")


def _nats_per_token(groups_P: Sequence[TrajectoryGroup]) -> float:
    """How surprising its own tokens were to the model: an estimate of its entropy."""
    logprobs = [
        logprob
        for group in groups_P
        for trajectories_K in group.trajectories_G_K
        for trajectory in trajectories_K
        if isinstance(trajectory, Trajectory)
        for transition in trajectory.transitions
        for logprob in transition.action.logprobs_T or ()
    ]
    return -mean_of(logprobs)
