"""What a run opens, in which order, and that it is closed again however the run ends.

What is recorded in the run directory is touched last, so that a mistake in anything else leaves it
alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import chz

from es_cookbook.common.configs import config_to_json, trust_of
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import no_silence, plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.population.ahead import Attempted, InOrder
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import Overlap, PopulationSampler
from es_cookbook.population.scoring import Scoring
from es_cookbook.rl.grading.workers import end_idle_workers
from es_cookbook.rl.types import EnvGroupBuilder, ProblemResult, RLDataset
from es_cookbook.runs.directory import LOG, PROFILE, RunDirectory, keep_trained_on
from es_cookbook.runs.history.format import Header, Record
from es_cookbook.runs.history.store import check_fingerprint, header_of
from es_cookbook.runs.log import libraries_quiet, library_log
from es_cookbook.runs.opening import Standing, open_run_directory
from es_cookbook.runs.report.page.at_the_end import ReportWriter
from es_cookbook.runs.tracking.base import RunInfo, Tracker, Trackers
from es_cookbook.runs.tracking.snapshot_writer import SnapshotWriter
from es_cookbook.train.beginning import forking
from es_cookbook.train.config import Config
from es_cookbook.train.garbage import rare_garbage_collection
from es_cookbook.train.profile import Profile
from es_cookbook.train.recorder import ANSWER, Recorder
from es_cookbook.train.retelling import restore, retell, retell_dataset


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run, open: what the loop works with.

    Attributes:
        generations: those that are still to come.
        held_back: the last that is recorded, if the first to come stands around the centre before
            its step, which the engine has not taken.
    """

    config: Config
    generations: range
    held_back: Record | None
    dataset: RLDataset
    optimizer: Optimizer
    sampler: PopulationSampler
    scoring: Scoring
    engine: Engine
    recorder: Recorder

    def in_order(
        self, attempt: "Callable[[Run, int, Overlap | None], Awaitable[Attempted]]"
    ) -> InOrder:
        """Attempts the generations to come; where `max_staleness` lets them they overlap."""
        overlapping = self.config.max_staleness > 0
        return InOrder(
            functools.partial(attempt, self),
            self.engine,
            self.config.num_generations,
            self.config.centre_of if overlapping else None,
            None if self.held_back is None else self._take_held_back,
        )

    async def _take_held_back(self) -> None:
        held = self.held_back
        assert held is not None
        found = await self.engine.apply(held.step)
        check_fingerprint(held.generation + 1, held.fingerprint, found, self.config.model_name)

    async def problems(self, generation: int) -> Sequence[EnvGroupBuilder]:
        """What the genomes of a generation attempt: its batch and the regularisers' problems.

        With a surrogate the centre attempts the batch here, and the genomes score its answers.
        """
        batch_P, surrogate = self.dataset.get_batch(generation), self.config.surrogate
        if surrogate is None:
            return self.scoring.problems(generation, batch_P)
        how = surrogate.sampling(self.config.sampling), surrogate.attempts
        answered_P = await self.sampler.rollout_centre(batch_P, *how, generation)
        return self.scoring.problems(generation, batch_P, answered_P)

    def tell_dataset(self, generation: int) -> Sequence[ProblemResult]:
        """What was scored last, told to the dataset; what the history keeps of it."""
        results_P = self.dataset.results(generation, self.scoring.batch_groups_P)
        self.dataset.tell(generation, results_P)
        return results_P


@contextlib.asynccontextmanager
async def opened(config: Config, standing: Standing) -> AsyncGenerator[Run]:
    """Open a run, new or recorded, where `begun` found it standing; closes all of it in the end.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    log_path, config_json = Path(config.log_path), config_to_json(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(library_log(log_path / LOG))
        stack.enter_context(no_silence())
        model_name, search_space = config.model_name, config.search_space
        say(f"{log_path}: loading {model_name} on {config.engine.name}")
        with libraries_quiet():
            engine = await config.engine(model_name=model_name, search_space=search_space)
        stack.push_async_callback(_close, engine)
        stack.callback(end_idle_workers)
        with libraries_quiet():
            datasets = await config.dataset(engine.tokenizer)
        await datasets.train.validate(engine.traits.context_length)
        regularisers = (config.kl, config.preference)
        objective, fitness, pairs = config.objective, config.fitness, config.num_pairs
        scoring = Scoring(
            objective, fitness, regularisers, engine, config.seed, pairs, config.surrogate
        )
        optimizer = _optimizer(config, engine)
        _check_ahead(config, optimizer, datasets.train)
        sampler = config.sampler(engine, Path(config.log_path))
        header = await _header(config.model_name, engine.traits.base_dtype, standing)
        directory = open_run_directory(
            log_path, config_json, config.num_generations, header, standing
        )
        stack.callback(directory.history.close)
        held_back = await _go_on(directory, config, engine, optimizer, datasets.train)
        directory.begin()
        fork = standing.header and standing.header.fork
        forked = fork.generation if fork else 0
        pairs = config.preference.trained_on(engine.tokenizer) if config.preference else ()
        recorded = directory.history.next_generation
        keep_trained_on(log_path, datasets, recorded, forked, pairs)
        if not directory.history.next_generation and datasets.test_P:
            say(
                f"evaluating {len(datasets.test_P):,} held-out problems before the first generation"
            )
        profile = Profile(log_path / PROFILE) if config.profile else None
        tracker = _tracker(config, directory, profile)
        stack.callback(tracker.close)
        stack.enter_context(rare_garbage_collection())
        beside_P = _kl_problems(config, engine, datasets.test_P)
        how = config.eval_attempts, config.eval_temperature
        held_out = functools.partial(evaluate, sampler, datasets.test_P, *how, beside_P)
        recorder = Recorder(
            config,
            directory,
            engine,
            datasets.train,
            optimizer,
            scoring,
            tracker,
            held_out,
        )
        if profile is not None:
            profile.watch(engine, sampler, recorder.stopwatch)
        start = directory.history.next_generation
        await recorder.begin(start)
        yield Run(
            config,
            range(start, config.num_generations),
            held_back,
            datasets.train,
            recorder.stopwatch.watch(optimizer, "ask", "tell"),
            recorder.stopwatch.watch(sampler, ANSWER, "rollout"),
            recorder.stopwatch.watch(scoring, "score"),
            recorder.stopwatch.watch(engine, "apply"),
            recorder,
        )
        await recorder.finish()


async def _header(model_name: str, base_dtype: str, standing: Standing) -> Header:
    """What a run begins with on this engine; the base of a recorded one has been compared."""
    then = standing.header
    if standing.generations and then is not None and then.weights is not None:
        return dataclasses.replace(then, model_name=model_name, dtype=base_dtype)
    return await asyncio.to_thread(header_of, model_name, base_dtype)


def _optimizer(config: Config, engine: Engine) -> Optimizer:
    optimizer = config.optimizer(
        run_seed=config.seed, num_generations=config.num_generations, space=engine.space
    )
    room = engine.traits.max_terms
    if room is not None and optimizer.max_terms > room:
        raise ConfigError(
            f"genomes will have up to {optimizer.max_terms} terms (optimizer.max_terms), and the "
            f"engine has room for {room}: set its terms_per_genome to {optimizer.max_terms}, or "
            f"optimizer.max_terms to {room}"
        )
    return optimizer


def _check_ahead(config: Config, optimizer: Optimizer, dataset: RLDataset) -> None:
    """Refuse generations that begin before what they depend on is known.

    Raises:
        ConfigError: What depends on it.
    """
    if not config.max_staleness:
        return
    if not optimizer.asks_ahead:
        raise ConfigError(
            f"max_staleness={config.max_staleness}: {type(config.optimizer).__name__} asks for "
            "genomes by what it was told of the generation before, which is not known yet; "
            "accepted are es, momentum, adam, rmsprop, clip_up, muon and qes, without "
            "adaptive_sigma"
        )
    if dataset.depends_on_results:
        raise ConfigError(
            f"max_staleness={config.max_staleness}: batches of {type(config.dataset).__name__} "
            "depend on the results of the generation before (a curriculum, a filter or replay), "
            "which are not known yet"
        )


def _kl_problems(
    config: Config, engine: Engine, test_P: Sequence[EnvGroupBuilder]
) -> Sequence[EnvGroupBuilder]:
    """On which the centre's KL to the base is measured: all held-out ones, or rows of its own."""
    if config.kl is None or not test_P:
        return ()
    kl = config.kl
    if kl.source is None:
        kl = chz.replace(kl, problems_per_generation=len(test_P))
    return kl(engine.tokenizer, engine.traits.context_length, config.seed)(0, test_P)


async def _go_on(
    directory: RunDirectory,
    config: Config,
    engine: Engine,
    optimizer: Optimizer,
    dataset: RLDataset,
) -> Record | None:
    """Bring optimizer, dataset and engine to where the history ends.

    Where the generation to come stands around an earlier centre, the engine is brought to that; the
    record whose step it has not taken is returned.

    The steps of a fork's first generations are its parent's, taken as given: an optimizer with
    state of its own begins afresh where the fork did, and knows only what led there.
    """
    history = directory.history
    records = list(history.records())
    fork = history.header.fork if history.header else None
    given = fork.generation if fork else 0
    retell(
        optimizer,
        records,
        given,
        "; resume with the version of es_cookbook and the num_generations that the run began with, "
        f"or take the recorded steps as given: {forking(config, history.next_generation)}",
    )
    retell_dataset(dataset, records, given)
    taken = records[: config.centre_of(len(records))]
    if records:
        say(f"rebuilding the centre after {plural(len(taken), 'generation')}")
        await restore(engine, history.path, history.header, taken, config.model_name)
    return records[-1] if len(taken) < len(records) else None


def _tracker(config: Config, directory: RunDirectory, profile: Profile | None) -> Tracker:
    start = directory.history.next_generation
    config_json = config_to_json(config)
    run = RunInfo(directory.path, config_json, config.seed, config.num_generations, start)
    # In this order: a disk that refuses the first leaves no thread of the last behind.
    trust = trust_of(config_json)
    snapshots = SnapshotWriter(directory.path, config.snapshot_every, config.model_name, trust)
    trackers = [config.trackers(run), snapshots, ReportWriter(directory.path)]
    if profile is not None:
        trackers.insert(0, profile)  # It sees the end of a generation first, and closes last.
    if config.hub is not None:
        trackers.append(config.hub(run))
    return Trackers(trackers)


async def _close(engine: Engine) -> None:
    with anyio.CancelScope(shield=True):
        await engine.close()
