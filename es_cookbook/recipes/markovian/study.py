"""Study the thoughts of a run: can answers be read from them, and by whom, and what if damaged?

    python -m es_cookbook.recipes.markovian.study log_path=runs/markovian
    ... log_path=runs/markovian against=runs/non_markovian scorers=Qwen/Qwen2.5-0.5B,other/model

The run's centre thinks about the held-out problems, greedily, and what is measured is listed in
`measuring`. It needs the run directory and the run's model alone; runs of evolution strategies and
of gradients are studied alike. `against` is another run, usually one trained with
`dataset.markovian=False`: both are measured as they were trained, and compared problem by problem.
`scorers` are other models, which read the thoughts of the run.

`output`, a new directory, has

    study.json       means with 95 % intervals, and comparisons
    thoughts.jsonl   a line a problem: question, answer, thought, what was answered behind it
    *.png, *.svg     accuracy, hand-written thoughts, and scorers

The run directory is only read. `es-cookbook plot kind=fragility` draws what damage costs.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import cast

import anyio
import chz

from es_cookbook import train
from es_cookbook.baselines.checkpoints import latest_checkpoint, recorded_gradients
from es_cookbook.baselines.gradient_config import GradientConfig
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import Engine
from es_cookbook.population.evaluate import attempt
from es_cookbook.population.results import (
    Comparison,
    Estimate,
    Results,
    check_same_problems,
    compare,
    results_of,
)
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.recipes.markovian.dataset import MarkovianDatasetBuilder, check_room
from es_cookbook.recipes.markovian.env import MarkovianProblem
from es_cookbook.recipes.markovian.measuring import EXTRACTIONS, FRAGILITY, ScoredEnv, studied
from es_cookbook.recipes.markovian.problems import Problem
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import EnvGroupBuilder, Trajectory, TrajectoryGroup
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.report.plots import draw_bars, require_matplotlib
from es_cookbook.train.recorded import RecordedRun, rebuild
from es_cookbook.train.stopping.signals import run_until_signal

STUDY, THOUGHTS = "study.json", "thoughts.jsonl"
_WRITTEN = ("written", "unrelated")
_SHOWN = ("correct", "logprob", "leaks", FRAGILITY, *_WRITTEN, "useful")


@chz.chz
class Config:
    """Study the chains of thought of a run."""

    log_path: str = chz.field(doc="run directory; it is only read")
    against: str = chz.field(default="", doc="another run to compare with; none if empty")
    scorers: tuple[str, ...] = chz.field(
        default=(), doc="models, directories or Hub names, that read the run's thoughts"
    )
    output: str = chz.field(
        default="", doc="directory to write to, which must not exist; <log_path>-study if empty"
    )
    num_problems: int = chz.field(default=200, doc="most held-out problems")
    plots: bool = chz.field(default=True, doc="draw, with matplotlib")
    seed: int = chz.field(default=0, doc="of what is damaged, and of intervals")
    trust: tuple[str, ...] = chz.field(
        default=(), doc="packages beside es_cookbook whose code config.json may name"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_problems", at_least=1)
        check_range(self, "seed", at_least=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Thoughts:
    """What a run thought, and what that is worth.

    Attributes:
        name: the run directory, or the model that reads.
        markovian: whether readers do without the question.
        lines_P: what `thoughts.jsonl` has.
    """

    name: str
    markovian: bool
    results: Results
    lines_P: Sequence[Mapping[str, object]]


async def study(config: Config) -> tuple[list[Thoughts], list[Thoughts]]:
    """Have the run think, and the other one if there is one; and others read what it thought.

    Returns:
        The runs, and the scorers.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    runs = [_recorded(name, config) for name in (config.log_path, config.against) if name]
    for run in runs:
        run.dataset.check()
    found = [await _thought(run, config) for run in runs]
    if len(found) > 1:
        check_same_problems(found[0].results.names_P, found[1].results.names_P)
    scored = [await _read(runs[0], model, found[0]) for model in config.scorers]
    return found, scored


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """A run of either kind, as its directory has it."""

    name: str
    config: train.Config | GradientConfig
    dataset: MarkovianDatasetBuilder
    steps: RecordedRun | None


def _recorded(name: str, config: Config) -> _Run:
    """Read a run directory.

    Raises:
        RunDirectoryError: No run is there.
        ConfigError: It is a run of another recipe.
    """
    gradients = recorded_gradients(Path(name), config.trust)
    steps = None if gradients else RecordedRun(Path(name), trust=config.trust)
    of = gradients or cast(RecordedRun, steps).config
    if not isinstance(of.dataset, MarkovianDatasetBuilder):
        raise ConfigError(
            f"{name} has a {type(of.dataset).__name__}, which has no thoughts that are read; "
            "accepted: runs of the recipe markovian"
        )
    return _Run(name, of, of.dataset, steps)


@contextlib.asynccontextmanager
async def _opened(run: _Run, model_name: str | None = None) -> AsyncGenerator[Engine]:
    """The run's centre as it is now on its engine, or another model there."""
    engine_of, space = run.config.engine, run.config.search_space
    if model_name is not None:
        say(f"loading {model_name} on {engine_of.name}")
        engine = await engine_of(model_name=model_name, search_space=space)
    elif run.steps is not None:
        say(f"{run.name}: loading {run.steps.model_name} on {engine_of.name}")
        rebuilt = await rebuild(run.steps)
        engine = rebuilt.engine
        await rebuilt.go_to(len(run.steps.records))
    else:
        checkpoint = latest_checkpoint(Path(run.name))
        assert checkpoint is not None
        say(f"{run.name}: loading {checkpoint.model} on {engine_of.name}")
        engine = await engine_of(model_name=str(checkpoint.model), search_space=space)
    try:
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.close()


async def _problems(run: _Run, engine: Engine, config: Config) -> list[MarkovianProblem]:
    datasets = await run.dataset(engine.tokenizer)
    problems_P = [p for p in datasets.test_P if isinstance(p, MarkovianProblem)]
    if not problems_P:
        raise ConfigError(f"{run.name} holds no problems out (dataset.num_test=0)")
    await datasets.train.validate(engine.traits.context_length)
    return problems_P[: config.num_problems]


async def _attempted(
    run: _Run, engine: Engine, problems_P: Sequence[EnvGroupBuilder]
) -> list[TrajectoryGroup]:
    config = run.config
    sampler = PopulationSampler(
        engine,
        sampling=config.sampling,
        rollout_timeout=config.rollout_timeout,
        turn_timeout=config.turn_timeout,
        max_failed_fraction=config.max_failed_fraction,
        run_seed=config.seed,
    )
    return await attempt(sampler, problems_P)


async def _thought(run: _Run, config: Config) -> Thoughts:
    async with _opened(run) as engine:
        problems_P = await _problems(run, engine, config)
        say(f"{run.name}: thinking about {plural(len(problems_P), 'problem')}")
        asked_P = studied(problems_P, config.seed)
        groups_P = await _attempted(run, engine, asked_P)
        results = results_of(asked_P, groups_P)
        lines_P: list[Mapping[str, object]] = []
        for p, (problem, group) in enumerate(zip(problems_P, groups_P, strict=True)):
            trajectory = group.trajectories_G_K[0][0]
            logs = trajectory.transitions[-1].logs if isinstance(trajectory, Trajectory) else {}
            told = {"problem": problem.name, "question": problem.question}
            told |= {"gold": problem.asked.gold, **logs}
            measured = {name: _finite(results.values(name)[p, 0]) for name in results.metrics}
            lines_P.append({**told, "metrics": measured})
    return Thoughts(run.name, run.dataset.markovian, results, lines_P)


async def _read(run: _Run, model_name: str, found: Thoughts) -> Thoughts:
    """Another model reads what a run thought, with its own tokenizer; what was lost is left out."""
    async with _opened(run, model_name) as engine:
        scored_P: list[ProblemGroupBuilder] = []
        for line in found.lines_P:
            if "thought" in line:
                name, thought = str(line["problem"]), str(line["thought"])
                problem = Problem(str(line["question"]), str(line["gold"]))
                asked = run.dataset.builder(name, problem, engine.tokenizer).asked
                check_room(name, asked, engine.traits.context_length)
                env = functools.partial(ScoredEnv, asked, thought)
                scored_P.append(ProblemGroupBuilder(env, name))
        results = results_of(scored_P, await _attempted(run, engine, scored_P))
    return Thoughts(model_name, found.markovian, results, [])


def estimates(found: Sequence[Thoughts], seed: int) -> dict[str, dict[str, Estimate]]:
    """Every metric's mean with its interval, by run or model."""
    return {
        of.name: {
            metric: of.results.estimate(metric, seed) for metric in sorted(of.results.metrics)
        }
        for of in found
    }


def comparisons(found: Sequence[Thoughts], seed: int) -> dict[str, Comparison]:
    """The first run less the second, metric by metric."""
    if len(found) < 2:
        return {}
    first, second = (of.results for of in found)
    both = [metric for metric in first.metrics if metric in second.metrics]
    return {metric: compare(first, second, metric, seed) for metric in both}


def main(config: Config) -> None:
    """Study, write the files, and print what came out.

    Raises:
        ConfigError: `output` is there already.
        KeyboardInterrupt: It was stopped; nothing is written.
    """
    output = Path(config.output or f"{config.log_path.rstrip('/')}-study")
    if output.exists() or not output.absolute().parent.is_dir():
        raise ConfigError(f"output must be a new directory in one that exists, found {output}")
    if config.plots:
        require_matplotlib()
    done: list[tuple[list[Thoughts], list[Thoughts]]] = []

    async def measure() -> None:
        done.append(await study(config))

    if run_until_signal(measure):
        raise KeyboardInterrupt("interrupted; nothing was written")
    found, scored = done[0]
    of_runs, of_scorers = estimates(found, config.seed), estimates(scored, config.seed)
    gaps = comparisons(found, config.seed)
    plain = {
        "runs": {of.name: {"markovian": of.markovian, **_plain(of_runs[of.name])} for of in found},
        "scorers": {name: _plain(estimate) for name, estimate in of_scorers.items()},
        "comparisons": _plain(gaps),
        "seed": config.seed,
    }
    with whole_directory(output) as directory:
        replace_file(directory / STUDY, [(json.dumps(plain, indent=1) + "\n").encode()])
        lines = [json.dumps(line) + "\n" for line in found[0].lines_P]
        replace_file(directory / THOUGHTS, ["".join(lines).encode()])
        if config.plots:
            draw_study(directory, of_runs, of_scorers)
    for name, of in of_runs.items():
        print("\n".join([name, *(_line(m, of[m].value, of[m]) for m in _SHOWN if m in of)]))
    for name, of in of_scorers.items():
        print("\n".join([f"read by {name}", *(_line(m, e.value, e) for m, e in of.items())]))
    if gaps:
        shown = [_line(m, gaps[m].difference, gaps[m]) for m in _SHOWN if m in gaps]
        print("\n".join(["the first less the second", *shown]))
    print(f"written to {output}")


def draw_study(
    directory: Path,
    of_runs: Mapping[str, Mapping[str, Estimate]],
    of_scorers: Mapping[str, Mapping[str, Estimate]],
) -> None:
    """Draw right answers, hand-written thoughts and scorers, as far as there are such.

    Raises:
        RunDirectoryError: They cannot be written.
    """
    accuracy = (*(f"correct/{each}" for each in EXTRACTIONS), "leaks")
    logprob = "log-probability of the answer (nats per token)"
    of_all = {"thoughts of the run": {name: of["informs"] for name, of in of_scorers.items()}}
    for file, groups, title, y_label in (
        (
            "accuracy",
            {name: {m: of[m] for m in accuracy} for name, of in of_runs.items()},
            "right answers by where they stand, and thoughts with the answer",
            "share of problems",
        ),
        (
            "written",
            {n: {m: of[m] for m in _WRITTEN} for n, of in of_runs.items() if "written" in of},
            "hand-written thoughts, and those about other problems",
            f"mean {logprob}",
        ),
        (
            "scorers",
            of_all if of_scorers else {},
            "what other models lose without the thought",
            f"lost {logprob}",
        ),
    ):
        if groups:
            bars = {
                name: {m.rpartition("/")[2]: (e.value, e.low, e.high) for m, e in of.items()}
                for name, of in groups.items()
            }
            draw_bars(directory / file, bars, title=f"Markovian, {title}", y_label=y_label)


def _line(metric: str, value: float, of: Estimate | Comparison) -> str:
    return f"  {metric:<12} {value:8.3f}   {of.low:.3f} to {of.high:.3f}"


def _plain(of: Mapping[str, Estimate] | Mapping[str, Comparison]) -> dict[str, object]:
    """As JSON; what is not known is null."""
    return {
        name: {key: _finite(value) for key, value in dataclasses.asdict(found).items()}
        for name, found in of.items()
    }


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cli() -> None:
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
