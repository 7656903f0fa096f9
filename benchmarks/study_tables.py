"""Tables and plots of README and docs/es_vs_grpo.md from the results of `benchmarks.study`.

`python -m benchmarks.study tables` prints the tables of the page, puts all into both pages and
draws the plots. Without results there are none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import NotRequired, TypedDict

from benchmarks.harness import RESULTS as ALL_RESULTS
from benchmarks.harness import described
from es_cookbook.common.terminal import markdown
from es_cookbook.plugins.report.plots import Line, draw
from es_cookbook.runs.tracking.curves import mean_and_range
from es_cookbook.runs.tracking.jsonl import CORRECT as CORRECT

RESULTS = ALL_RESULTS / "study"
ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- study -->", "<!-- /study -->"
PAIRS = (
    ("es", "gold", "seconds"),
    ("rewards", "dense_auto", "evaluations"),
    ("rewards", "es_at_scale", "evaluations"),
    ("rewards", "group", "seconds"),
    ("best", "group", "seconds"),
    ("dense_auto", "group", "seconds"),
)
"""Contestants that are told the same, and what is equal between them."""
SHOWN = {
    "rewards": "ES, steering vectors",
    "best": "ES, steering vectors; genomes read the best sampled answer",
    "es_at_scale": "ES, dense noise with the σ of *ES at Scale*",
    "dense_auto": "ES, dense noise (*ES at Scale*; σ and α by `auto`)",
    "group": "policy gradient",
    "es": "ES, steering vectors",
    "gold": "supervised fine-tuning",
}
"""Contestants in the README, by method."""


class Run(TypedDict):
    """One run.

    Attributes:
        machine: where it ran; seconds are compared on one kind of machine only.
        rate: α, or the gradient's learning rate, as the run had it.
        points: `generation`, `seconds`, `evaluations` and held-out `score` of each measurement.
        metrics: some metrics of each generation.
        memory: GiB of its process: after `imports`, and at its `peak`.
        load: mean load of the machine; earlier runs did not keep it.
        copied: GB/s at which memory was copied before and after; runs until 2026-12 lack it.
        final: metrics at temperature 1, and on the other task; empty for trials.
    """

    machine: dict[str, object]
    commit: str
    seed: int
    rate: float
    points: list[dict[str, float]]
    metrics: list[dict[str, float]]
    memory: dict[str, float]
    load: NotRequired[float]
    copied: NotRequired[list[float]]
    final: dict[str, float]


class Trials(TypedDict):
    """Trials of a contestant: what was chosen, whether at an edge of the grid, and all runs."""

    rate: float
    at_edge: bool
    runs: list[Run]


class Entry(TypedDict):
    """A contestant: what it is told, how it was tuned, and its runs, one per seed."""

    told: str
    tuned: Trials
    runs: list[Run]


class Task(TypedDict):
    """A file of results.

    Attributes:
        questions: number of held-out ones in `tuning` and in the `test`.
        base: metrics of the base at temperature 1.
    """

    command: str
    questions: dict[str, int]
    pass_at: int
    base: dict[str, float]
    contestants: dict[str, Entry]


def score_at(run: Run, over: str, x: float) -> float:
    """Held-out score after so many `seconds` or `evaluations`: on the line between measurements.

    Beyond the last one it is the last score.
    """
    points = [(point[over], point["score"]) for point in run["points"]]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def shared(entries: Sequence[Entry], over: str) -> float:
    """The cost that all runs have reached."""
    return min(run["points"][-1][over] for entry in entries for run in entry["runs"])


def quantile_of_t(probability: float, freedom: float) -> float:
    """Quantile of Student's t; Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).

    Within 3 % from two degrees of freedom on, for a probability of 0.975.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def ratio_of_gains(
    above_R: Sequence[float], below_R: Sequence[float], base: float, questions: int
) -> tuple[float, float, float]:
    """The ratio of two gains over the base, with its 95 % interval.

    The interval is Fieller's (J. R. Stat. Soc. B 16, 1954, 175): all ρ for which
    above - base - ρ (below - base) is not significantly different from 0. The variance of a mean
    over runs is that between seeds, s²/R, and that of the questions, p(1 - p)/Q, which are the same
    for all seeds. Questions count as if they were others for each of the three, which makes the
    interval too wide rather than too narrow. Degrees of freedom are Satterthwaite's.

    Args:
        above_R: scores, as shares, of the runs in the numerator.
        below_R: the same in the denominator.
        base: score before training.
        questions: number of held-out questions.

    Returns:
        Ratio, low and high; both infinite where the denominator is not significantly positive.
    """
    above, below = fmean(above_R) - base, fmean(below_R) - base
    of_seeds = [variance(each) / len(each) if len(each) > 1 else 0.0 for each in (above_R, below_R)]
    of_questions = [p * (1 - p) / questions for p in (fmean(above_R), fmean(below_R), base)]
    v_above, v_below = (s + q for s, q in zip(of_seeds, of_questions, strict=False))
    v_base = of_questions[2]
    spread = sum(v**2 / max(len(above_R) - 1, 1) for v in of_seeds)
    whole = v_above + v_below
    t = quantile_of_t(0.975, max(2.0, whole**2 / spread) if spread else math.inf)
    a = below**2 - t**2 * (v_below + v_base)
    b = above * below - t**2 * v_base
    c = above**2 - t**2 * (v_above + v_base)
    ratio = above / below if below else math.nan
    if a <= 0 or below <= 0:
        return ratio, -math.inf, math.inf
    half = math.sqrt(max(b * b - a * c, 0.0))
    return ratio, (b - half) / a, (b + half) / a


def _interval(found: tuple[float, float, float]) -> str:
    ratio, low, high = found
    if math.isinf(high):
        return "not bounded"
    return f"{ratio:.1f} ({low:.1f} … {high:.1f})"


def _points(values_R: Sequence[float]) -> str:
    return f"{100 * values_R[0]:.0f} %" if len(values_R) == 1 else mean_and_range(values_R)


def _mean(runs: Sequence[Run], key: str, scale: float = 1.0) -> float:
    found = [run["final"][key] for run in runs if key in run["final"]]
    return scale * fmean(found) if found else math.nan


def _cell(value: float, form: str, unit: str = "") -> str:
    return "" if math.isnan(value) else f"{value:{form}}{unit}"


def _base_score(task: Task) -> float:
    return next(iter(task["contestants"].values()))["runs"][0]["points"][0]["score"]


def _machine(entry: Entry) -> str:
    """Return the machine that a contestant ran on: instructions, cores, versions."""
    return " and ".join(sorted({described(run["machine"]) for run in entry["runs"]}))


def _pace(runs: Sequence[Run]) -> str:
    """Say how busy and how fast the machine was: seconds depend on both."""
    loads = [run["load"] for run in runs if "load" in run]
    if len(loads) < len(runs):
        return "its load was not kept, and other programs ran beside some runs"
    said = f"load {min(loads):.1f} to {max(loads):.1f}"
    speeds = [speed for run in runs for speed in run.get("copied", ())]
    if speeds:
        said += f"; memory copied at {min(speeds):.1f} to {max(speeds):.1f} GB/s"
    return said


def _by_machine(tasks: Mapping[str, Task]) -> dict[str, dict[str, Task]]:
    """Return the tasks of each machine, with the contestants that ran on it."""
    found: dict[str, dict[str, Task]] = {}
    for name, task in tasks.items():
        for contestant, entry in task["contestants"].items():
            there = found.setdefault(_machine(entry), {})
            there.setdefault(name, {**task, "contestants": {}})["contestants"][contestant] = entry
    return found


def _gib(runs: Sequence[Run]) -> list[float]:
    """Return the peak of each run's process, beside imports."""
    return [run["memory"]["peak"] - run["memory"]["imports"] for run in runs]


def _scores(task: Task) -> str:
    entries = task["contestants"]
    seconds, k = shared([*entries.values()], "seconds"), task["pass_at"]
    columns = (f"pass@1, maj@{k}, pass@{k} at T = 1", "KL", "other task", "peak, GiB")
    times = seconds / 2, seconds
    after = [f"greedy, after {time:.0f} s" for time in times]
    head = ["", "learns from", *after, "at the end", "after s", "evaluations", *columns]

    def sampled(runs: Sequence[Run]) -> list[str]:
        keys = ("test/pass@1", f"test/maj@{k}", f"test/pass@{k}")
        three = [_cell(_mean(runs, key, 100), ".0f", " %") for key in keys]
        other = _mean(runs, "second/test/env/all/correct", 100)
        kl = _mean(runs, "test/env/kl/kl")
        return [", ".join(filter(None, three)), _cell(kl, ".2f"), _cell(other, ".0f", " %")]

    base: Run = {**next(iter(entries.values()))["runs"][0], "final": task["base"]}
    before = [f"{100 * _base_score(task):.1f} %"] * len(times)
    rows = [["base", "", *before, "", "", "", *sampled([base]), ""]]
    for name, entry in entries.items():
        runs, ends = entry["runs"], [run["points"][-1] for run in entry["runs"]]
        rows.append(
            [
                f"`{name}`",
                entry["told"],
                *(_points([score_at(run, "seconds", time) for run in runs]) for time in times),
                _points([end["score"] for end in ends]),
                f"{fmean(end['seconds'] for end in ends):.0f}",
                f"{fmean(end['evaluations'] for end in ends):,.0f}",
                *sampled(runs),
                f"{max(_gib(runs)):.1f}",
            ]
        )
    return markdown(head, rows)


def _ratios(task: Task) -> str:
    entries = task["contestants"]
    base = _base_score(task)
    rows: list[list[str]] = []
    for above, below, over in PAIRS:
        if not {above, below} <= entries.keys():
            continue
        two = [entries[above], entries[below]]
        if over == "seconds" and _machine(two[0]) != _machine(two[1]):
            continue
        cost = shared(two, over)
        scores = [[score_at(run, over, cost) for run in each["runs"]] for each in two]
        found = ratio_of_gains(scores[0], scores[1], base, task["questions"]["test"])
        rows.append(
            [
                f"`{above}` / `{below}`",
                two[0]["told"],
                f"{cost:,.0f} {'s' if over == 'seconds' else over}",
                *map(_points, scores),
                _interval(found),
            ]
        )
    head = ["", "both learn from", "equal", "the first", "the second", "ratio of gains"]
    return markdown(head, rows)


def _rates(task: Task) -> str:
    rows: list[list[str]] = []
    for name, entry in task["contestants"].items():
        tuned = entry["tuned"]
        tried = sorted((run["rate"], run["points"][-1]["score"]) for run in tuned["runs"])
        cells = [
            f"**{rate:.2g}: {100 * score:.0f} %**"
            if rate == tuned["rate"]
            else f"{rate:.2g}: {100 * score:.0f} %"
            for rate, score in tried
        ]
        said = ", the edge of its grid" if tuned["at_edge"] else ""
        rows.append([f"`{name}`", str(len(tried)), ", ".join(cells) + said])
    return markdown(["", "trials", "learning rate: held-out score of the trial"], rows)


def _tasks(results: Path) -> dict[str, Task]:
    paths = sorted(results.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def tables(results: Path = RESULTS) -> str:
    """Everything that docs/es_vs_grpo.md says of the study, one part per task."""
    parts: list[str] = []
    for name, task in _tasks(results).items():
        seeds = len(next(iter(task["contestants"].values()))["runs"])
        parts += [
            f"### Study: {name}",
            f"`{task['command']}`: {seeds} seeds, {task['questions']['test']} held-out questions: "
            "mean (lowest … highest).",
        ]
        for i, (machine, there) in enumerate(_by_machine({name: task}).items()):
            entries = there[name]["contestants"].values()
            commits = sorted({run["commit"] for entry in entries for run in entry["runs"]})
            pace = _pace([run for entry in entries for run in entry["runs"]])
            parts += [f"At {', '.join(commits)}; {machine}; {pace}:", _scores(there[name])]
            parts += [f"![Held-out accuracy over seconds](plots/{_plot(name, i).name}.svg)"]
        parts += [_ratios(task), _rates(task)]
    return "\n\n".join(parts)


def summary(results: Path = RESULTS) -> str:
    """The README's tables, one per machine: greedy scores after equal seconds, and memory."""
    shown: dict[str, Task] = {}
    for name, task in _tasks(results).items():
        entries = {key: each for key, each in task["contestants"].items() if key in SHOWN}
        shown[name] = {**task, "contestants": entries}
    return "\n\n".join(
        f"On {_cpu_of(tasks)}:\n\n{_summary(tasks)}" for tasks in _by_machine(shown).values()
    )


def _cpu_of(tasks: Mapping[str, Task]) -> str:
    """The processor of the first run, without marks."""
    task = next(iter(tasks.values()))
    name = str(next(iter(task["contestants"].values()))["runs"][0]["machine"]["cpu"])
    return name.replace("(R)", "").removesuffix(" Processor")


def _summary(tasks: Mapping[str, Task]) -> str:
    shown = [task["contestants"] for task in tasks.values()]
    seconds = [shared([*entries.values()], "seconds") for entries in shown]
    heads = [f"{name}, after {s:.0f} s" for name, s in zip(tasks, seconds, strict=True)]
    rows = [["", "base", *(f"{100 * _base_score(task):.1f} %" for task in tasks.values()), ""]]
    for name, method in SHOWN.items():
        there = [entries[name] for entries in shown if name in entries]
        if not there:
            continue
        cells = [
            mean_and_range([score_at(run, "seconds", s) for run in entries[name]["runs"]])
            if name in entries
            else ""
            for entries, s in zip(shown, seconds, strict=True)
        ]
        peaks = [peak for entry in there for peak in _gib(entry["runs"])]
        low, high = f"{min(peaks):.1f}", f"{max(peaks):.1f}"
        peak = low if low == high else f"{low} to {high}"
        rows.append([there[0]["told"], method, *cells, peak])
    return markdown(["learns from", "method", *heads, "peak memory, GiB"], rows)


def _plot(task: str, machine: int) -> Path:
    """The path of a plot, without suffix; machines are counted from 0."""
    return ROOT / f"docs/plots/study_{task}{f'_{machine + 1}' if machine else ''}"


def _draw(results: Path = RESULTS) -> None:
    """Draw a plot for each task and machine.

    Points lie at the mean seconds of the seeds' measurements after the same generation.
    """
    for name, task in _tasks(results).items():
        for i, there in enumerate(_by_machine({name: task}).values()):
            lines: dict[str, Line] = {}
            for contestant, entry in there[name]["contestants"].items():
                runs = [run["points"] for run in entry["runs"]]
                seconds = [
                    fmean(point["seconds"] for point in at) for at in zip(*runs, strict=True)
                ]
                scores = [[100 * point["score"] for point in points] for points in runs]
                told = "" if entry["told"] == "rewards" else f" ({entry['told']})"
                lines[contestant + told] = Line(seconds, scores)
            draw(
                _plot(name, i),
                lines,
                title=f"{name}: SmolLM2-135M-Instruct, {_cpu_of(there)}",
                x_label="processor seconds of training, one core",
                y_label="held-out correct, greedy (%)",
            )


PAGES = {ROOT / "docs/es_vs_grpo.md": tables, ROOT / "README.md": summary}


def with_text(page: str, text: str) -> str:
    """The page with a text between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return (
        f"{before}{BEGIN}\n\n{text}\n\n{END}{after}" if text else f"{before}{BEGIN}\n{END}{after}"
    )


def rewrite(results: Path = RESULTS) -> None:
    """Put the tables into the pages, and draw the plots."""
    _draw(results)
    for page, made in PAGES.items():
        text = with_text(page.read_text(encoding="utf-8"), made(results))
        page.write_text(text, encoding="utf-8")
