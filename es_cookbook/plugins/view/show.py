"""Print a summary of a run: what it is, its progress and results, and which files are damaged.

    python -m es_cookbook show runs/mine

The run directory is only read, and the run may be in progress. Of the classes named in its
config.json only a recipe of this package is imported, to compare the Config with its defaults.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import chz
from rich.text import Text

from es_cookbook.cli import RECIPES
from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.cli import UNNAMED, run_cli
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.terminal import one_line
from es_cookbook.plugins.view.runs import (
    STYLES,
    generations,
    print_line,
    screen_width,
    shown_path,
    updated,
)
from es_cookbook.runs.config import RunConfig
from es_cookbook.runs.directory.opening import flattened
from es_cookbook.runs.tracking.findings import all_findings
from es_cookbook.runs.tracking.jsonl import PASS_AT, REWARD, reported
from es_cookbook.runs.tracking.live import PROBLEMS, compact, duration, interval, label, number
from es_cookbook.runs.tracking.reading import (
    RunFiles,
    class_name,
    is_of_training,
    method_of,
    read_run,
    task_of,
)

_MOST = 24
"""Number of fields of a Config that are shown."""


@chz.chz
class Show:
    """Print a summary of a run: its state, settings and held-out results."""

    log_path: str = chz.field(doc="run directory", metadata=UNNAMED)


def main(config: Show) -> None:
    """Print the summary.

    Raises:
        RunDirectoryError: `log_path` is not a run directory.
    """
    run, width = read_run(Path(config.log_path)), screen_width()
    problems = list(run.problems)
    for _ in run.rollouts(problems.append):
        pass
    for text in _head(run):
        print_line(text)
    defaults = _recipe_defaults(run)
    config_title = "Config, where not the recipe's default" if defaults else "Config"
    sections = {
        config_title: _fields(run, defaults, width or math.inf),
        "held-out, before -> after": _gains(run),
        "to look at": map(one_line, all_findings(run.metrics)),
        "could not be read": map(one_line, problems),
    }
    for title, lines in sections.items():
        for i, line in enumerate(lines):
            if i == 0:
                print_line()
                print_line(Text(title, style="bold"))
            print_line(f"  {line}")


def _head(run: RunFiles) -> Iterator[Text]:
    yield Text(shown_path(run.path), style="bold")
    trained = "" if run.is_gradient else "evolution strategies: "
    parts = [trained + method_of(run), class_name(run.config.get("search_space"))]
    yield Text(f"{task_of(run.config)}, trained by {', '.join(filter(None, parts))}")
    state = Text(run.state, style=STYLES[run.state])
    yield state.append(f", generation {generations(run)}, updated {updated(run.path)}", "default")
    if run.header is not None and run.header.fork is not None:
        fork = run.header.fork
        yield Text(f"forked from {one_line(fork.log_path)} after generation {fork.generation}")
    if run.header is not None and run.header.products is not None:
        yield Text(f"weights in {run.header.dtype}, products in {run.header.products}")
    if facts := _facts(run.metrics):
        yield Text(facts)


def _facts(rows: Sequence[Mapping[str, float]]) -> str:
    """Return rollouts, tokens and time, if they were measured."""
    last = {key: value for row in rows for key, value in row.items() if math.isfinite(value)}
    facts = [
        f"{compact(last[f'progress/{name}'])} {name}"
        for name in ("rollouts", "tokens")
        if f"progress/{name}" in last
    ]
    if seconds := math.fsum(filter(math.isfinite, (row.get("time/total", 0.0) for row in rows))):
        facts.append(f"{duration(seconds)} in generations")
    return ", ".join(facts)


def _recipe_defaults(run: RunFiles) -> Mapping[str, object] | None:
    """Return the recipe's default Config by dotted path; None without a recipe."""
    names = {RECIPES[name]: name for name in RECIPES}
    recipe = names.get(str(run.config.get("")))
    return flattened(json.loads(config_to_json(recipe_defaults(recipe)))) if recipe else None


def _fields(run: RunFiles, defaults: Mapping[str, object] | None, width: float) -> list[str]:
    """Return `field  value (default)` for fields that differ from the recipe's defaults."""
    if defaults is None:
        common = (path for path in RunConfig.common_options if path in run.config)
        found = {path: "" for path in common if is_of_training(path)}
    else:
        found = {
            path: f"  (default {_value(defaults[path])})" if path in defaults else ""
            for path, value in run.config.items()
            if (path not in defaults or defaults[path] != value) and is_of_training(path)
        }
    shown_fields = list(found)[:_MOST]
    wide = max(map(len, shown_fields), default=0)
    lines = [
        f"{one_line(path):<{wide}}  {_value(run.config[path])}{found[path]}"
        for path in shown_fields
    ]
    if len(found) > _MOST:
        lines.append(f"and {len(found) - _MOST} more, in config.json")
    return [_cut(line, int(min(width, 1000)) - 2) for line in lines]


def _cut(line: str, width: int) -> str:
    text = Text(line)
    text.truncate(width, overflow="ellipsis")
    return text.plain


def _value(value: object) -> str:
    """Return a value as a user would type it; a class without its module."""
    if isinstance(value, str):
        return class_name(value) or one_line(value)
    return one_line(json.dumps(value))


def _gains(run: RunFiles) -> Iterator[str]:
    measured = dict.fromkeys(key for row in run.metrics for key in row)
    for key in (key for key in measured if key.startswith((REWARD, "test/env/all/", PASS_AT))):
        values = [row[key] for row in run.metrics if math.isfinite(row.get(key, math.nan))]
        if values:
            name = label(key).removeprefix("held-out ")
            change = f"{number(values[0])} -> {number(values[-1])}"
            highest = f"highest {number(max(values))}"
            yield f"{name:<24}  {change:<18}  {highest:<16}{_sure(run.metrics, key)}".rstrip()


def _sure(rows: Sequence[Mapping[str, float]], key: str) -> str:
    """Return the interval of a held-out metric's last value, and the number of problems."""
    last = next(row for row in reversed(rows) if math.isfinite(row.get(key, math.nan)))
    within = interval(last, key)
    over = f", {last[PROBLEMS]:.0f} problems" if PROBLEMS in last else ""
    told = (f"95 %: {within}{over}" if within else "", reported(last, key))
    return ", ".join(filter(None, told))


def cli() -> None:
    run_cli(main, Show)
