"""Draw plots for papers, from what runs, evaluations and studies have written: PNG and SVG.

    python -m es_cookbook plot runs/es-seed0,runs/es-seed1,runs/gradient
    ... runs/mine metric=reward/mean x=generations
    ... kind=pass_at_k before.json,after.json
    ... kind=fragility runs/markovian-study

- `curves`: a metric over rollouts, generations, tokens or seconds, of runs of evolution strategies
  and of gradients alike. Runs that differ in their seed alone are one curve: their mean, and their
  range as a band.
- `pass_at_k`: of evaluations with several attempts (`es-cookbook evaluate output=...`), with 95 %
  intervals.
- `fragility`: what damage to its thoughts costs a model, of studies of the recipe `markovian`.

The files are only read.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import chz
import numpy as np

from es_cookbook.cli.evaluate.report import FORMAT
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.plugins.report.plots import (
    Line,
    SizeName,
    draw,
    lines_of,
    require_matplotlib,
)
from es_cookbook.runs.directory.config_differences import flattened
from es_cookbook.runs.files import cannot
from es_cookbook.runs.tracking.curves import Spent, grouped, is_share
from es_cookbook.runs.tracking.jsonl import CORRECT, PASS_AT
from es_cookbook.runs.tracking.live import label
from es_cookbook.runs.tracking.naming import task_of
from es_cookbook.runs.tracking.reading import read_run

Kind = Literal["curves", "pass_at_k", "fragility"]
_STUDY = "study.json"
_MOST_VALUES = 2**23
"""In the file of an evaluation: of a hundred thousand problems."""
_FRAGILITY = re.compile(r"fragility/(\w{1,40})/(\d{1,3})")

Lost: TypeAlias = Mapping[str, Mapping[float, tuple[float, float, float]]]
"""Damage to thoughts -> percent -> nats that a token of the answer loses, and its interval."""


@chz.chz
class Plot:
    """Draw curves, pass@k or fragility, as a PNG and an SVG for a paper."""

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

    @chz.validate
    def _paths(self) -> None:
        if not self.log_path:
            raise ConfigError("log_path must name at least one, found none")


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


def cli() -> None:
    run_cli(main, Plot)
