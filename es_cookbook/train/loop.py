"""The loop: ask, roll out, tell, apply, record.

A run is a Config, and nothing that a run does depends on anything else, so the same Config gives
the same history wherever and however often it is interrupted. A generation counts once its history
line is on the disk; whatever comes before that line (rollouts, the step on the engine, metrics) is
simply done again after a crash.

The history is the checkpoint: base model and steps give the weights back bit for bit. Snapshots of
the centre, where they are asked for, follow from it and only save time.
"""

import asyncio
import contextlib
import functools
import math
import signal
import sys
import time
from pathlib import Path
from typing import Literal, cast

import anyio
import chz

from es_cookbook.common.configs import Names, config_to_json, load_config
from es_cookbook.common.errors import ConfigError, HistoryError, RunDirectoryError
from es_cookbook.common.garbage import rare_garbage_collection
from es_cookbook.engines.base import ENGINE_NAMES, Engine, EngineBuilder
from es_cookbook.evolution.fitness import FITNESS_NAMES, Fitness
from es_cookbook.evolution.optimizers.base import (
    OPTIMIZER_NAMES,
    Optimizer,
    OptimizerBuilder,
    tied_fraction,
)
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpaceBuilder
from es_cookbook.population.evaluate import check_evaluation, evaluate
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.population.scoring import Scoring
from es_cookbook.rl.objectives import OBJECTIVE_NAMES, Objective
from es_cookbook.rl.regularisers.kl_to_base import KLToBase
from es_cookbook.rl.regularisers.preference_pairs import PreferencePairs
from es_cookbook.rl.rollouts import count_tokens, lost_rollouts
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.directory import CONFIG, HISTORY, METRICS, locked, open_run_directory
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.history.store import HistoryStore, header_of, read_history
from es_cookbook.runs.hub.background_push import HubPush
from es_cookbook.runs.measures import Progress
from es_cookbook.runs.tracking.base import Decode, RunInfo, TrackerBuilder
from es_cookbook.runs.tracking.snapshot_writer import SnapshotWriter
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from es_cookbook.train.retelling import retell

_ENGINES = Names(ENGINE_NAMES, default="torch")
_SEARCH_SPACES = Names(SEARCH_SPACE_NAMES, default="low_rank")
_OPTIMIZERS = Names(OPTIMIZER_NAMES, default="es")
_OBJECTIVES = Names(OBJECTIVE_NAMES, default="mean")
_FITNESS = Names(FITNESS_NAMES, default="zscore")
MAY_DIFFER = (
    "log_path",
    "behavior_if_log_dir_exists",
    "trackers",
    "hub",
    "model_name",
    "engine",
    "num_generations",
    "snapshot_every",
)
"""What a resumed run may change: where it is kept, shown and run, and for how long.

`model_name` and `engine` as long as the base is the same, bit for bit; the history tells.
"""


@chz.chz
class Config:
    """One training run, whole."""

    model_name: str = chz.field(doc="Hugging Face model directory or Hub name")
    dataset: RLDatasetBuilder = chz.field(doc="problems to train on, and held-out ones")
    log_path: str = chz.field(doc="run directory")
    engine: EngineBuilder = chz.field(
        meta_factory=_ENGINES, default_factory=_ENGINES.build_default, doc="where genomes run"
    )
    search_space: SearchSpaceBuilder = chz.field(
        meta_factory=_SEARCH_SPACES,
        default_factory=_SEARCH_SPACES.build_default,
        doc="which parameters genomes perturb, and how",
    )
    optimizer: OptimizerBuilder = chz.field(
        meta_factory=_OPTIMIZERS,
        default_factory=_OPTIMIZERS.build_default,
        doc="how the population is made and the centre moves",
    )
    objective: Objective = chz.field(
        meta_factory=_OBJECTIVES,
        default_factory=_OBJECTIVES.build_default,
        doc="how a genome's attempts at a problem become one score",
    )
    fitness: Fitness = chz.field(
        meta_factory=_FITNESS,
        default_factory=_FITNESS.build_default,
        doc="how scores become fitness",
    )
    kl: KLToBase | None = chz.field(
        default=None, doc="keeps genomes close to the base: kl.weight=..."
    )
    preference: PreferencePairs | None = chz.field(
        default=None,
        doc="chosen answers likelier than rejected: preference.source=... preference.weight=...",
    )
    sampling: SamplingParams = chz.field(default_factory=SamplingParams, doc="how tokens are drawn")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    num_generations: int = chz.field(default=100, doc="generations of the whole run")
    eval_every: int = chz.field(
        default=20,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )
    eval_attempts: int = chz.field(
        default=1, doc="held-out: attempts at each problem; several also measure test/pass@k"
    )
    eval_temperature: float = chz.field(default=0.0, doc="held-out: temperature; 0 is greedy")
    snapshot_every: int = chz.field(
        default=0,
        doc="generations between snapshots of the centre, which shorten a replay; 0: none",
    )
    seed: int = chz.field(default=0, doc="everything random derives from it")
    rollout_timeout: float = chz.field(
        default=600.0, doc="seconds for which one rollout's Env may have control"
    )
    max_failed_fraction: float = chz.field(
        default=0.1, doc="stop when more of a generation's rollouts are lost"
    )
    trackers: TrackerBuilder = chz.field(
        default_factory=StandardTrackersBuilder,
        blueprint_unspecified=StandardTrackersBuilder,
        doc="where metrics and rollouts go",
    )
    hub: HubPush | None = chz.field(
        default=None, doc="pushes the run to the Hugging Face Hub while it goes on: hub.repo_id=..."
    )
    behavior_if_log_dir_exists: Literal["ask", "resume", "delete", "raise"] = chz.field(
        default="ask", doc="what to do where log_path already holds a run"
    )

    @chz.validate
    def _ranges(self) -> None:
        for name in ("attempts", "num_generations"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, found {value}")
        for name in ("eval_every", "snapshot_every"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} must be 0 or more, found {value}")
        self.objective.check(self.attempts, self.sampling.temperature)
        check_evaluation(self.eval_attempts, self.eval_temperature)
        if not 0 <= self.max_failed_fraction <= 1:
            raise ConfigError(
                f"max_failed_fraction must be in [0, 1], found {self.max_failed_fraction}"
            )
        if not (math.isfinite(self.rollout_timeout) and self.rollout_timeout > 0):
            raise ConfigError(f"rollout_timeout must be above 0, found {self.rollout_timeout}")


async def main(config: Config) -> None:
    """Train, or go on training.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    config_json = config_to_json(config)
    async with contextlib.AsyncExitStack() as stack:
        # Locked first: a second writer is refused before it loads a model beside the first one's.
        stack.enter_context(locked(Path(config.log_path)))
        engine = await config.engine(model_name=config.model_name, search_space=config.search_space)
        stack.push_async_callback(_close, engine)
        decode = cast(Decode, engine.tokenizer.decode)
        datasets = await config.dataset(engine.tokenizer)
        await datasets.train.validate(engine.traits.context_length)
        regularisers = (config.kl, config.preference)
        scoring = Scoring(config.objective, config.fitness, regularisers, engine, config.seed)
        optimizer = config.optimizer(
            run_seed=config.seed, num_generations=config.num_generations, space=engine.space
        )
        if engine.traits.max_terms is not None and optimizer.max_terms > engine.traits.max_terms:
            raise ConfigError(
                f"genomes will have up to {optimizer.max_terms} terms (optimizer.max_terms), and "
                f"the engine has room for {engine.traits.max_terms}: set its terms_per_genome to "
                f"{optimizer.max_terms}, or optimizer.max_terms to {engine.traits.max_terms}"
            )
        sampler = PopulationSampler(
            engine,
            sampling=config.sampling,
            attempts=config.attempts,
            rollout_timeout=config.rollout_timeout,
            max_failed_fraction=config.max_failed_fraction,
            run_seed=config.seed,
        )
        held_out = functools.partial(
            evaluate, sampler, datasets.test_P, config.eval_attempts, config.eval_temperature
        )
        header = await asyncio.to_thread(header_of, config.model_name, engine.traits.base_dtype)
        # Opened last: a mistake in anything above leaves what is recorded alone.
        run = open_run_directory(
            Path(config.log_path),
            config_json,
            header,
            config.num_generations,
            config.behavior_if_log_dir_exists,
            MAY_DIFFER,
        )
        stack.callback(run.history.close)
        start = run.history.next_generation
        await _replay(run.path, run.history, engine, optimizer)
        run.begin()
        progress = Progress(run.path / METRICS)
        for step in run.history.steps():
            progress.moved(step)
        snapshots = SnapshotWriter(run.path, config.snapshot_every)
        stack.callback(snapshots.close)
        tracker = config.trackers(
            RunInfo(run.path, config_json, config.seed, config.num_generations, start)
        )
        stack.callback(tracker.close)
        hub = config.hub and config.hub(run.path)
        if hub:
            stack.callback(hub.close)
        stack.enter_context(rare_garbage_collection())

        restarted_so_far = 0.0
        for generation in range(start, config.num_generations):
            metrics: dict[str, float] = {}
            if generation % (config.eval_every or config.num_generations) == 0:
                metrics |= await held_out()

            began = time.perf_counter()
            batch_P = datasets.train.get_batch(generation)
            env_group_builders_P = scoring.problems(generation, batch_P)
            asking = time.perf_counter()
            genomes_G = optimizer.ask(generation)
            asked = time.perf_counter()
            groups_P = await sampler.rollout(generation, env_group_builders_P, genomes_G)
            scores_P_G, fitness_G, score_metrics = scoring.score(groups_P)
            telling = time.perf_counter()
            rewards_P_G = None
            if optimizer.watches_behaviour:
                optimizer.observe(scores_P_G)
                rewards_P_G = tuple(map(tuple, scores_P_G.tolist()))
            step = optimizer.tell(generation, genomes_G, fitness_G)
            applying = time.perf_counter()
            fingerprint = await engine.apply(step)
            ended = time.perf_counter()

            progress.rolled_out(groups_P)
            progress.moved(step)
            metrics |= {
                **progress.metrics(),
                **score_metrics,
                **optimizer.metrics(),
                "genomes/tied_fraction": tied_fraction(genomes_G, fitness_G),
                "step/rms_over_sigma": step.rms / optimizer.sigma(generation),
                "rollouts/failed": len(lost_rollouts(groups_P)),
                "engines/restarted": engine.stats().get("restarted", 0.0) - restarted_so_far,
                "time/ask": asked - asking,
                "time/tell": applying - telling,
                "time/load": sampler.seconds.load,
                "time/sample": sampler.seconds.sample,
                "time/score": sampler.seconds.score,
                "time/apply": ended - applying,
                "time/total": ended - began,
                "throughput/tokens_per_second": count_tokens(groups_P) / (ended - began),
            }
            restarted_so_far += metrics["engines/restarted"]
            if hub:
                metrics |= hub.metrics()
            tracker.log_rollouts(generation, groups_P, decode)
            tracker.log(generation, metrics)
            run.history.append(
                Record(
                    generation,
                    step,
                    tuple(fitness_G.tolist()),
                    generation + 1,
                    fingerprint,
                    rewards_P_G,
                )
            )
            tracker.recorded(generation)
            snapshots.recorded(generation + 1)
            if hub:
                hub.recorded(generation + 1)
        tracker.log(
            config.num_generations,
            {**await held_out(), **progress.metrics()},
        )
        tracker.recorded(config.num_generations)
        await asyncio.to_thread(snapshots.finish)
        if hub:
            await anyio.to_thread.run_sync(
                hub.finish, config.num_generations, abandon_on_cancel=True
            )


async def _replay(
    log_path: Path, history: HistoryStore, engine: Engine, optimizer: Optimizer
) -> None:
    """Bring everybody to where the history ends, and check that they got there.

    The steps of a fork's first generations are its parent's, taken as given: an optimizer with
    state of its own begins afresh where the fork did, and knows only what led there.
    """
    fork = history.header.fork if history.header else None
    records = list(history.records())
    retell(
        optimizer,
        records,
        fork.generation if fork else 0,
        "; resume with the version of es_cookbook and the num_generations (where a schedule "
        "depends on it) that the run began with, or fork it with "
        f"generation={history.next_generation} (python -m es_cookbook fork), which takes the "
        "recorded steps as given",
    )
    if not records:
        return
    record = records[-1]
    fingerprints = [record.fingerprint for record in records]
    from es_cookbook.runs.snapshots import latest_snapshot  # torch, which a Config does without

    snapshot = await asyncio.to_thread(latest_snapshot, log_path, fingerprints, history.header)
    fingerprint = await engine.restore(history.steps(), snapshot and snapshot.path)
    if fingerprint != record.fingerprint:
        raise HistoryError(
            f"after generation {record.generation} the centre had fingerprint "
            f"{record.fingerprint:016x}, but the history gives {fingerprint:016x} from this model; "
            "resume with the model that began the run"
        )


async def _close(engine: Engine) -> None:
    with anyio.CancelScope(shield=True):
        await engine.close()


def recorded_config(log_path: Path) -> Config:
    """The Config of the run in a directory, as it was when the run last began or went on.

    Raises:
        RunDirectoryError: There is no run.
        ConfigError: Its Config cannot be rebuilt here.
    """
    path = log_path / CONFIG
    if not path.exists():
        raise RunDirectoryError(
            f"log_path {log_path} holds no {CONFIG}, so it is not a run directory"
        )
    if '"__main__:' in path.read_text(encoding="utf-8"):
        raise ConfigError(
            f"{path} needs classes of the script that wrote it, and only that has them: run it "
            f"again with log_path={log_path} behavior_if_log_dir_exists=resume"
        )
    return load_config(path, Config)


def run(config: Config) -> None:
    """Run `main` as a program: Ctrl-C and SIGTERM stop it cleanly, ready to go on.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
        ESCookbookError: As `main`.
    """
    if anyio.run(_interrupted, config):
        recorded = sum(1 for _ in read_history(Path(config.log_path) / HISTORY))
        when = f"after generation {recorded}" if recorded else "before the first generation ended"
        raise KeyboardInterrupt(
            f"interrupted {when}; to go on, run the same command with "
            "behavior_if_log_dir_exists=resume, or python -m es_cookbook resume "
            f"log_path={config.log_path}"
        )


async def _interrupted(config: Config) -> bool:
    """Run `main` until it ends (False) or a signal comes (True)."""
    loop = asyncio.get_running_loop()
    signals = () if sys.platform == "win32" else (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        scope.cancel()
        for number in signals:  # A second Ctrl-C does not wait for what is being closed.
            loop.remove_signal_handler(number)

    with anyio.CancelScope() as scope:
        for number in signals:
            loop.add_signal_handler(number, stop)
        await main(config)
    return scope.cancelled_caught
