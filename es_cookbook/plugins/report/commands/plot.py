"""Draw plots for papers, from what runs, evaluations and studies have written: PNG and SVG.

    python -m es_cookbook plot runs/es-seed0,runs/es-seed1,runs/gradient
    ... runs/mine metric=reward/mean x=generations
    ... kind=pass_at_k before.json,after.json
    ... kind=fragility runs/markovian-study
    ... kind=landscape runs/mine around.generation=20 around.genomes=3,8

- `curves`: a metric over rollouts, generations, tokens or seconds, of runs of evolution strategies
  and of gradients alike. Runs that differ in their seed alone are one curve: their mean, and their
  range as a band.
- `pass_at_k`: of evaluations with several attempts (`es-cookbook evaluate output=...`), with 95 %
  intervals.
- `fragility`: what damage to its thoughts costs a model, of studies of the recipe `markovian`.
- `landscape`: the reward around the centre of a generation: that of centre + m · (what a genome
  adds), for multiples m; along one genome a curve, along two a map. At m = 1 is the genome itself,
  at -1 its mirror image, at 0 the centre. The run is brought back on its engine as `play` and
  `evaluate` do; its held-out problems are attempted as an evaluation attempts them, greedily by
  default, so the values differ by the weights and not by luck.

What is read is only read.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.cli.evaluate.report import FORMAT
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.plugins.report.plots import (
    Line,
    Map,
    SizeName,
    draw,
    draw_map,
    lines_of,
    require_matplotlib,
)
from es_cookbook.rl.rollouts import mean_rewards
from es_cookbook.runs.directory.config_differences import flattened
from es_cookbook.runs.files import cannot, replace_file
from es_cookbook.runs.recorded import RecordedRun, open_run, rebuild
from es_cookbook.runs.run_config import closing
from es_cookbook.runs.signals import result_until_signal
from es_cookbook.runs.tracking.curves import Spent, grouped, is_share
from es_cookbook.runs.tracking.jsonl import CORRECT, PASS_AT, finite
from es_cookbook.runs.tracking.live import label
from es_cookbook.runs.tracking.naming import task_of, task_of_dataset
from es_cookbook.runs.tracking.reading import read_run

Kind = Literal["curves", "pass_at_k", "fragility", "landscape"]
_STUDY = "study.json"
_MOST_VALUES = 2**23
"""In the file of an evaluation: of a hundred thousand problems."""
_FRAGILITY = re.compile(r"fragility/(\w{1,40})/(\d{1,3})")

Lost: TypeAlias = Mapping[str, Mapping[float, tuple[float, float, float]]]
"""Damage to thoughts -> percent -> nats that a token of the answer loses, and its interval."""


@chz.chz
class Around:
    """What to measure for a landscape."""

    generation: int | None = chz.field(
        default=None,
        doc="generation of the centre and the genomes; None: the last that has genomes",
    )
    genomes: tuple[int, ...] = chz.field(
        default=(), doc="one or two genomes, which are the axes; empty: the fittest"
    )
    reach: float = chz.field(
        default=3.0, doc="length of an axis to either side, in multiples of what a genome adds"
    )
    points: int = chz.field(default=13, doc="points per axis")
    num_problems: int = chz.field(default=100, doc="number of held-out problems, from the first")
    trust: tuple[str, ...] = chz.field(
        default=(), doc="packages other than es_cookbook that config.json may import"
    )
    model_name: str | None = chz.field(
        default=None, doc="base model, if it has moved since the run; None: where it was"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "reach", above=0, prefix="around.")
        check_range(self, "points", at_least=3, prefix="around.")
        check_range(self, "num_problems", at_least=1, prefix="around.")
        if len(self.genomes) > 2 or len(set(self.genomes)) < len(self.genomes):
            raise ConfigError(
                f"around.genomes must be one or two different ones, found {self.genomes}"
            )


@chz.chz
class Plot:
    """Draw curves, pass@k, fragility or a landscape, as a PNG and an SVG for a paper."""

    log_path: tuple[str, ...] = chz.field(
        doc="run directories; pass_at_k: files of evaluations; fragility: studies",
        metadata=UNNAMED,
    )
    kind: Kind = chz.field(default="curves", doc="kind of plot")
    output: str = chz.field(
        default="", doc="output path without .png and .svg; empty: plots/<kind>"
    )
    metric: str = chz.field(default=CORRECT, doc="curves: a key of metrics.jsonl")
    x: Spent = chz.field(default="rollouts", doc="curves: x axis")
    title: str = chz.field(default="", doc="title; empty: the task and what is shown")
    size: SizeName = chz.field(
        default="column", doc="column: the width of one of two columns of a paper, at 300 dpi"
    )
    around: Around = chz.field(
        default_factory=Around, blueprint_unspecified=Around, doc="landscape: what to measure"
    )
    engine: EngineBuilder | None = Names(ENGINE_NAMES, default=None).field(
        "landscape: engine; None: the run's own"
    )

    @chz.validate
    def _paths(self) -> None:
        if not self.log_path:
            raise ConfigError("log_path must name at least one, found none")
        if self.kind == "landscape" and len(self.log_path) > 1:
            raise ConfigError(
                f"log_path: a landscape is of one run, found {len(self.log_path)} of them"
            )


def main(config: Plot) -> None:
    """Draw, and say where.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    require_matplotlib()
    output, size = Path(config.output or f"plots/{config.kind}"), config.size
    if output.suffix in (".png", ".svg"):
        output = output.with_suffix("")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("make", output.parent, error, needed=4096) from error
    match config.kind:
        case "curves":
            written = draw_curves(config, output, size)
        case "pass_at_k":
            written = draw_pass_at_k(config, output, size)
        case "fragility":
            written = draw_fragility(config, output, size)
        case "landscape":
            written = draw_landscape(config, output, size)
    print(f"written to {', '.join(map(str, written))}")


def draw_curves(config: Plot, output: Path, size: SizeName) -> list[Path]:
    """A metric of runs; seeds are grouped.

    Raises:
        ConfigError: A run has not measured it.
        RunDirectoryError: One is not a run directory.
    """
    runs = [read_run(Path(log_path)) for log_path in config.log_path]
    for problem in (problem for run in runs for problem in run.problems):
        say(problem)
    groups = grouped(runs)
    metric, in_percent = config.metric, is_share(config.metric)
    lines = lines_of(groups, metric, config.x, 100 if in_percent else 1)
    tasks = " and ".join(dict.fromkeys(task_of(run.config) for run in runs))
    num_seeds = max(map(len, groups.values()))
    seeds = f"mean and range of {plural(num_seeds, 'seed')}" if num_seeds > 1 else "one seed"
    return draw(
        output,
        lines,
        title=config.title or f"{tasks}, {seeds}",
        x_label={"seconds": "seconds of generations"}.get(config.x, f"training {config.x}"),
        y_label=f"{label(metric)} (%)" if in_percent else label(metric),
        size=size,
    )


def draw_pass_at_k(config: Plot, output: Path, size: SizeName) -> list[Path]:
    """pass@k of evaluations that were saved.

    Raises:
        ConfigError: One is no evaluation, or of one attempt.
    """
    lines: dict[str, Line] = {}
    tasks: dict[str, None] = {}
    for log_path in config.log_path:
        name, dataset, line = _pass_at(log_path)
        lines[name if name not in lines else f"{name} ({log_path})"] = line
        tasks[task_of(flattened({"dataset": dataset}))] = None
    ticks = sorted({k for line in lines.values() for k in np.asarray(line.x_M).tolist()})
    return draw(
        output,
        lines,
        title=config.title or f"{' and '.join(tasks)}, pass@k",
        x_label="k",
        y_label="held-out pass@k (%)",
        x_ticks=ticks,
        size=size,
    )


def _pass_at(log_path: str) -> tuple[str, object, Line]:
    """What was evaluated, its data set and pass@k, of a file that `evaluate output=` wrote."""
    prefix = PASS_AT.removeprefix("test/")
    try:
        plain: Any = parsed(read_file(Path(log_path), LARGEST_TEXT, None), _MOST_VALUES)
        if plain["format"] != FORMAT:
            raise ValueError(f"it is no evaluation that this version can read ({FORMAT!r})")
        name, generation = one_line(str(plain["name"])), plain["generation"]
        if generation is not None:
            name = f"{name} after {plural(int(generation), 'generation')}"
        dataset: object = plain["settings"]["dataset"]
        by_k = {
            int(key.removeprefix(prefix)): [100 * float(of[x]) for x in ("value", "low", "high")]
            for key, of in plain["estimates"]["all"].items()
            if key.startswith(prefix)
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ConfigError(
            f"log_path: {log_path} is no evaluation, or is damaged: {reason}"[:300]
        ) from error
    if not by_k:
        raise ConfigError(
            f"log_path: {log_path} has no pass@k: it needs several attempts at each problem "
            "(es-cookbook evaluate attempts=8 temperature=1 output=...) and Envs that report "
            "correct or solved"
        )
    ks = sorted(by_k)
    values, low, high = ([by_k[k][i] for k in ks] for i in range(3))
    return name, dataset, Line(ks, [values], (low, high))


def draw_fragility(config: Plot, output: Path, size: SizeName) -> list[Path]:
    """Studies: a curve a damage of one run, a curve a run of several (the mean over damages).

    Raises:
        ConfigError: One of them is no study.
    """
    found: dict[str, Lost] = {}
    for log_path in config.log_path:
        found |= read_study(Path(log_path))
    if len(found) == 1:
        ((name, lost),) = found.items()
        lines = {damage: _line([of]) for damage, of in lost.items()}
        title = f"Markovian, damaged thoughts of {name}"
    else:
        lines = {name: _line(list(lost.values())) for name, lost in found.items()}
        title = "Markovian, damaged thoughts: mean over damages"
    return draw(
        output,
        lines,
        title=config.title or title,
        x_label="damaged (%)",
        y_label="lost log-probability (nats per token)",
        size=size,
    )


def read_study(path: Path) -> dict[str, Lost]:
    """What a study measured, by run; `path` is the file or its directory.

    Raises:
        ConfigError: It cannot be read, or has no fragility.
    """
    file = path / _STUDY if path.is_dir() else path
    try:
        study = cast("Mapping[str, object]", parsed(read_file(file, LARGEST_TEXT, None)))
        runs = cast("Mapping[str, Mapping[str, object]]", study["runs"])
        found = {one_line(name): _lost(of_run) for name, of_run in runs.items()}
    except OSError as error:
        raise ConfigError(
            f"log_path: {file} cannot be read: {error.strerror or error}; fragility is drawn from "
            "the output of python -m es_cookbook.plugins.markovian.study"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"log_path: {file} is no study: {error!r:.200}") from error
    if not any(found.values()):
        raise ConfigError(f"log_path: {file} has measured no fragility")
    return found


def _lost(of_run: Mapping[str, object]) -> Lost:
    lost: dict[str, dict[float, tuple[float, float, float]]] = {}
    for metric, estimate in of_run.items():
        if (named := _FRAGILITY.fullmatch(metric)) and isinstance(estimate, dict):
            of = cast("dict[str, float | None]", estimate)
            value, low, high = (
                math.nan if (v := of[k]) is None else float(v) for k in ("value", "low", "high")
            )
            lost.setdefault(named[1], {})[float(named[2])] = (value, low, high)
    return lost


def _line(of: Sequence[Mapping[float, tuple[float, float, float]]]) -> Line:
    """One damage with its intervals, or the mean over several."""
    x_M = sorted(set(of[0]).intersection(*of[1:]))
    value_M, low_M, high_M = (
        [sum(each[x][part] for each in of) / len(of) for x in x_M] for part in range(3)
    )
    return Line(x_M, [value_M], (low_M, high_M) if len(of) == 1 else None)


def draw_landscape(config: Plot, output: Path, size: SizeName) -> list[Path]:
    """Measure, draw, and keep the numbers in a JSON file beside the plot.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped; nothing is written.
    """
    around = config.around
    run = open_run(Path(config.log_path[0]), around.model_name, around.trust)
    generation = run.last_with_genomes if around.generation is None else around.generation
    numbers = around.genomes or _fittest(run, generation)
    chosen = _chosen(run, generation, numbers)
    side: list[float] = np.linspace(-around.reach, around.reach, around.points).tolist()
    # A genome a point of the grid; along the first axis first.
    along = [[_times(genome, m) for m in side] for genome in chosen]
    second = along[1] if len(along) > 1 else [()]
    grid = [Genome(one + other) for other in second for one in along[0]]
    rewards_P_G = result_until_signal(
        partial(_rewards, run, config.engine, generation, grid, around.num_problems),
        "interrupted; nothing was written",
    )
    counts_G = np.maximum((~np.isnan(rewards_P_G)).sum(axis=0), 2)
    means_G = np.nanmean(rewards_P_G, axis=0)  # Lost rollouts are left out.
    errors_G = 1.96 * np.nanstd(rewards_P_G, axis=0) / np.sqrt(counts_G)
    found = {
        "generation": generation,
        "genomes": list(numbers),
        "multiples": side,
        "rewards": finite(means_G.tolist()),
        "intervals": finite(errors_G.tolist()),
        "problems": len(rewards_P_G),
    }
    replace_file(output.with_suffix(".json"), [(json.dumps(found, indent=1) + "\n").encode()])
    task = task_of_dataset(run.config.dataset)
    title = config.title or f"{task}, around the centre of generation {generation}"
    value, names = "mean held-out reward", [f"genome {number}" for number in numbers]
    if len(names) == 1:
        line = Line(side, [means_G], (means_G - errors_G, means_G + errors_G))
        x_label = f"times what {names[0]} adds to the centre"
        drawn = draw(output, {"": line}, title=title, x_label=x_label, y_label=value, size=size)
    else:
        marked = {"centre": (0.0, 0.0), names[0]: (1.0, 0.0), names[1]: (0.0, 1.0)}
        drawn = draw_map(
            output,
            Map(side, side, means_G.reshape(len(side), len(side)), marked),
            title=title,
            x_label=f"times what {names[0]} adds",
            y_label=f"times what {names[1]} adds",
            value_label=value,
            size=size,
        )
    return [*drawn, output.with_suffix(".json")]


def _fittest(run: RecordedRun, generation: int) -> tuple[int, ...]:
    """The genome of a generation that was the fittest; the first where that is not recorded."""
    run.check_generation(generation)
    if generation >= len(run.records):
        return (0,)
    fitness_G = run.records[generation].fitness_G
    return (max(range(len(fitness_G)), key=lambda g: (not math.isnan(f := fitness_G[g]), f)),)


def _chosen(run: RecordedRun, generation: int, numbers: Sequence[int]) -> list[Genome]:
    """Genomes along which to go; refuses those along which there is nothing to see."""
    chosen = [run.genome(generation, number) for number in numbers]
    for number, genome in zip(numbers, chosen, strict=True):
        if not genome.terms:
            raise ConfigError(
                f"around.genomes: genome {number} of generation {generation} is no sum of noise "
                "(it is the centre, or a point with coordinates of its own); take another"
            )
    if len(chosen) > 1 and len({tuple(term.seed for term in each.terms) for each in chosen}) == 1:
        raise ConfigError(
            f"around.genomes: {numbers[0]} and {numbers[1]} of generation {generation} are a "
            "mirrored pair, on one line with the centre; take genomes of two pairs"
        )
    return chosen


def _times(genome: Genome, multiple: float) -> tuple[Term, ...]:
    return tuple(Term(term.seed, multiple * term.coefficient) for term in genome.terms)


async def _rewards(
    run: RecordedRun,
    engine: EngineBuilder | None,
    generation: int,
    genomes_G: Sequence[Genome],
    num_problems: int,
) -> NDArray[np.float64]:
    """Bring the run back, and attempt its problems everywhere on the grid."""
    rebuilt = await rebuild(run, engine)
    async with closing(rebuilt.engine):
        await rebuilt.go_to(run.centre_of(generation))
        config, tokenizer = run.config, rebuilt.engine.tokenizer
        problems_P = (await config.dataset(tokenizer)).test_P[:num_problems]
        if not problems_P:
            raise ConfigError("log_path: the run holds out no problems: there is none to attempt")
        say(f"attempting {plural(len(problems_P), 'problem')} at {len(genomes_G)} points")
        sampling = chz.replace(config.sampling, temperature=config.eval_temperature)
        sampler = config.sampler(rebuilt.engine, sampling=sampling)
        groups_P = await sampler.rollout(rebuilt.generation, problems_P, genomes_G)
        return mean_rewards(groups_P)


def cli() -> None:
    run_cli(main, Plot)
