"""Subjects of an evaluation, its problems, and the measurement.

A run is only read and may be in progress. Two generations of one run share an engine.
"""

import dataclasses
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import chz

from es_cookbook.cli.options import RunOrModel
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import Engine, EngineBuilder, Target
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.population.evaluate import attempt, summary
from es_cookbook.population.results import Results, check_same_problems, problem_names, results_of
from es_cookbook.rl.data.problem_dataset import ProblemDataset, check_attempted
from es_cookbook.rl.types import EnvGroupBuilder, LostRollout, Trajectory, TrajectoryGroup
from es_cookbook.runs.config import RunConfig, closing
from es_cookbook.runs.directory.directory import read_trained_on
from es_cookbook.runs.history.store import header_of
from es_cookbook.runs.recorded import RebuiltRun, RecordedRun, Split, open_run, rebuild


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A model, or a run at some of its generations.

    Attributes:
        name: the model's name or the run directory, as it was given.
        run: None for a model.
        generations: at which it is evaluated; (0,) for a model.
        trained: directory of the run that trained it; None if unknown.
        voters: number of a generation's best genomes that answer in place of the centre; 0: none.
    """

    name: str
    model_name: str
    engine: EngineBuilder
    search_space: SearchSpaceBuilder
    run: RecordedRun | None = None
    generations: Sequence[int] = (0,)
    trained: Path | None = None
    voters: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The problems of an evaluation, and how they are attempted.

    Attributes:
        problems: name of their recipe or file; empty for a run's own.
        config: gives the problems and how they are attempted.
    """

    problems: str
    config: RunConfig
    split: Split


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one subject at one generation.

    Attributes:
        name: as in `Subject`.
        generation: None for a model.
        model: identity of the weights: base and fingerprint.
        metrics: means by the names of `metrics.jsonl`, without `test/`.
        trained_on: number of problems that the run may have trained on; None if unknown.
        answers_P: the last message of the first attempt at each problem.
        voters: number of genomes that answered in place of the centre; 0: none.
        is_base: whether the centre of a run answered as its base, before the first step.
    """

    name: str
    generation: int | None
    model: Mapping[str, str | None]
    metrics: Mapping[str, float]
    results: Results
    trained_on: int | None = None
    answers_P: Sequence[str] = ()
    voters: int = 0
    is_base: bool = False

    @property
    def title(self) -> str:
        if self.generation is None:
            return self.name
        if self.voters:
            best = f"the best {plural(self.voters, 'genome')}" if self.voters > 1 else "best genome"
            return f"{self.name}, {best} of generation {self.generation}"
        if self.generation == 0:
            return f"{self.name} before its first generation{' (the base)' * self.is_base}"
        return f"{self.name} after {plural(self.generation, 'generation')}"


async def measure(subjects: Sequence[Subject], setting: Setting) -> list[Evaluation]:
    """Evaluate each subject at each of its generations, on the same problems.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    found: list[Evaluation] = []
    names_P: Sequence[str] | None = None
    for subject in subjects:
        async with opened(subject) as (engine, rebuilt):
            problems_P = await problems_of(setting, engine)
            here_P = problem_names(problems_P)
            check_same_problems(here_P, here_P if names_P is None else names_P)
            names_P = here_P
            for generation in subject.generations:
                if rebuilt is not None:
                    await rebuilt.go_to(generation)
                found.append(await _evaluation(subject, generation, setting, engine, problems_P))
    return found


def subject_of(config: RunOrModel, engine: EngineBuilder | None, who: Target = "centre") -> Subject:
    """Return a subject: a run at a generation, or a model, on an engine.

    Raises:
        ESCookbookError: There is no such run, or no such genome in it.
    """
    if not config.log_path:
        return of_model(str(config.model_name), engine or TorchEngineBuilder())
    run = open_run(Path(config.log_path), config.model_name, config.trust)
    engine, at = engine or run.config.engine, [run.resolved(config.generation, who)]
    return Subject(config.log_path, run.model_name, engine, run.config.space, run, at)


def of_model(name: str, engine: EngineBuilder) -> Subject:
    """Return a model as a subject, quantised or not: beside an adapter that changes nothing."""
    return Subject(name, name, engine, Adapter(rank=1))


@asynccontextmanager
async def opened(subject: Subject) -> AsyncGenerator[tuple[Engine, RebuiltRun | None]]:
    """Yield an engine with the model, and the rebuilt run if the subject is one."""
    say(f"{subject.name}: loading {subject.model_name} on {subject.engine.name}")
    name, space = subject.model_name, subject.search_space
    rebuilt = None if subject.run is None else await rebuild(subject.run, subject.engine)
    built = rebuilt.engine if rebuilt else await subject.engine(model_name=name, search_space=space)
    async with closing(built) as engine:
        yield engine, rebuilt


async def problems_of(setting: Setting, engine: Engine) -> Sequence[EnvGroupBuilder]:
    """Return the problems to attempt, after checking them.

    Raises:
        ConfigError: There are none.
        DataError: A prompt is as long as the context, or a gold answer cannot be said.
    """
    datasets = await setting.config.dataset(engine.tokenizer)
    problems_P = datasets.test_P
    if setting.split == "train":
        if not isinstance(datasets.train, ProblemDataset):
            raise ConfigError(
                f"split=train: a {type(datasets.train).__name__} chooses its problems batch by "
                "batch and has no list of them; take split=test"
            )
        problems_P = cast("Sequence[EnvGroupBuilder]", datasets.train.builders)
    if not problems_P:
        raise ConfigError(
            f"{setting.problems or 'the run'}: there are no held-out problems; hold some out "
            "(dataset.num_test=200) or give others (dataset.test_source=...), or take those that "
            "are trained on (split=train)"
        )
    context_length, sampling = engine.traits.context_length, setting.config.sampling
    await check_attempted(problems_P, engine.tokenizer, context_length, sampling)
    return problems_P


async def _evaluation(
    subject: Subject,
    generation: int,
    setting: Setting,
    engine: Engine,
    problems_P: Sequence[EnvGroupBuilder],
) -> Evaluation:
    after = f" after {plural(generation, 'generation')}" if subject.run is not None else ""
    say(f"evaluating {subject.name}{after} on {plural(len(problems_P), 'problem')}")
    config = setting.config
    if subject.run is not None and subject.voters:
        voters = subject.run.best(generation, subject.voters)
        sampling = chz.replace(config.sampling, temperature=config.eval_temperature)
        sampler = config.sampler(engine, sampling=sampling)
        groups_P = list(map(_as_attempts, await sampler.rollout(generation, problems_P, voters)))
    else:
        how = config.eval_attempts, config.eval_temperature
        groups_P = await attempt(config.sampler(engine), problems_P, *how)
    results = results_of(problems_P, groups_P)
    return Evaluation(
        name=subject.name,
        generation=None if subject.run is None else generation,
        model=await _identity(subject, generation, engine),
        metrics=summary(groups_P, results.at_ks()),
        results=results,
        trained_on=trained_on(subject, generation, problems_P),
        answers_P=[_said_last(group.trajectories_G_K[0][0]) for group in groups_P],
        voters=subject.voters,
        is_base=generation == 0 == subject.voters and subject.search_space.starts_at_base,
    )


def _as_attempts(group: TrajectoryGroup) -> TrajectoryGroup:
    """Return results in which the genomes' single attempts count as attempts of one policy."""
    given_G_K = group.group_rewards_G_K
    return dataclasses.replace(
        group,
        trajectories_G_K=[list(itertools.chain(*group.trajectories_G_K))],
        group_rewards_G_K=given_G_K and [list(itertools.chain(*given_G_K))],
    )


def _said_last(trajectory: Trajectory | LostRollout) -> str:
    return "" if isinstance(trajectory, LostRollout) else trajectory.transitions[-1].action.text


def trained_on(
    subject: Subject, generation: int, problems_P: Sequence[EnvGroupBuilder]
) -> int | None:
    """Return how many problems a run may have trained on by this generation; None if unknown."""
    if subject.trained is None or (subject.run is not None and generation == 0):
        return None if subject.trained is None else 0
    known = read_trained_on(subject.trained)
    return known and known.overlap(problem.digests for problem in problems_P)


async def _identity(subject: Subject, generation: int, engine: Engine) -> Mapping[str, str | None]:
    run, dtype = subject.run, engine.traits.base_dtype
    header = run.header if run is not None else None
    if header is None:
        header = await anyio.to_thread.run_sync(header_of, subject.model_name, dtype)
    records = run.records[:generation] if run is not None else ()
    return {
        "model_name": subject.model_name,
        "weights": header.weights,
        "tokenizer": header.tokenizer,
        "dtype": dtype,
        "fingerprint": f"{records[-1].fingerprint:016x}" if records else None,
    }
