"""What is checked before a run, what it opens, and that it is closed again however the run ends.

Whether a run may begin, or go on, is checked before anything is loaded. That takes a second or two,
however large the model, but for reading the base's weights once where a recorded run goes on. What
is recorded in the run directory is touched last, so that a mistake in anything else (the optimizer
does not do any more what it did, say) leaves it alone.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import chz

from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.fields.reach import trust_option
from es_cookbook.common.schedules import Schedule
from es_cookbook.common.terminal import command, no_silence, plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.population.scoring import Scoring, loaded
from es_cookbook.population.underway import Underway
from es_cookbook.rl.golds import validate
from es_cookbook.rl.problem_env import told_stop
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, RLDataset
from es_cookbook.runs.config import MAY_DIFFER, Config
from es_cookbook.runs.directory.directory import (
    HISTORY,
    LOG,
    PROFILE,
    SNAPSHOTS,
    Recorded,
    RunDirectory,
    failures_logged,
    keep_date,
    keep_trained_on,
    locked,
)
from es_cookbook.runs.directory.opening import RunState, open_run_directory, run_state
from es_cookbook.runs.history.format import Record, num_forked
from es_cookbook.runs.history.store import Prefix, check_same_base, header_of
from es_cookbook.runs.loop import Run
from es_cookbook.runs.recorder import Recorder
from es_cookbook.runs.run_config import RunConfig, closing
from es_cookbook.runs.signals import advise
from es_cookbook.runs.tracking.base import RunInfo, Tracker, Trackers
from es_cookbook.runs.tracking.log import libraries_quiet, library_log

if TYPE_CHECKING:
    from es_cookbook.population.step_sizes import FoundSigma
    from es_cookbook.runs.profile import Profile


async def _prepared(config: Config) -> tuple[Config, RunState]:
    """Whether the run may begin or go on in its directory, which is this process's alone.

    Returns:
        Its Config, with the sizes that a recorded run has chosen; and what it finds there.
    """
    recorded, as_given = Recorded(Path(config.log_path)), config
    config = _as_recorded(as_given, recorded)
    config_json = config_to_json(config)
    state = run_state(
        recorded,
        config_json,
        config.num_generations,
        config.behavior_if_log_dir_exists,
        MAY_DIFFER,
    )
    if state.config_json is not None and not state.is_complete:
        _check_schedules(state.config_json, config_json, state.history, config)
        await asyncio.to_thread(_check_base, state.history, config)
    if not state.is_complete:
        await asyncio.to_thread(_check_outside, config)
    return (config if state.decision == "resume" else as_given), state


def _as_recorded(config: Config, recorded: Recorded) -> Config:
    """The Config with the sizes that its recorded run has chosen."""
    if not config.size:
        return config
    from es_cookbook.runs.choosing.sizes import as_recorded  # Few runs choose sizes.

    return as_recorded(config, recorded)


def _one_by_one(config: Config) -> Config:
    """The Config in which problems come one by one, if how many make a batch is to be chosen."""
    if not config.size:
        return config
    from es_cookbook.runs.choosing.sizes import one_by_one

    return one_by_one(config)


def _check_outside(config: Config) -> None:
    """Refuse what would fail outside of this process, before a model is loaded."""
    for builder in (config.trackers, _one_by_one(config).dataset, *config.regularisers):
        builder.check()
    config.engine.check(config.model_name)  # Last: it may be fetched.


def resuming(config: Config) -> str:
    """The whole command that goes on with a run."""
    trust = trust_option(config, config_to_json(config))
    return command("resume", log_path=config.log_path, **trust)


def to_go_on(config: Config) -> str:
    """What to do where a run is interrupted that has begun."""
    return f"to go on: {resuming(config)}"


def forking(config: Config, generation: int) -> str:
    """The whole command that goes on with this Config where the recorded run cannot."""
    return command(
        "fork",
        log_path=config.log_path,
        generation=generation,
        output=f"{config.log_path}-longer",
        num_generations=config.num_generations,
        **trust_option(config, config_to_json(config)),
    )


def _check_schedules(recorded_json: str, config_json: str, history: Prefix, config: Config) -> None:
    """Refuse a longer run of which a schedule would have made other steps from the beginning."""
    try:
        recorded = config_from_json(recorded_json, trust_of(config_json))
    except ConfigError:  # Of a class that is not here: the steps will show it.
        return
    then, now = getattr(recorded, "num_generations", None), config.num_generations
    if not isinstance(then, int):
        return
    own = range(num_forked(history.header), history.generations)
    for name, schedule in _schedules(config):
        if any(schedule(t, then) != schedule(t, now) for t in own):
            raise RunDirectoryError(
                f"num_generations was {then}, is {now}, and {name}={type(schedule).__name__} "
                f"depends on it: the recorded {plural(len(own), 'generation')} would have come out "
                "otherwise. To go on from the last of them: "
                f"{forking(config, history.generations)}"
            )


def may_change_length(config: Config) -> bool:
    """Whether a run of another length takes the same steps: no schedule goes by it."""
    length = config.num_generations
    return not config.max_staleness and all(
        schedule(t, length) == schedule(t, 2 * length)
        for _, schedule in _schedules(config)
        for t in range(length)
    )


def _schedules(part: object, path: str = "") -> Iterator[tuple[str, Schedule]]:
    for name, field in chz.chz_fields(part).items():
        value = getattr(part, field.x_name)
        if isinstance(value, Schedule):
            yield f"{path}{name}", value
        elif chz.is_chz(value):
            yield from _schedules(value, f"{path}{name}.")


def _check_base(history: Prefix, config: Config) -> None:
    """Refuse another base before it is loaded; its dtype is the engine's to say."""
    then = history.header
    if then is not None and history.generations:
        say(f"{config.log_path}: comparing {config.model_name} with the base that it began with")
        now = header_of(config.model_name, then.dtype)
        check_same_base(Path(config.log_path) / HISTORY, then, now)


@contextlib.asynccontextmanager
async def opened(config: Config) -> AsyncGenerator[Run | None]:
    """Open a run, new or recorded; closes all of it in the end. One that is complete is None.

    Inside, the run directory is this process's alone.

    Raises:
        RunDirectoryError: The directory cannot be used, another process writes it, or it holds a
            run that cannot go on with this Config; says what can be done instead.
        HistoryError: Its history is damaged or missing, or began with another base.
        ESCookbookError: Anything else that the user can put right, in one sentence.
    """
    log_path = Path(config.log_path)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(locked(log_path))
        stack.enter_context(failures_logged(log_path))
        config, state = await _prepared(config)
        if state.is_complete:
            print(
                f"{log_path} is already complete, with {config.num_generations} generations; "
                f"for more: {resuming(config)} num_generations=..."
            )
            yield None
            return
        if state.decision == "resume":
            advise(to_go_on(config))
        stack.enter_context(library_log(log_path / LOG))
        announced = stack.enter_context(contextlib.ExitStack())
        announced.enter_context(no_silence())
        began = time.perf_counter()
        looking, looked, takes = _one_by_one(config), None, None
        engine, datasets = await _loaded(looking, stack)
        if config.size:
            from es_cookbook.runs.choosing import settled

            looked = await settled.look(config, engine, datasets.train)
            seconds = 60 * config.minutes - (time.perf_counter() - began)
            config, takes = settled.sized_run(
                config, looked.answers.look, datasets, seconds, may_change_length(config)
            )
            if config.dataset != looking.dataset:
                with libraries_quiet():
                    datasets = await config.dataset(engine.tokenizer)
        scoring = _scoring(config, engine)
        sampler = config.sampler(engine, log_path)
        then = state.history.header
        found, seconds_looked = then.found if then else {}, 0.0
        if then is None and config.optimizer.unsettled:
            from es_cookbook.runs.choosing import settled

            began = time.perf_counter()
            found = await settled.found(config, engine, datasets.train, looked)
            seconds_looked = time.perf_counter() - began
        optimizer = _optimizer(config, engine, datasets.train, found)
        config_json = config_to_json(config)
        directory = await _directory(config, config_json, engine, state, found)
        del state  # A run that goes on for long does not carry its past around.
        stack.callback(directory.history.close)
        held_back = await _go_on(directory, config, engine, optimizer, datasets.train, scoring)
        start = directory.history.next_generation
        directory.begin()
        advise(to_go_on(config))
        others = [d for each in config.regularisers for d in each.trained_on(engine.tokenizer)]
        keep_trained_on(log_path, datasets, start, num_forked(then), others)
        tell_evaluation(config, start, datasets)
        profile = _profile(config)
        info = _info(config, config_json, directory, sampler.underway)
        tracker = _tracker(config, info, profile)
        stack.callback(tracker.close)
        stack.enter_context(rare_garbage_collection())
        held_out = _evaluation(config, sampler, datasets.test_P)
        recorder = Recorder(
            config=config,
            directory=directory,
            engine=engine,
            dataset=datasets.train,
            optimizer=optimizer,
            tracker=tracker,
            info=info,
            evaluate=held_out,
            until=None if takes is None else time.perf_counter() + takes,
        )
        if profile is not None:
            engine.spans = sampler.spans = recorder.spans = profile
        await recorder.begin(start, seconds_looked)
        announced.close()  # The live view tells of all that follows.
        yield Run(
            config=config,
            start=start,
            held_back=held_back,
            dataset=datasets.train,
            optimizer=optimizer,
            sampler=sampler,
            scoring=scoring,
            engine=engine,
            recorder=recorder,
        )
        await recorder.finish()


def tell_evaluation(config: RunConfig, start: int, datasets: Datasets) -> None:
    """Say that a run of any kind begins, or goes on, with an evaluation, where it does."""
    if config.evaluates(start) and datasets.test_P:
        say(f"evaluating {len(datasets.test_P):,} held-out problems {_when(config, start)}")


def _when(config: RunConfig, generation: int) -> str:
    if generation == config.num_generations:
        return "after the last generation"
    return f"before generation {generation + 1}" if generation else "before the first generation"


async def open_engine(
    config: RunConfig, stack: contextlib.AsyncExitStack
) -> tuple[Engine, Datasets]:
    """The engine of any run, which the stack closes, and its problems."""
    where = f"{config.log_path}: " if config.log_path else ""
    say(f"{where}loading {config.model_name} on {config.engine.name}")
    with libraries_quiet():
        engine = await config.engine(model_name=config.model_name, search_space=config.space)
    await stack.enter_async_context(closing(engine))
    if config.log_path:
        keep_date(Path(config.log_path), engine.tokenizer)
    with libraries_quiet():
        datasets = await config.dataset(engine.tokenizer)
    await validate(datasets, engine.tokenizer, engine.traits.context_length, config.sampling)
    return engine, datasets


async def _loaded(config: Config, stack: contextlib.AsyncExitStack) -> tuple[Engine, Datasets]:
    """The same of a population, and what may be amiss with its problems."""
    engine, datasets = await open_engine(config, stack)
    if config.surrogate is not None:
        config.surrogate.check(datasets.train.get_batch(0))
    if stop := told_stop(config.sampling, datasets.train.get_batch(0)):
        say(stop)
    return engine, datasets


def _scoring(config: Config, engine: Engine) -> Scoring:
    regularisers = loaded(config.regularisers, engine, config.seed)
    return Scoring(config.objective, config.fitness, regularisers, config.num_pairs)


async def tried_sigmas(config: Config) -> "FoundSigma":
    """What the run would find for σ; it does not begin.

    Raises:
        ESCookbookError: As `opened` and `find_sigma`.
    """
    from es_cookbook.runs.choosing import settled

    await asyncio.to_thread(_check_outside, config)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(no_silence())
        engine, datasets = await _loaded(config, stack)
        return await settled.find_sigma_for(config, engine, datasets.train)


async def _directory(
    config: Config, config_json: str, engine: Engine, state: RunState, found: Mapping[str, float]
) -> RunDirectory:
    """Open it, with what a run begins with here; the base of a recorded one has been compared."""
    then, name, dtype = state.history.header, config.model_name, engine.traits.base_dtype
    if state.history.generations and then is not None:
        if then.products is not None and then.products != (now := engine.traits.products):
            say(
                f"going on with products in {now or dtype}: the run began with {then.products}, so "
                "its rollouts may differ by a rare token; engine.products chooses"
            )
        header = dataclasses.replace(then, model_name=name, dtype=dtype)
    else:
        header = await asyncio.to_thread(header_of, name, dtype)
        header = dataclasses.replace(header, found=found, products=engine.traits.products)
    length = config.num_generations
    return open_run_directory(Path(config.log_path), config_json, length, header, state)


def _optimizer(
    config: Config, engine: Engine, dataset: RLDataset, found: Mapping[str, float]
) -> Optimizer:
    optimizer = config.new_optimizer(engine.space, found)
    room = engine.traits.max_terms
    if room is not None and optimizer.max_terms > room:
        raise ConfigError(
            f"genomes will have up to {optimizer.max_terms} terms (optimizer.max_terms), and the "
            f"engine has room for {room}: set its terms_per_genome to {optimizer.max_terms}, or "
            f"optimizer.max_terms to {room}"
        )
    _check_ahead(config, optimizer, dataset)
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


def _evaluation(
    config: Config, sampler: PopulationSampler, test_P: Sequence[EnvGroupBuilder]
) -> Callable[[], Awaitable[Mapping[str, float]]]:
    """What measures the centre on held-out problems, and on those of the regularisers."""
    of = sampler.engine.tokenizer, sampler.engine.traits.context_length, config.seed
    regularisers = config.regularisers if test_P else ()
    extra_P = [problem for each in regularisers for problem in each.held_out(*of, test_P)]
    attempts, temperature = config.eval_attempts, config.eval_temperature
    return functools.partial(evaluate, sampler, test_P, attempts, temperature, extra_P)


async def _go_on(
    directory: RunDirectory,
    config: Config,
    engine: Engine,
    optimizer: Optimizer,
    dataset: RLDataset,
    scoring: Scoring,
) -> Record | None:
    """Bring optimizer, dataset, scoring and engine to where the history ends.

    Where the generation to come stands around an earlier centre, the engine is brought to that; the
    record whose step it has not taken is returned.

    The steps of a fork's first generations are its parent's, taken as given: an optimizer with
    state of its own begins afresh where the fork did, and knows only what led there.
    """
    history = directory.history
    records = list(history.records())
    if not records:
        return None
    from es_cookbook.runs.recorded import replay_dataset, replay_optimizer, restore

    given = num_forked(history.header)
    replay_optimizer(
        optimizer,
        records,
        given,
        "; resume with the version of es_cookbook and the num_generations that the run began with, "
        f"or take the recorded steps as given: {forking(config, history.next_generation)}",
    )
    replay_dataset(dataset, records, given)
    for record in records:
        scoring.tell(record.results_P)
    taken = records[: config.centre_of(len(records))]
    say(f"rebuilding the centre after {plural(len(taken), 'generation')}")
    await restore(engine, history.path, taken, config.model_name)
    return records[-1] if len(taken) < len(records) else None


def _info(config: Config, config_json: str, directory: RunDirectory, underway: Underway) -> RunInfo:
    return RunInfo(
        path=directory.path,
        config_json=config_json,
        run_seed=config.seed,
        num_generations=config.num_generations,
        start_generation=directory.history.next_generation,
        eval_every=config.eval_every,
        underway=underway,
    )


def _profile(config: Config) -> "Profile | None":
    if not config.profile:
        return None
    from es_cookbook.runs.profile import Profile

    return Profile(Path(config.log_path) / PROFILE)


def _tracker(config: Config, run: RunInfo, profile: "Profile | None") -> Tracker:
    # In this order: a disk that refuses the first leaves no thread of the last behind.
    trackers = [config.trackers(run)]
    if config.snapshot_every or (run.path / SNAPSHOTS).is_dir():
        from es_cookbook.runs.centre.snapshots import SnapshotWriter

        trust = trust_of(run.config_json)
        trackers.append(SnapshotWriter(run.path, config.snapshot_every, config.model_name, trust))
    if profile is not None:
        trackers.insert(0, profile)  # It sees the end of a generation first, and closes last.
    return Trackers(trackers)
