"""The plots of a study: how often answers are right, what damage costs, and who else can read."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from es_cookbook.population.results import Estimate
from es_cookbook.recipes.markovian.damages import DAMAGES, SHARES
from es_cookbook.recipes.markovian.measuring import EXTRACTIONS, fragility_metric
from es_cookbook.runs.report.plots import Line, draw, draw_bars

_LOST = "lost log-probability (nats per token)"
_DAMAGED = "damaged (%)"


def draw_study(
    directory: Path,
    of_runs: Mapping[str, Mapping[str, Estimate]],
    of_scorers: Mapping[str, Mapping[str, Estimate]],
) -> list[Path]:
    """Draw all that there is.

    Returns:
        The files.

    Raises:
        ConfigError: matplotlib is not installed.
        RunDirectoryError: They cannot be written.
    """
    percents = [100 * share for share in SHARES]
    paths: list[Path] = []
    for i, (name, found) in enumerate(of_runs.items()):
        lines = {damage: Line(percents, [_lost(found, [damage])]) for damage in DAMAGES}
        file = directory / ("fragility" if i == 0 else "fragility_against")
        title = f"Markovian, damaged thoughts of {name}"
        paths += draw(file, lines, title=title, x_label=_DAMAGED, y_label=_LOST)
    if len(of_runs) > 1:
        lines = {name: Line(percents, [_lost(found, DAMAGES)]) for name, found in of_runs.items()}
        file = directory / "fragility_both"
        title = "Markovian, damaged thoughts: mean over damages"
        paths += draw(file, lines, title=title, x_label=_DAMAGED, y_label=_LOST)
    bars = {
        name: {
            **{each: _bar(found[f"correct/{each}"]) for each in EXTRACTIONS},
            "leaks": _bar(found["leaks"]),
        }
        for name, found in of_runs.items()
    }
    title = "Markovian, right answers by where they stand, and thoughts with the answer"
    paths += draw_bars(directory / "accuracy", bars, title=title, y_label="share of problems")
    written = {
        name: {m: _bar(found[m]) for m in ("written", "unrelated")}
        for name, found in of_runs.items()
        if "written" in found
    }
    logprob = "mean log-probability of the answer (nats per token)"
    if written:
        title = "Markovian, hand-written thoughts, and those about other problems"
        paths += draw_bars(directory / "written", written, title=title, y_label=logprob)
    if of_scorers:
        scorers = {"thoughts of the run": {n: _bar(e["informs"]) for n, e in of_scorers.items()}}
        title = "Markovian, what other models lose without the thought"
        paths += draw_bars(directory / "scorers", scorers, title=title, y_label=_LOST)
    return paths


def _lost(found: Mapping[str, Estimate], damages: Sequence[str]) -> list[float]:
    return [
        sum(found[fragility_metric(damage, share)].value for damage in damages) / len(damages)
        for share in SHARES
    ]


def _bar(of: Estimate) -> tuple[float, float, float]:
    return of.value, of.low, of.high
