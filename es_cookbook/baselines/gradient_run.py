"""What a run of gradients opens, records and closes; its directory is read by the same tools.

The model is there twice. A learner has the one that gradients move, in float32. The engine has
the one that answers, and is given the moved weights after each generation (`sampled`).

A gradient has no short history: the checkpoint is the weights and AdamW's moments, several times
the model's own size, in `checkpoints/<generation>/`. Only the last one is kept. A resumed run goes
on from it, and generations after it are done again and come out the same.

    config.json  metrics.jsonl  rollouts.jsonl  log.txt
    checkpoints/<generation>/model       a Hugging Face model directory
    checkpoints/<generation>/optimizer.safetensors, state.json

What a learner is, is the caller's to say (`Learns`): our own `Learner`, or TRL's trainer.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import anyio
import chz
import torch
from transformers import PreTrainedModel

from es_cookbook.baselines.checkpoints import (
    MODEL,
    STATE,
    Checkpoint,
    GradientStanding,
    begin,
    next_checkpoint,
    state_json,
)
from es_cookbook.baselines.gradient_config import GradientConfig
from es_cookbook.baselines.learner import Learner, adamw
from es_cookbook.baselines.sampled import Sampled
from es_cookbook.checkpoints.models import load_causal_lm, no_progress_bar
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.terminal import done_saying, no_silence, say
from es_cookbook.engines.base import Engine
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.grading.workers import end_idle_workers
from es_cookbook.rl.rollouts import (
    answer_lengths,
    count_tokens,
    env_metrics,
    lost_rollouts,
    mean_of,
    mean_rewards,
)
from es_cookbook.rl.types import (
    Datasets,
    EnvGroupBuilder,
    Metrics,
    ProblemResult,
    RLDataset,
    Tokenizer,
    Trajectory,
    TrajectoryGroup,
)
from es_cookbook.runs.directory import LOG, METRICS, keep_trained_on
from es_cookbook.runs.log import libraries_quiet, library_log
from es_cookbook.runs.measures import Progress
from es_cookbook.runs.report.page.at_the_end import ReportWriter
from es_cookbook.runs.tracking.base import Decode, RunInfo, Tracker, Trackers


class Learns(Protocol):
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


_Learner = TypeVar("_Learner", bound=Learns)


class GradientRun(Generic[_Learner]):
    """A run, open: what its loop works with; `generations` are those that are still to come."""

    def __init__(
        self,
        config: GradientConfig,
        learner: _Learner,
        sampled: Sampled,
        datasets: Datasets,
        tracker: Tracker,
        checkpoint: Checkpoint | None,
    ) -> None:
        start = checkpoint.generation if checkpoint else 0
        self.generations = range(start, config.num_generations)
        self.dataset: RLDataset = datasets.train
        self.learner = learner
        self._config = config
        self._sampled = sampled
        self._test_P = datasets.test_P
        self._tracker = tracker
        self._results = [*checkpoint.results] if checkpoint else list[Sequence[ProblemResult]]()
        self._progress = Progress(Path(config.log_path) / METRICS)
        self._evaluated: Metrics = {}
        self._began = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self._sampled.engine.tokenizer

    @property
    def context_length(self) -> int:
        """Most tokens of a rollout."""
        return self._sampled.engine.traits.context_length

    async def rollout(
        self, generation: int, problems_P: Sequence[EnvGroupBuilder], attempts: int
    ) -> list[TrajectoryGroup]:
        """The model's attempts at every problem: a group of one genome each, with logprobs."""
        sampling = chz.replace(self._config.sampling_at(generation), logprobs=True)
        sampler = self._sampled.sampler
        return await sampler.rollout_centre(problems_P, sampling, attempts, generation)

    async def learn(self, learn: Callable[[_Learner], Metrics]) -> Metrics:
        """Let the learner learn, in a thread, and the engine take its weights."""
        began = time.perf_counter()
        measured = await anyio.to_thread.run_sync(learn, self.learner)
        await self.learned(time.perf_counter() - began)
        return measured

    async def learned(self, seconds: float) -> None:
        """The learner has learned for so many seconds: let the engine take its weights."""
        began = time.perf_counter()
        await self._sampled.take()
        self._seconds = {"learn": seconds, "load": time.perf_counter() - began}

    async def begin(self, generation: int) -> None:
        """Evaluate the model that a generation starts from, where it is due; start the clock."""
        config, last = self._config, self._config.num_generations
        self._evaluated = {}
        if generation == last or generation % (config.eval_every or last) == 0:
            how = config.eval_attempts, config.eval_temperature
            self._evaluated = await evaluate(self._sampled.sampler, self._test_P, *how)
        if generation == last:
            self._tracker.log(last, {**self._evaluated, **self._counted()})
            self._tracker.recorded(last)
        self._began = time.perf_counter()

    async def record(
        self, generation: int, groups_P: Sequence[TrajectoryGroup], measured: Metrics
    ) -> None:
        """Write what a generation measured, a checkpoint where it is due; begin the next one."""
        results_P = self.dataset.results(generation, groups_P)
        self.dataset.tell(generation, results_P)
        self._results.append(results_P)
        self._progress.rolled_out(groups_P)
        seconds, total = self._sampled.sampler.seconds, time.perf_counter() - self._began
        metrics = {
            **self._evaluated,
            **self._counted(),
            "reward/mean": mean_of(mean_rewards(groups_P).ravel().tolist()),
            **env_metrics(groups_P),
            **answer_lengths(groups_P),
            **self.dataset.metrics(),
            **measured,
            "policy/nats_per_token": _nats_per_token(groups_P),
            "rollouts/failed": float(len(lost_rollouts(groups_P))),
            "time/unix": time.time(),
            "time/load": self._seconds["load"],
            "time/learn": self._seconds["learn"],
            "time/sample": seconds.sample,
            "time/score": seconds.score,
            "time/total": total,
            "throughput/tokens_per_second": count_tokens(groups_P) / total,
            **self._tracker.metrics(),
        }
        decode = cast(Decode, self._sampled.engine.tokenizer.decode)
        self._tracker.log_rollouts(generation, groups_P, decode)
        self._tracker.log(generation, metrics)
        done, every = generation + 1, self._config.checkpoint_every
        if done == self._config.num_generations or (every and done % every == 0):
            await anyio.to_thread.run_sync(self._write_checkpoint, done)
        self._tracker.recorded(done)
        done_saying()
        await self.begin(done)

    def _counted(self) -> Metrics:
        counts = self._progress.metrics()
        return {key: counts[key] for key in ("progress/rollouts", "progress/tokens")}

    def _write_checkpoint(self, generation: int) -> None:
        engine, learner = self._sampled.engine, self.learner
        with next_checkpoint(Path(self._config.log_path), generation) as path:
            with no_progress_bar():
                learner.model.save_pretrained(path / MODEL)
            engine.tokenizer.save_pretrained(path / MODEL)
            learner.save_moments(path)
            state = state_json(generation, engine.traits.base_dtype, self._results)
            (path / STATE).write_text(state, "utf-8")


def opened(
    config: GradientConfig, standing: GradientStanding
) -> AbstractAsyncContextManager[GradientRun[Learner]]:
    """Open a run whose learner is our own, new or recorded; closes all of it in the end.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """

    def learner(model: PreTrainedModel, names: Iterable[str]) -> Learner:
        return Learner(
            model,
            names,
            tokens_per_pass=config.tokens_per_pass,
            optimizers=partial(adamw, weight_decay=config.weight_decay),
            max_gradient_norm=config.max_gradient_norm,
        )

    return opened_with(config, standing, learner)


@contextlib.asynccontextmanager
async def opened_with(
    config: GradientConfig,
    standing: GradientStanding,
    make_learner: Callable[[PreTrainedModel, Iterable[str]], _Learner],
) -> AsyncGenerator[GradientRun[_Learner]]:
    """Open a run where `begun` found it standing; closes all of it in the end.

    `make_learner` is given a model and the names of the weights that are to learn.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    log_path = Path(config.log_path)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(library_log(log_path / LOG))
        stack.enter_context(no_silence())
        say(f"{log_path}: loading {config.model_name} on {config.engine.name}")
        checkpoint = standing.checkpoint
        with libraries_quiet():
            learner, sampled = await _built(config, checkpoint, make_learner)
            stack.push_async_callback(_close, sampled.engine)
            stack.callback(end_idle_workers)
            datasets = await config.dataset(sampled.engine.tokenizer)
        await datasets.train.validate(sampled.engine.traits.context_length)
        for generation, results_P in enumerate(checkpoint.results if checkpoint else ()):
            datasets.train.tell(generation, results_P)
        start = begin(config, standing)
        keep_trained_on(log_path, datasets, start)
        info = RunInfo(log_path, config_to_json(config), config.seed, config.num_generations, start)
        trackers = [config.trackers(info), ReportWriter(log_path)]
        tracker = Trackers([*trackers, *([config.hub(info)] if config.hub else [])])
        stack.callback(tracker.close)
        if start == 0 and datasets.test_P:
            say(
                f"evaluating {len(datasets.test_P):,} held-out problems before the first generation"
            )
        run = GradientRun(config, learner, sampled, datasets, tracker, checkpoint)
        await run.begin(start)
        yield run
        await anyio.to_thread.run_sync(tracker.finish, abandon_on_cancel=True)


async def _built(
    config: GradientConfig,
    checkpoint: Checkpoint | None,
    make_learner: Callable[[PreTrainedModel, Iterable[str]], _Learner],
) -> tuple[_Learner, Sampled]:
    """The model that learns, and the engine, both with the weights of a checkpoint if given."""
    name = config.model_name
    engine = await config.engine(model_name=name, search_space=config.search_space)
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = await anyio.to_thread.run_sync(load_causal_lm, name, "float32", device)
        learner = make_learner(model, engine.space.shapes)
        sampler = PopulationSampler(
            engine,
            sampling=config.sampling,
            rollout_timeout=config.rollout_timeout,
            turn_timeout=config.turn_timeout,
            max_failed_fraction=config.max_failed_fraction,
            run_seed=config.seed,
            log_path=Path(config.log_path),
        )
        sampled = Sampled(engine, sampler, lambda: learner.weights)
        if checkpoint is not None:
            stored = load_causal_lm(str(checkpoint.model), "float32", torch.device("cpu"))
            learner.load(dict(stored.named_parameters()), checkpoint.path)
            await sampled.take()
    except BaseException:
        await _close(engine)
        raise
    return learner, sampled


async def _close(engine: Engine) -> None:
    with anyio.CancelScope(shield=True):
        await engine.close()


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
