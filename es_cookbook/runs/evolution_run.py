"""Opens a run of evolution strategies: checks it, loads everything, restores a recorded run.

The checks take about two seconds, plus one read of the base weights on resume.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.configs import config_to_json, trust_of, trust_option
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.terminal import command, plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.evolution.schedules import Schedule
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.population.scoring import Scoring, loaded
from es_cookbook.rl.data.problem_dataset import one_by_one
from es_cookbook.rl.types import Datasets, RLDataset
from es_cookbook.runs.config import MAY_DIFFER, MINUTES, Config
from es_cookbook.runs.directory.directory import HISTORY, PROFILE, SNAPSHOTS, Recorded
from es_cookbook.runs.directory.opening import RunState, begin_in, run_state
from es_cookbook.runs.history.format import Header, Record, num_forked
from es_cookbook.runs.history.store import check_same_base, header_of
from es_cookbook.runs.loop import Run
from es_cookbook.runs.recorder import Recorder
from es_cookbook.runs.setup import Mover, begin_recording, check_fit, load_problems, open_engine
from es_cookbook.runs.signals import advise
from es_cookbook.runs.tracking.base import RunInfo, Tracker

if TYPE_CHECKING:
    from es_cookbook.population.centre_answers import CentreAnswers
    from es_cookbook.population.step_sizes import FoundSigma


class EvolutionStrategies(Mover[Run]):
    """Opens runs of evolution strategies."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.log_path = Path(config.log_path)
        self._config_json = ""
        self._state = RunState("begin")

    @override
    async def find(self, recorded: Recorded) -> str:
        config = self.config
        if config.size:
            from es_cookbook.runs.choosing import as_recorded  # Few runs choose sizes.

            config = as_recorded(config, recorded)
        self._config_json = config_to_json(config)
        state = self._state = run_state(
            recorded,
            self._config_json,
            config.num_generations,
            config.behavior_if_log_dir_exists,
            MAY_DIFFER,
        )
        if state.is_complete:
            return (
                f"{self.log_path} is already complete, with {config.num_generations} generations; "
                f"for more: {self._command('resume')} num_generations=..."
            )
        if state.decision == "resume":
            self._check_schedules(recorded.fields[0].get("num_generations"))
            self.config = config
        elif config.minutes != MINUTES and not config.size:
            raise ConfigError("minutes has no effect without size=..., the options to choose")
        await asyncio.to_thread(check_outside, self.config)
        await asyncio.to_thread(self._check_base)
        if state.decision == "resume":
            advise(f"to go on: {self._command('resume')}")
        return ""

    def _check_base(self) -> None:
        """Refuse another base before it is loaded; the engine tells its dtype later."""
        history, name = self._state.history, self.config.model_name
        if history.header is not None and history.generations:
            say(f"{self.log_path}: comparing {name} with the base that it began with")
            now = header_of(name, history.header.dtype, self.config.search_space.starts)
            check_same_base(self.log_path / HISTORY, history.header, now)

    def _check_schedules(self, then: object) -> None:
        """Refuse another length, not `then`, by which a schedule had other values so far.

        Not all of them show in the recorded steps, but genomes and temperatures follow from them.
        """
        history, now = self._state.history, self.config.num_generations
        own = range(num_forked(history.header), history.generations)
        parts = self.config, self.config.optimizer
        for name, found in ((n, getattr(part, n)) for part in parts for n in chz.chz_fields(part)):
            if not (isinstance(found, Schedule) and isinstance(then, int)):
                continue
            if any(found(t, then) != found(t, now) for t in own):
                raise RunDirectoryError(
                    f"num_generations was {then}, is {now}, and {name}={type(found).__name__} "
                    "depends on it: the recorded generations would have been others. To go on from "
                    f"the last of them: {self._fork()}"
                )

    def _fork(self) -> str:
        """Return the command that continues in a new run without repeating generations."""
        return self._command(
            "fork",
            generation=self._state.history.generations,
            output=f"{self.log_path}-longer",
            num_generations=self.config.num_generations,
        )

    def _command(self, name: str, **options: object) -> str:
        """Return the text of a command for this run, to show to the user."""
        trust = trust_option(self._config_json)
        return command(name, log_path=self.log_path, **options, **trust)

    @override
    async def open(self, stack: contextlib.AsyncExitStack) -> Run:
        began = time.perf_counter()
        engine, datasets = await open_engine(_one_by_one(self.config), stack)
        answers = None
        if self.config.size:
            datasets, answers = await self._choose_sizes(engine, datasets, began)
        config, dataset, state = self.config, datasets.train, self._state
        if config.surrogate is not None:
            of_engine = engine.tokenizer, engine.traits.context_length
            await config.surrogate.check_fit(dataset.training_problems, *of_engine)
        found = await self._found(engine, dataset, answers)
        optimizer = config.new_optimizer(engine.space, found)
        room = engine.traits.max_terms
        if room is not None and optimizer.max_terms > room:
            raise ConfigError(
                f"genomes will have up to {optimizer.max_terms} terms (optimizer.max_terms), and "
                f"the engine has room for {room}: set its terms_per_genome to "
                f"{optimizer.max_terms}, or optimizer.max_terms to {room}"
            )
        regularisers = loaded(config.regularisers, engine, config.seed)
        scoring = Scoring(config.objective, config.fitness, regularisers, config.num_pairs)
        header = await self._header(engine, found)
        held_back = await self._restore(engine, optimizer, dataset, scoring)
        history = begin_in(self.log_path, header, state, self._config_json, config.num_generations)
        stack.callback(history.close)
        advise(f"to go on: {self._command('resume')}")
        sampler = config.sampler(engine, self.log_path)
        recorder = self._recorder(sampler, datasets, stack)
        self._state = RunState("begin")  # A long run does not keep its past in memory.
        return Run(
            config=config,
            generations=range(history.next_generation, config.num_generations),
            held_back=held_back,
            dataset=dataset,
            optimizer=optimizer,
            sampler=sampler,
            scoring=scoring,
            engine=engine,
            history=history,
            recorder=recorder,
        )

    async def _choose_sizes(
        self, engine: Engine, datasets: Datasets, began: float
    ) -> "tuple[Datasets, CentreAnswers]":
        """Choose the sizes of a new run by the centre's first answers, which are returned."""
        from es_cookbook.runs.choosing import sized_run  # Few runs choose sizes.

        seconds = 60 * self.config.minutes - (time.perf_counter() - began)
        loaded_for = _one_by_one(self.config).dataset
        self.config, answers = await sized_run(self.config, engine, datasets, seconds)
        self._config_json = config_to_json(self.config)
        if self.config.dataset != loaded_for:
            datasets = await load_problems(self.config)
            await check_fit(self.config, engine, datasets)
        return datasets, answers

    async def _found(
        self, engine: Engine, dataset: RLDataset, answers: "CentreAnswers | None"
    ) -> Mapping[str, float]:
        """Return values for optimizer options that are `auto`: recorded ones, or found now."""
        header = self._state.history.header
        if header is not None and answers is None:  # Of other sizes they would be others.
            return header.found
        if not self.config.optimizer.unsettled:
            return {}
        from es_cookbook.runs.choosing import found

        return await found(self.config, engine, dataset, answers)

    async def _header(self, engine: Engine, found: Mapping[str, float]) -> Header:
        """Return the header of the history, after comparing the base with a recorded one."""
        history, traits, name = self._state.history, engine.traits, self.config.model_name
        then, dtype = history.header, traits.base_dtype
        if then is None or not history.generations:
            starts = self.config.search_space.starts
            header = await asyncio.to_thread(header_of, name, dtype, starts)
            own = {"found": found, "products": traits.products, "fork": then and then.fork}
            return dataclasses.replace(header, **own)
        if then.products not in (None, traits.products):
            say(
                f"going on with products in {traits.products or dtype}: the run began with "
                f"{then.products}, so its rollouts may differ by a rare token; engine.products "
                "chooses"
            )
        header = dataclasses.replace(then, model_name=name, dtype=dtype)
        check_same_base(self.log_path / HISTORY, then, header)
        return header

    async def _restore(
        self, engine: Engine, optimizer: Optimizer, dataset: RLDataset, scoring: Scoring
    ) -> Record | None:
        """Bring engine, optimizer, dataset and scoring to the end of the history.

        If the genomes of the next generation are around an earlier centre, the engine is brought to
        that one, and the record whose step it has not taken is returned.

        The first steps of a fork are those of its parent, taken as given: an optimizer with a state
        starts anew at the fork, and knows only these steps.
        """
        records = self._state.history.records
        if not records:
            return None
        from es_cookbook.runs.recorded import replay_dataset, replay_optimizer, restore

        given = num_forked(self._state.history.header)
        replay_optimizer(
            optimizer,
            records,
            given,
            "; resume with the version of es_cookbook and the num_generations that the run began "
            f"with, or take the recorded steps as given: {self._fork()}",
        )
        replay_dataset(dataset, records, given)
        for record in records:
            scoring.tell(record.results_P)
        taken = records[: self.config.centre_of(len(records))]
        say(f"rebuilding the centre after {plural(len(taken), 'generation')}")
        await restore(engine, self.log_path / HISTORY, taken, self.config.model_name)
        return records[-1] if len(taken) < len(records) else None

    def _recorder(
        self, sampler: PopulationSampler, datasets: Datasets, stack: contextlib.AsyncExitStack
    ) -> Recorder:
        """Build the recorder of the run, at the end of the history."""
        config, engine, history = self.config, sampler.engine, self._state.history
        info = RunInfo(
            path=self.log_path,
            config_json=self._config_json,
            run_seed=config.seed,
            num_generations=config.num_generations,
            start_generation=history.generations,
            measured=self._state.metrics,
            underway=sampler.underway,
        )
        of_model = engine.tokenizer, engine.traits.context_length, config.seed
        regularisers, test_P = config.regularisers, datasets.test_P
        recorder = begin_recording(
            config,
            info,
            sampler,
            datasets,
            stack,
            forked=num_forked(history.header),
            trained_on=[d for each in regularisers for d in each.trained_on(engine.tokenizer)],
            extra_P=[
                p for each in regularisers for p in each.held_out(*of_model, test_P) if test_P
            ],
            trackers=_snapshots(config, info),
        )
        for record in history.records:
            recorder.progress.moved(record.step)
        if config.profile:
            from es_cookbook.runs.profile import Profile

            profile = stack.enter_context(Profile(self.log_path / PROFILE))
            engine.spans = sampler.spans = recorder.spans = profile
        return recorder


def check_outside(config: Config) -> None:
    """Check trackers, data, files of the search space and engine before a model is loaded."""
    own = config.trackers, _one_by_one(config).dataset, config.search_space
    for builder in (*own, *config.regularisers):
        builder.check()
    config.engine.check(config.model_name)  # It may be fetched.
    config.optimizer.check(config.model_name, config.search_space)


def _one_by_one(config: Config) -> Config:
    """Return the Config with one problem per batch, if the size of a batch is to be chosen."""
    if "dataset.problems_per_generation" in config.size:
        return chz.replace(config, dataset=one_by_one(config.dataset))
    return config


async def tried_sigmas(config: Config) -> "FoundSigma":
    """Find the sigma that the run would use, without starting the run.

    Raises:
        ESCookbookError: As `opened` and `find_sigma`.
    """
    from es_cookbook.runs import choosing

    await asyncio.to_thread(check_outside, config)
    async with contextlib.AsyncExitStack() as stack:
        engine, datasets = await open_engine(config, stack)
        return await choosing.find_sigma_for(config, engine, datasets.train)


def _snapshots(config: Config, run: RunInfo) -> list[Tracker]:
    if not config.snapshot_every and not (run.path / SNAPSHOTS).is_dir():
        return []
    from es_cookbook.runs.centre.snapshots import SnapshotWriter

    trust = trust_of(run.config_json)
    return [SnapshotWriter(run.path, config.snapshot_every, config.model_name, trust)]
