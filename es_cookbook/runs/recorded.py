"""A recorded run on an engine: the centre and the genomes of any generation, and the base.

A run is determined by base model, history and Config: the centre after t generations is the base
moved by the first t steps, and the genomes of generation t are those that the optimizer asked for.
The directory is only read, so the run may be in progress, on this machine or another that shares
its disk.

The optimizer repeats every generation, so its state is never written. Its inputs (fitness, and
scores if it needs them) are in the records, and its steps must be the recorded ones. The engine
takes the steps, from a snapshot if there is one, and must reach the recorded fingerprint.
"""

import asyncio
import functools
import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import chz
import numpy as np

from es_cookbook.common.errors import ConfigError, DataError, HistoryError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import one_line, say
from es_cookbook.engines.base import Engine, EngineBuilder, Host, SampleRequest, Target
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.population.group import ResidentBlock, RolloutGroup, attempted, running
from es_cookbook.rl.data.problem_dataset import compares
from es_cookbook.rl.data.task import RowDatasetBuilder
from es_cookbook.rl.timeouts import Watch
from es_cookbook.rl.types import (
    Action,
    Datasets,
    EnvGroup,
    EnvGroupBuilder,
    LostRollout,
    Observation,
    RLDataset,
    SamplingParams,
    Trajectory,
)
from es_cookbook.runs.config import Config, RunConfig, config_of_kind
from es_cookbook.runs.directory.directory import HISTORY, Recorded, check_is_run, is_of_gradients
from es_cookbook.runs.directory.opening import refuse_lost_history
from es_cookbook.runs.history.format import Record, num_forked
from es_cookbook.runs.history.store import (
    check_fingerprint,
    check_same_base,
    header_of,
    read_history,
)

Split: TypeAlias = Literal["test", "train"]
"""The held-out problems, or the batch of the generation."""


def open_run(
    log_path: Path,
    model_name: str | None = None,
    trust: Collection[str] = (),
    typed: Collection[str] = (),
    *,
    or_of_gradients: bool = False,
) -> "RecordedRun":
    """Read a run directory.

    Args:
        log_path: the directory.
        model_name: current location of the base model; None: the recorded one.
        trust: further packages whose classes and functions its config.json may name, and
            addresses that it may reach.
        typed: options that replace recorded ones.
        or_of_gradients: also accept runs trained by gradients.

    Raises:
        RunDirectoryError: No run is there.
        ConfigError: Its config.json cannot be read.
        HistoryError: Its history is damaged.
    """
    recorded = check_is_run(log_path, or_of_gradients)
    gradients = is_of_gradients(log_path)
    kind = RunConfig if gradients else Config
    config = config_of_kind(kind, recorded, trust, (*typed, "trackers"))
    if not gradients:
        refuse_lost_history(recorded)
    own = str(log_path) if gradients else config.model_name
    return RecordedRun(recorded, config, model_name or own)


class RecordedRun:
    """A run directory, which is only read.

    Attributes:
        header: None if it is not recorded yet, and for gradients.
        records: records of the generations, in order; none for gradients.
        model_name: name of the base; for gradients, the run directory.
    """

    def __init__(self, recorded: Recorded, config: RunConfig, model_name: str) -> None:
        log_path, history = recorded.log_path, recorded.history
        if history.damage is not None:
            raise history.damage
        self.history = log_path / HISTORY
        self.config = config
        self.model_name = model_name
        self.header = history.header
        self.records: Sequence[Record] = history.records
        self._genomes_G = functools.lru_cache(maxsize=1)(self._asked)

    def refresh(self) -> None:
        """Read the history again."""
        self.records = tuple(read_history(self.history))

    @functools.cached_property
    def _space(self) -> SearchSpace:
        from es_cookbook.runs.centre.replay import space_of  # torch, which a Config does without

        return space_of(self.config.space, self.model_name)

    @property
    def last_with_genomes(self) -> int:
        """The last generation with genomes, recorded or not; the end of a finished run has none."""
        return min(len(self.records), self.config.num_generations - 1)

    def centre_of(self, generation: int) -> int:
        """Return which centre the genomes of a generation perturb, as the generations before it."""
        if generation < len(self.records):
            centre = self.records[generation].centre
            return generation if centre is None else centre
        return self.config.centre_of(generation)

    def check_generation(self, generation: int) -> None:
        """Refuse a generation that has not been reached.

        Raises:
            ConfigError: Tells the recorded generations.
        """
        if not 0 <= generation <= len(self.records):
            raise ConfigError(
                f"there is no generation {generation}: the run has recorded {len(self.records)} of "
                f"{self.config.num_generations}, so 0 (the base) to {len(self.records)} are there"
            )

    def resolved(self, generation: int | None, who: Target) -> int:
        """Return the given generation, or the latest one that has this target.

        Raises:
            ConfigError: It has not been reached, or there is no such genome.
            HistoryError: As `genomes`.
        """
        if isinstance(who, int):
            generation = self.last_with_genomes if generation is None else generation
            self.genome(generation, who)
        elif generation is not None:
            self.check_generation(generation)
        return len(self.records) if generation is None else generation

    def genomes(self, generation: int) -> Sequence[Genome]:
        """Return the population of a generation, `genomes_G`.

        Raises:
            ConfigError: The generation has none, or has not been reached.
            HistoryError: The optimizer no longer gives the recorded steps.
        """
        self.check_generation(generation)
        return self._genomes_G(generation)

    def genome(self, generation: int, number: int) -> Genome:
        """Return one of `genomes`.

        Raises:
            ConfigError: There is none of that number.
            HistoryError: As `genomes`.
        """
        genomes_G = self.genomes(generation)
        if not 0 <= number < len(genomes_G):
            raise ConfigError(
                f"there is no genome {number}: generation {generation} has {len(genomes_G)}, 0 to "
                f"{len(genomes_G) - 1}"
            )
        return genomes_G[number]

    def best(self, generation: int, count: int) -> list[Genome]:
        """Return the genomes of a recorded generation with the highest fitness, best first.

        Raises:
            ConfigError: The generation is not recorded, or fewer of its genomes have fitness.
            HistoryError: As `genomes`.
        """
        genomes_G = self.genomes(generation)
        if generation >= len(self.records):
            raise ConfigError(
                f"the fitness of generation {generation} is not known yet: {len(self.records)} "
                "are recorded"
            )
        fitness_G = self.records[generation].fitness_G
        has_centre = getattr(getattr(self.config, "optimizer", None), "evaluate_centre", False)
        ranked = [g for g, genome in enumerate(genomes_G) if not has_centre or genome != Genome()]
        ranked = [g for g in ranked if not math.isnan(fitness_G[g])]
        if count > len(ranked):
            raise ConfigError(
                f"generation {generation} has {len(ranked)} genomes with fitness, and {count} are "
                "asked for"
            )
        return [genomes_G[g] for g in sorted(ranked, key=lambda g: -fitness_G[g])[:count]]

    def _asked(self, generation: int) -> Sequence[Genome]:
        config = self.config
        if generation >= config.num_generations:
            raise ConfigError(
                f"generation {generation} has no genomes: it is the end of the run; the last that "
                f"has them is generation={config.num_generations - 1} (in play: /generation "
                f"{config.num_generations - 1})"
            )
        fork = self.header and self.header.fork
        first = fork.generation if fork else 0
        if fork and generation < first:
            raise ConfigError(
                f"generation {generation} was not this run's but that of log_path="
                f"{one_line(fork.log_path)}, from which it was forked; the first whose genomes are "
                f"here is generation={first} (in play: /generation {first})"
            )
        optimizer = config.new_optimizer(self._space, self.header.found if self.header else {})
        replay_optimizer(
            optimizer,
            self.records[:generation],
            first,
            ", so its genomes may not come back either; use the version of es_cookbook that began "
            "the run",
        )
        return optimizer.ask(generation)


@dataclass(frozen=True, slots=True)
class Played:
    """One attempt at one problem.

    Attributes:
        problem: its name, or "".
        reward: reward of the Env; NaN for a lost rollout.
        without_group_reward: whether a reward that compares genomes was left out.
    """

    problem: str
    rollout: Trajectory | LostRollout
    reward: float
    without_group_reward: bool


async def rebuild(run: RecordedRun, engine: EngineBuilder | None = None) -> "RebuiltRun":
    """Start an engine for a run, the run's own if `engine` is None.

    Raises:
        ModelError: The model cannot be loaded.
        ConfigError: The engine cannot be built here.
        HistoryError: The model is not the run's base.
    """
    builder = engine or run.config.engine
    name, search_space = run.model_name, run.config.space
    rebuilt = RebuiltRun(run, await builder(model_name=name, search_space=search_space))
    try:
        if run.header is not None:
            dtype = rebuilt.engine.traits.base_dtype
            now = await anyio.to_thread.run_sync(header_of, name, dtype, search_space.starts)
            check_same_base(run.history, run.header, now)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await rebuilt.close()
        raise
    return rebuilt


class RebuiltRun:
    """A run on an engine that holds the centre of `generation`.

    While a genome answers that perturbs an earlier centre, the engine holds that one.
    """

    def __init__(self, run: RecordedRun, engine: Engine) -> None:
        self.run = run
        self.engine = engine
        self.generation = 0
        self._at = 0
        self._datasets: Datasets | None = None
        self._told = 0

    async def go_to(self, generation: int) -> None:
        """Restore the centre after so many generations.

        Raises:
            ConfigError: The generation has not been reached.
            HistoryError: The centre has another fingerprint than recorded; this object cannot be
                used any more.
        """
        self.run.check_generation(generation)
        if generation == 0 and self.run.records:
            await self._restore(1)  # Only moved does the base show whether it is the run's.
        await self._restore(generation)
        self.generation = generation

    async def _restore(self, generation: int) -> None:
        run, records = self.run, self.run.records[:generation]
        if records or self._at:
            await restore(self.engine, run.history, records, run.model_name)
        self._at = generation

    async def answer(
        self, who: Target, observation: Observation, params: SamplingParams, seed: int
    ) -> Action:
        """Sample one action of a genome of this generation, the centre or the base.

        Raises:
            ConfigError: There is no such genome.
            RequestError: The engine can never serve it: too long a prompt, say.
        """
        async with self.answering(who) as (host, target):
            return await host.sample(SampleRequest(target, observation, params, seed))

    @asynccontextmanager
    async def answering(self, who: Target) -> AsyncGenerator[tuple[Host, Target]]:
        """Yield a host and the target to request from it, for several requests.

        Raises:
            ConfigError: There is no such genome.
        """
        async with self._hosted(who) as residents:
            yield residents.host or self.engine, 0 if isinstance(who, int) else who

    async def play(
        self,
        who: Target,
        split: Split,
        number: int,
        overrides: Mapping[str, object],
        seed: int | None = None,
    ) -> Played:
        """Attempt a problem with the run's own Env, sampling and seeds.

        So it repeats the rollouts in `rollouts.jsonl` (attempt 0 of each).

        Args:
            who: a genome of this generation, the centre or the base.
            split: "test" for the held-out problems, sampled as in an evaluation; "train" for the
                batch of this generation.
            number: index of the problem.
            overrides: other values of sampling parameters.
            seed: instead of the run's own.

        Raises:
            ConfigError: There is no such problem or genome.
            DataError: The dataset cannot be loaded here.
        """
        config = self.run.config
        builder, seed_of_call = await self._problem(split, number)
        if seed is not None:
            seed_of_call = functools.partial(derive_seed, seed, "play", number)
        if split == "test":
            as_run = chz.replace(config.sampling, temperature=config.eval_temperature)
        elif isinstance(config, Config) and config.surrogate is not None:
            as_run = config.surrogate.sampling(config.sampling)
        else:
            as_run = config.sampling_at(self.generation)
        sampling = chz.replace(as_run, **overrides)
        watch = Watch(config.rollout_timeout, turn_timeout=config.turn_timeout)
        problem = _Alone(builder) if (alone := compares(builder)) else builder
        group = RolloutGroup(problem, self.engine, sampling, 1, [seed_of_call], watch)
        async with running([group], watch), self._hosted(who) as residents:
            await attempted([group], residents, watch)
        done = group.result()
        name = getattr(builder, "name", "")
        return Played(str(name), done.trajectories_G_K[0][0], done.rewards_G_K[0][0], alone)

    async def usual_stop(self) -> tuple[str, ...]:
        """Return the texts that end answers if `sampling.stop` is None, by the data set.

        If it cannot be loaded here, say so and return none.
        """
        config = self.run.config
        if config.sampling.stop is not None or not isinstance(config.dataset, RowDatasetBuilder):
            return ()
        try:
            datasets = await self._loaded()
            problem = (datasets.test_P or self._batch(datasets.train))[0]
        except (ConfigError, DataError) as error:
            say(f"answers may be longer than in the run: {error}")
            return ()
        return getattr(problem, "usual_stop", ())

    async def close(self) -> None:
        """Close the engine; closing twice is harmless."""
        await self.engine.close()

    @asynccontextmanager
    async def _hosted(self, who: Target) -> AsyncGenerator[ResidentBlock]:
        """Make the target resident for this block: a genome as number 0."""
        run, generation = self.run, self.generation
        centre = run.centre_of(generation) if isinstance(who, int) else generation
        if centre != self._at:
            await self._restore(centre)
        if not isinstance(who, int):
            yield ResidentBlock(range(1), [who])
            return
        genome = run.genome(generation, who)
        async with self.engine.lend() as host:
            await host.load([genome])
            yield ResidentBlock(range(1), [0], host)

    async def _problem(
        self, split: Split, number: int
    ) -> tuple[EnvGroupBuilder, Callable[[int], int]]:
        """Return a problem, and a function that maps a call's number to its sampling seed."""
        config = self.run.config
        datasets = await self._loaded()
        if split == "test":
            problems_P = datasets.test_P
            seed_of = functools.partial(derive_seed, config.seed, "evaluation")
            what, whose = "held-out problem", "the run"
        else:
            problems_P = self._batch(datasets.train)
            seed_of = functools.partial(derive_seed, config.seed, "sampling", self.generation)
            what, whose = "training problem", f"the batch of generation {self.generation}"
        if not 0 <= number < len(problems_P):
            there = f"{len(problems_P)}, 0 to {len(problems_P) - 1}" if problems_P else "none"
            raise ConfigError(f"there is no {what} {number}: {whose} has {there}")
        row = number
        if split == "train" and config.num_pairs:  # As they were dealt out.
            row = number // config.num_pairs
        return problems_P[number], functools.partial(seed_of, row, 0)

    async def _loaded(self) -> Datasets:
        if self._datasets is None:
            self._datasets = await self.run.config.dataset(self.engine.tokenizer)
        return self._datasets

    def _batch(self, dataset: RLDataset) -> Sequence[EnvGroupBuilder]:
        """Return the batch of this generation, after passing earlier results to the dataset."""
        if self._told < self.generation:
            records = self.run.records[: self.generation]
            replay_dataset(dataset, records, num_forked(self.run.header), self._told)
            self._told = self.generation
        return dataset.get_batch(self.generation)


class _Alone(EnvGroupBuilder):
    """A problem without its group reward."""

    def __init__(self, builder: EnvGroupBuilder) -> None:
        self._builder = builder

    async def make_envs(self, num_envs: int) -> EnvGroup:
        return await self._builder.make_envs(num_envs)


def replay_optimizer(
    optimizer: Optimizer, records: Sequence[Record], given: int, advice: str
) -> None:
    """Repeat these generations with a new optimizer, and compare its steps with the recorded ones.

    The first `given` steps, from the parent of a fork, are taken as they are. `advice` ends the
    error's sentence.

    Raises:
        HistoryError: It gives another step than the recorded one, or needs scores that are not
            recorded.
    """
    if given:
        optimizer.begin_after([record.step for record in records[:given]])
    for record in records[given:]:
        genomes_G = optimizer.ask(record.generation)
        scores_P_G = None if record.scores_P_G is None else np.array(record.scores_P_G)
        if optimizer.records_scores and scores_P_G is None:
            raise HistoryError(
                f"generation {record.generation}: the optimizer goes by rewards problem by "
                f"problem, and the history does not have them{advice}"
            )
        fitness_G = np.array(record.fitness_G)
        step = optimizer.tell(record.generation, genomes_G, scores_P_G, fitness_G)
        if step != record.step:
            raise HistoryError(
                f"generation {record.generation}: the recorded fitness does not give the recorded "
                f"step any more{advice}"
            )


def replay_dataset(
    dataset: RLDataset, records: Sequence[Record], given: int, told: int = 0
) -> None:
    """Pass recorded results to a dataset, except the first `told`, which it has.

    The first `given` come from the parent of a fork. Results may be recorded for the objective
    alone.

    Raises:
        DataError: They were of other problems than the dataset has.
    """
    for record in records[told:]:
        if record.results_P and dataset.depends_on_results:
            dataset.tell(record.generation, record.results_P, record.generation < given)


async def restore(
    engine: Engine, history: Path, records: Sequence[Record], model_name: str
) -> None:
    """Restore the centre of an engine after these generations, from a snapshot if there is one.

    Without records the centre is the base.

    Raises:
        HistoryError: The centre has another fingerprint than the recorded one.
    """
    # torch, which a Config does without
    from es_cookbook.runs.centre.replay import latest_snapshot

    fingerprints = [record.fingerprint for record in records]
    snapshot = await asyncio.to_thread(latest_snapshot, history.parent, fingerprints)
    found = await engine.restore([record.step for record in records], snapshot and snapshot.path)
    if records:
        check_fingerprint(len(records), fingerprints[-1], found, model_name)
