"""Two passes as a table, a line of JSON for each problem, and a plot; by entropy of first answers.

Buckets are quantiles of the answers' entropies, so that each has about as many problems. Answers of
equal entropy are in one bucket: where many are quite sure of every token, that one is larger.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from es_cookbook.commands.evaluate.measuring import Evaluation, Setting, Subject
from es_cookbook.commands.evaluate.report import (
    compared_line,
    comparison_text,
    heading,
    lost_text,
    notes_on,
)
from es_cookbook.commands.reconsider.study import Answer, Passes
from es_cookbook.common.terminal import plural, printable
from es_cookbook.population.results import Comparison, Results, compare
from es_cookbook.population.statistics import FEW
from es_cookbook.rl.objectives import Outcomes
from es_cookbook.runs.report.plots import Line, draw


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Problems whose first answers had similar entropies.

    Attributes:
        problems: their places among all.
        compared: the second answers against the first.
    """

    low: float
    middle: float
    high: float
    problems: Sequence[int]
    compared: Comparison


def quantile_buckets(values: Sequence[float], count: int) -> list[list[int]]:
    """Places of values, the lowest first, in at most `count` buckets; NaN is in none.

    >>> quantile_buckets([0.1, 0.4, 0.2, 0.3], 2)
    [[0, 2], [1, 3]]
    >>> quantile_buckets([0.0, 5.0, 0.0, 0.0], 2)
    [[0, 2, 3], [1]]
    """
    places = [i for i, value in enumerate(values) if not math.isnan(value)]
    if not places:
        return []
    present = np.array([values[i] for i in places])
    edges = np.quantile(present, np.linspace(0, 1, count + 1)[1:-1], method="inverted_cdf")
    of_place = np.digitize(present, edges, right=True)
    found = [[i for i, b in zip(places, of_place, strict=True) if b == at] for at in range(count)]
    return [bucket for bucket in found if bucket]


def buckets_of(
    passes: Passes, entropy_P: Sequence[float], metric: str, count: int, seed: int
) -> list[Bucket]:
    """The comparison of both passes, bucket by bucket, over problems that have both answers."""
    both_P = [
        math.nan if first is None or second is None else entropy
        for first, second, entropy in zip(passes.first_P, passes.second_P, entropy_P, strict=True)
    ]
    found: list[Bucket] = []
    for problems in quantile_buckets(both_P, count):
        values = sorted(both_P[p] for p in problems)
        first, second = (_only(results, problems) for results in (passes.first, passes.second))
        compared = compare(second, first, metric, seed)
        middle = float(np.median(values))
        found.append(Bucket(values[0], middle, values[-1], problems, compared))
    return found


def _only(results: Results, problems: Sequence[int]) -> Results:
    """The results of some of the problems."""
    chosen, found = list(problems), results.outcomes
    return Results(
        [results.names_P[p] for p in chosen],
        [results.tags_P[p] for p in chosen],
        Outcomes(
            found.rewards_P_G_K[chosen],
            found.tokens_P_G_K[chosen],
            {metric: values[chosen] for metric, values in found.metrics.items()},
        ),
        [results.lost_P[p] for p in chosen],
    )


def table(
    subject: Subject,
    setting: Setting,
    passes: Passes,
    buckets: Sequence[Bucket],
    *,
    metric: str,
    cue: str,
    by: str,
) -> str:
    """All of it as text of 80 columns."""
    generation = None if subject.run is None else subject.generations[0]
    evaluation = Evaluation(subject.name, generation, {}, {}, passes.first, passes.trained_on)
    both = [each for each in passes.first.metrics if each in passes.second.metrics]
    compared = [compare(passes.second, passes.first, each, setting.seed) for each in both]
    columns = ("second", "first")
    parts = [
        heading(setting, evaluation),
        comparison_text(f"After the cue {cue!r}:", compared, metric, 1, columns),
    ]
    if buckets:
        title = f"{metric}, by {by} entropy of the first answer's tokens, in nats (problems):"
        parts.append("\n".join([title, *map(_bucket_line, buckets)]))
    num_problems = len(passes.first.names_P)
    for which, results in (("first", passes.first), ("second", passes.second)):
        if results.lost:
            parts.append(f"{which} answers {lost_text(results.lost, num_problems)}")
    notes = notes_on({metric: passes.first.estimate(metric, setting.seed)}, compared)
    if few := [bucket for bucket in buckets if len(bucket.problems) < FEW]:
        notes.append(f"{plural(len(few), 'bucket')} of fewer than {FEW} problems: too sure.")
    return printable("\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]))


def _bucket_line(bucket: Bucket) -> str:
    label = f"{bucket.low:.2g}..{bucket.high:.2g} ({len(bucket.problems)})"
    return compared_line(dataclasses.replace(bucket.compared, metric=label))


def write(
    directory: Path,
    passes: Passes,
    entropies_P: Sequence[Sequence[float] | None],
    buckets: Sequence[Bucket],
    metric: str,
    by: str,
    task: str,
) -> None:
    """Write `rollouts.jsonl`, and `entropy.png` and `.svg` of a task, to a directory."""
    bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.problems}
    lines: list[str] = []
    for p, (name, entropies) in enumerate(zip(passes.first.names_P, entropies_P, strict=True)):
        plain = {
            "problem": name,
            "tags": list(passes.first.tags_P[p]),
            "first": _described(passes.first, passes.first_P[p], p),
            "second": _described(passes.second, passes.second_P[p], p),
            "entropies": None if entropies is None else list(entropies),
            "mean_entropy": None if entropies is None else mean(entropies),
            "max_entropy": None if entropies is None else max(entropies),
            "bucket": bucket_of.get(p),
        }
        lines.append(json.dumps(plain, allow_nan=False) + "\n")
    (directory / "rollouts.jsonl").write_text("".join(lines), encoding="utf-8")
    if not buckets:
        return
    share = all(bucket.compared.is_share for bucket in buckets)
    unit = 100 if share else 1
    x_M = [bucket.middle for bucket in buckets]
    draw(
        directory / "entropy.png",
        {
            "first answer": Line(x_M, [[unit * b.compared.second for b in buckets]]),
            "second answer": Line(x_M, [[unit * b.compared.first for b in buckets]]),
        },
        title=f"{task}, {metric} by entropy of the first answer",
        x_label=f"{by} entropy of its tokens, nats (median of a bucket)",
        y_label=f"{metric}, %" if share else metric,
    )


def mean(values: Sequence[float]) -> float:
    """Correctly rounded."""
    return math.fsum(values) / len(values)


def _described(results: Results, answer: Answer | None, p: int) -> dict[str, object]:
    """An answer and its grade; of a lost one, why it was lost."""
    if answer is None:
        return {"lost": " ".join(results.lost_P[p])}
    metrics = {name: _number(v[p, 0, 0]) for name, v in results.outcomes.metrics.items()}
    return {
        "prompt": answer.prompt,
        "text": answer.text,
        "prompt_tokens": list(answer.prompt_T),
        "tokens": list(answer.tokens_T),
        "reward": _number(results.outcomes.rewards_P_G_K[p, 0, 0]),
        "metrics": metrics,
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
