"""Study the thoughts of a run: how well answers can be read from them, and what damage costs.

    python -m es_cookbook.plugins.markovian.study log_path=runs/markovian
    ... log_path=runs/markovian against=runs/non_markovian scorers=Qwen/Qwen2.5-0.5B,other/model

The run's centre thinks about the held-out problems, greedily; `measuring` lists what is measured.
Only the run directory, which is not changed, and the run's model are needed. Runs of evolution
strategies and of gradients are studied alike. `against` is another run, usually one trained with
`dataset.markovian=False`: both are measured as they were trained, and compared problem by problem.
`scorers` are other models, which read the thoughts of the run.

`output`, a new directory, has

    study.json       means with 95 % intervals, and comparisons
    thoughts.jsonl   a line per problem: question, answer, thought, and the answer after it
    *.png, *.svg     accuracy, scorers, and what damage costs
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import chz

from es_cookbook.cli.evaluate.report import compared, compared_line
from es_cookbook.cli.options import new_output
from es_cookbook.common.checks import in_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.terminal import plural, say
from es_cookbook.plugins.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.plugins.markovian.env import MarkovianProblem
from es_cookbook.plugins.markovian.measuring import (
    DAMAGES,
    EXTRACTIONS,
    FRAGILITY,
    SHARES,
    ScoredEnv,
    studied,
)
from es_cookbook.plugins.markovian.problems import Problem
from es_cookbook.plugins.report.plots import Line, draw, draw_bars, require_matplotlib
from es_cookbook.population.evaluate import attempt
from es_cookbook.population.results import (
    Comparison,
    Estimate,
    Results,
    check_same_problems,
    results_of,
)
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.data.problem_dataset import validate
from es_cookbook.rl.problem_env import ProblemGroupBuilder, check_prompt
from es_cookbook.rl.types import Trajectory, TrajectoryGroup
from es_cookbook.runs.config import RunConfig, closing
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.recorded import RecordedRun, open_run, rebuild
from es_cookbook.runs.signals import result_until_signal
from es_cookbook.runs.tracking.jsonl import finite

STUDY, THOUGHTS = "study.json", "thoughts.jsonl"
_SHOWN = ("correct", "logprob", "informs", "leaks", FRAGILITY, "written", "unrelated", "useful")
_Lines: TypeAlias = Sequence[Mapping[str, object]]
"""Lines of `thoughts.jsonl`, one per problem."""


@chz.chz
class Config:
    """Study the chains of thought of a run."""

    log_path: str = chz.field(doc="run directory; it is only read")
    against: str = chz.field(default="", doc="another run to compare with; none if empty")
    scorers: tuple[str, ...] = chz.field(default=(), doc="models that read the run's thoughts")
    output: str = chz.field(default="", doc="new directory to write to; empty: <log_path>-study")
    num_problems: int = chz.field(default=200, doc="most held-out problems")
    plots: bool = chz.field(default=True, doc="draw, with matplotlib")
    seed: int = chz.field(default=0, doc="seed of the damage, and of intervals")
    trust: tuple[str, ...] = chz.field(default=(), doc="packages that config.json may name")

    _num_problems = in_range("num_problems", at_least=1)
    _seed = in_range("seed", at_least=0)


async def study(
    config: Config, runs: Mapping[str, RecordedRun]
) -> tuple[dict[str, Results], dict[str, Results], _Lines]:
    """Have the runs think, the studied one first, and the scorers read its thoughts.

    Returns:
        Results of the runs and of the scorers, by name, and the lines of `thoughts.jsonl`.

    Raises:
        ESCookbookError: A mistake of the user, in one sentence.
    """
    found: dict[str, Results] = {}
    lines: list[_Lines] = []
    for name, run in runs.items():
        found[name], lines_P = await _thought(name, run, config)
        lines.append(lines_P)
    first_P, *others = (results.names_P for results in found.values())
    for other_P in others:
        check_same_problems(first_P, other_P)
    scored: dict[str, Results] = {}
    run = runs[config.log_path].config
    for model_name in config.scorers:
        say(f"loading {model_name} on {run.engine.name}")
        space = run.space
        async with closing(await run.engine(model_name=model_name, search_space=space)) as engine:
            scored[model_name] = await _read(run, run.sampler(engine), lines[0])
    return found, scored, lines[0]


def _recorded(name: str, config: Config) -> RecordedRun:
    """Open a run of evolution strategies or of gradients.

    Raises:
        RunDirectoryError: There is no run.
        ConfigError: It is a run of another recipe.
    """
    run = open_run(Path(name), trust=config.trust, or_of_gradients=True)
    dataset = run.config.dataset
    if not isinstance(dataset, MarkovianDatasetBuilder):
        raise ConfigError(
            f"{name} has a {type(dataset).__name__}, which has no thoughts; "
            "accepted: runs of the recipe markovian"
        )
    dataset.check()
    return run


def _dataset(run: RunConfig) -> MarkovianDatasetBuilder:
    return cast(MarkovianDatasetBuilder, run.dataset)


async def _thought(
    name: str, run: RecordedRun, config: Config
) -> tuple[Results, list[Mapping[str, object]]]:
    """Let a run's centre think: return its results, and a line per problem."""
    say(f"{name}: loading {run.model_name} on {run.config.engine.name}")
    rebuilt = await rebuild(run)
    async with closing(rebuilt.engine) as engine:
        await rebuilt.go_to(len(run.records))
        datasets = await run.config.dataset(engine.tokenizer)
        problems_P = [p for p in datasets.test_P if isinstance(p, MarkovianProblem)]
        if not problems_P:
            raise ConfigError(f"{name} holds no problems out (dataset.num_test=0)")
        context_length, sampling = engine.traits.context_length, run.config.sampling
        await validate(datasets, engine.tokenizer, context_length, sampling)
        problems_P = problems_P[: config.num_problems]
        say(f"{name}: thinking about {plural(len(problems_P), 'problem')}")
        asked_P = studied(problems_P, config.seed)
        groups_P = await attempt(run.config.sampler(engine), asked_P)
    results = results_of(asked_P, groups_P)
    return results, list(_lines(problems_P, groups_P, results))


def _lines(
    problems_P: Sequence[MarkovianProblem], groups_P: Sequence[TrajectoryGroup], results: Results
) -> Iterator[Mapping[str, object]]:
    for p, (problem, group) in enumerate(zip(problems_P, groups_P, strict=True)):
        trajectory = group.trajectories_G_K[0][0]
        logs = trajectory.transitions[-1].logs if isinstance(trajectory, Trajectory) else {}
        of = {"problem": problem.name, "question": problem.question, "gold": problem.tokenized.gold}
        metrics = {name: results.values(name)[p, 0] for name in results.metrics}
        yield {**of, **logs, "metrics": metrics}


async def _read(run: RunConfig, sampler: PopulationSampler, lines_P: _Lines) -> Results:
    """Let another model read the thoughts; lost rollouts are left out."""
    engine, scored_P = sampler.engine, list[ProblemGroupBuilder]()
    for line in lines_P:
        if "thought" in line:
            name, thought = str(line["problem"]), str(line["thought"])
            problem = Problem(str(line["question"]), str(line["gold"]))
            tokenized = _dataset(run).builder(name, problem, engine.tokenizer).tokenized
            check_prompt(name, tokenized.least, engine.traits.context_length)
            make_env = functools.partial(ScoredEnv, tokenized, thought)
            scored_P.append(ProblemGroupBuilder(make_env, name))
    return results_of(scored_P, await attempt(sampler, scored_P))


def _estimates(found: Mapping[str, Results], seed: int) -> dict[str, dict[str, Estimate]]:
    """Return the mean of each metric with its interval, by run or model."""
    return {
        name: {metric: results.estimate(metric, seed) for metric in sorted(results.metrics)}
        for name, results in found.items()
    }


def main(config: Config) -> None:
    """Study, write the files, and print the results.

    Raises:
        ConfigError: `output` is there already, or it is in the run directory.
        KeyboardInterrupt: It was stopped; nothing is written.
    """
    name = config.output or f"{config.log_path.rstrip('/')}-study"
    output = new_output(name, config.log_path)
    if config.plots:
        require_matplotlib()
    names = [name for name in (config.log_path, config.against) if name]
    runs = {name: _recorded(name, config) for name in names}
    found, scored, lines_P = result_until_signal(
        functools.partial(study, config, runs), "interrupted; nothing was written"
    )
    of_runs, of_scorers = _estimates(found, config.seed), _estimates(scored, config.seed)
    gaps: dict[str, Comparison] = {}
    if config.against:
        both = found[config.log_path], found[config.against]
        gaps = {each.metric: each for each in compared(*both, config.seed)}
    plain = {
        "runs": {
            name: {"markovian": _dataset(runs[name].config).markovian, **_plain(of)}
            for name, of in of_runs.items()
        },
        "scorers": {name: _plain(of) for name, of in of_scorers.items()},
        "comparisons": _plain(gaps),
        "seed": config.seed,
    }
    with whole_directory(output) as directory:
        replace_file(directory / STUDY, [(json.dumps(finite(plain), indent=1) + "\n").encode()])
        text = "".join(json.dumps(finite(line)) + "\n" for line in lines_P)
        replace_file(directory / THOUGHTS, [text.encode()])
        if config.plots:
            draw_study(directory, of_runs, of_scorers)
    for name, of in (*of_runs.items(), *((f"read by {n}", of) for n, of in of_scorers.items())):
        print(name)
        for metric, each in of.items():
            if metric in _SHOWN:
                print(f"  {metric:<12} {each.value:8.3f}   {each.low:.3f} to {each.high:.3f}")
    if gaps:
        print("this, the other, and the difference")
        print(*(compared_line(gaps[metric]) for metric in _SHOWN if metric in gaps), sep="\n")
    print(f"written to {output}")


def draw_study(
    directory: Path,
    of_runs: Mapping[str, Mapping[str, Estimate]],
    of_scorers: Mapping[str, Mapping[str, Estimate]],
) -> None:
    """Draw the cost of damage, correct answers and, if there are any, scorers.

    Raises:
        RunDirectoryError: The files cannot be written.
    """
    for suffix, (name, of) in zip(("", "-against"), of_runs.items(), strict=False):
        draw(
            directory / f"{FRAGILITY}{suffix}",
            {damage: _lost(of, damage) for damage in DAMAGES},
            title=f"Markovian, damaged thoughts of {name}",
            x_label="damaged (%)",
            y_label="lost log-probability (nats per token)",
        )

    def bars(file: str, title: str, y_label: str, of: Mapping[str, Mapping[str, Estimate]]) -> None:
        shown = {
            name: {key: (e.value, e.low, e.high) for key, e in estimates.items()}
            for name, estimates in of.items()
        }
        draw_bars(directory / file, shown, title=f"Markovian, {title}", y_label=y_label)

    metrics = {**{each: f"correct/{each}" for each in EXTRACTIONS}, "leaks": "leaks"}
    correct = {n: {key: of[m] for key, m in metrics.items()} for n, of in of_runs.items()}
    bars("accuracy", "correct answers, and thoughts with the answer", "share of problems", correct)
    if of_scorers:
        informs = {"thoughts of the run": {name: of["informs"] for name, of in of_scorers.items()}}
        what = "lost log-probability of the answer (nats per token)"
        bars("scorers", "loss of other models without the thought", what, informs)


def _lost(of: Mapping[str, Estimate], damage: str) -> Line:
    """Return the cost of damage by percent of the thought, with its intervals."""
    percent_M = [100 * share for share in SHARES]
    found_M = [of[f"{FRAGILITY}/{damage}/{x:.0f}"] for x in percent_M]
    interval = [each.low for each in found_M], [each.high for each in found_M]
    return Line(percent_M, [[each.value for each in found_M]], interval)


def _plain(of: Mapping[str, Estimate] | Mapping[str, Comparison]) -> dict[str, object]:
    return {name: dataclasses.asdict(found) for name, found in of.items()}


if __name__ == "__main__":
    run_cli(main, Config)
