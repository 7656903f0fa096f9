r"""Does a second answer help, and where: answers, a cue to reconsider, answers again.

    es-cookbook reconsider runs/mine
    es-cookbook reconsider model_name=Qwen/Qwen2.5-0.5B-Instruct recipe=math output=second
    es-cookbook reconsider recipe=countdown cue='\n'

Every held-out problem is answered once, as `es-cookbook evaluate` has it answered. Then the model
sees the prompt, its answer and the cue, and answers again; the second answer is graded alone, by
the problem's own reward. Both are compared problem by problem, and also by how sure the model was
of the first: by the entropy of its distribution over all tokens, at each token that it sampled.

`output=` is a new directory with `rollouts.jsonl` (both answers, grades and entropies of every
problem), and a plot as PNG and SVG. A run is only read, and may be going on.

Problems are put into buckets by quantiles of the entropies, so that each has about as many. Answers
of equal entropy are in one bucket: where many are quite sure of every token, that one is larger.
"""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import chz
import numpy as np

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.commands.evaluate.evaluate import OnProblems, asked
from es_cookbook.commands.evaluate.measuring import Evaluation, Setting, Subject
from es_cookbook.commands.evaluate.report import (
    compared,
    compared_line,
    comparison_text,
    heading,
    lost_text,
    notes_on,
    print_text,
)
from es_cookbook.commands.options import new_output
from es_cookbook.commands.reconsider.second_pass import Answer, Passes, both_passes, entropies
from es_cookbook.commands.train import whole_names
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.terminal import plural, printable
from es_cookbook.population.results import Comparison, Results, compare
from es_cookbook.population.statistics import FEW
from es_cookbook.rl.objectives import REWARD
from es_cookbook.runs.report.naming import task_of_dataset
from es_cookbook.runs.report.plots import Line, draw, require_matplotlib
from es_cookbook.train.stopping.signals import result_until_signal


@chz.chz
class ReconsiderConfig(OnProblems):
    """Have a run's centre or a model answer held-out problems twice, then after a cue."""

    cue: str = chz.field(
        default=r"\n\nWait, let me reconsider.",
        doc=r"what follows the first answer; \n is a new line",
    )
    chat: bool | None = chz.field(
        default=None,
        doc="the cue is a user's turn of the chat template, or follows as text; if None a turn "
        "where the prompt ends as the template ends it",
    )
    temperature: float | None = chz.field(default=0.0, doc="of both answers; 0 is greedy")
    buckets: int = chz.field(default=4, doc="quantiles of the first answers' entropies")
    by: Literal["mean", "max"] = chz.field(
        default="mean", doc="an answer's entropy is the mean or the maximum over its tokens"
    )
    output: str = chz.field(default="", doc="new directory to write to; none if empty")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "buckets", at_least=1)
        if not self.cue:
            raise ConfigError("cue must have at least one character")


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Problems whose first answers had similar entropies.

    Attributes:
        entropies: of these answers, the lowest first.
        problems: their places among all.
        compared: the second answers against the first.
    """

    entropies: Sequence[float]
    problems: Sequence[int]
    compared: Comparison


def main(config: ReconsiderConfig, fields: Mapping[str, str]) -> None:
    """Ask twice, write the output, and print the table.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped.
    """
    output = new_output(config.output, config.log_path) if config.output else None
    if output is not None:
        require_matplotlib()
    todo = asked(config, fields)
    setting, (subject,) = todo.setting, todo.subjects
    setting.config.dataset.check()
    model_directory(subject.model_name)
    cue = config.cue.replace(r"\n", "\n")
    passes = result_until_signal(
        functools.partial(both_passes, subject, setting, cue, config.chat),
        "interrupted; nothing was written",
    )
    entropies_P = entropies(subject, passes.first_P, config.trust)
    of_answer = fmean if config.by == "mean" else max
    entropy_P = [math.nan if each is None else of_answer(each) for each in entropies_P]
    metric = config.metric or passes.first.solved_metric or REWARD
    for results in (passes.first, passes.second):
        results.values(metric)
    buckets = buckets_of(passes, entropy_P, metric, config.buckets, setting.config.seed)
    text = table(subject, setting, passes, metric, cue)
    if buckets:
        title = f"{metric}, by {config.by} entropy of the first answer's tokens, in nats (problems)"
        text += "\n\n" + "\n".join([f"{title}:", *_bucket_lines(buckets)])
    if output is not None:
        with whole_directory(output) as directory:
            write(directory, passes, entropies_P, buckets)
            title = f"{task_of_dataset(setting.config.dataset)}, {metric}"
            _draw(directory / "entropy.png", buckets, title, config.by)
        text += f"\n\nwritten to {output}"
    print_text(text)


def quantile_buckets(values: Sequence[float], count: int) -> list[list[int]]:
    """Places of values, the lowest first, in at most `count` buckets; NaN is in none.

    >>> quantile_buckets([0.1, 0.4, 0.2, 0.3], 2)
    [[0, 2], [1, 3]]
    >>> quantile_buckets([0.0, 5.0, 0.0, 0.0], 2)
    [[0, 2, 3], [1]]
    """
    present = [value for value in values if not math.isnan(value)]
    if not present:
        return []
    edges = np.quantile(present, np.linspace(0, 1, count + 1)[1:-1], method="inverted_cdf")
    buckets = np.digitize(values, edges, right=True).tolist()
    found = [
        [i for i, at in enumerate(buckets) if at == bucket and not math.isnan(values[i])]
        for bucket in range(count)
    ]
    return [bucket for bucket in found if bucket]


def buckets_of(
    passes: Passes, entropy_P: Sequence[float], metric: str, count: int, seed: int
) -> list[Bucket]:
    """The comparison of both passes, bucket by bucket, over problems that have both answers."""
    answers_P = zip(passes.first_P, passes.second_P, strict=True)
    both_P = [
        math.nan if None in answers else entropy
        for answers, entropy in zip(answers_P, entropy_P, strict=True)
    ]
    found: list[Bucket] = []
    for problems in quantile_buckets(both_P, count):
        first, second = (each.of(problems) for each in (passes.first, passes.second))
        entropies = sorted(both_P[p] for p in problems)
        found.append(Bucket(entropies, problems, compare(second, first, metric, seed)))
    return found


def table(subject: Subject, setting: Setting, passes: Passes, metric: str, cue: str) -> str:
    """Both passes as text of 80 columns."""
    generation = None if subject.run is None else subject.generations[0]
    evaluation = Evaluation(subject.name, generation, {}, {}, passes.first, passes.trained_on)
    both = compared(passes.second, passes.first, setting.config.seed)
    columns = ("second", "first")
    parts = [
        heading(setting, evaluation),
        comparison_text(f"After the cue {cue!r}:", both, metric, 1, columns),
    ]
    num_problems = len(passes.first.names_P)
    for which, results in (("first", passes.first), ("second", passes.second)):
        if results.lost:
            parts.append(f"{which} answers {lost_text(results.lost, num_problems)}")
    estimates = {metric: passes.first.estimate(metric, setting.config.seed)}
    if notes := notes_on(estimates, both):
        parts.append("\n".join(notes))
    return printable("\n\n".join(parts))


def _bucket_lines(buckets: Sequence[Bucket]) -> list[str]:
    lines: list[str] = []
    for each in buckets:
        label = f"{each.entropies[0]:.2g}..{each.entropies[-1]:.2g} ({len(each.problems)})"
        lines.append(compared_line(dataclasses.replace(each.compared, metric=label)))
    if few := sum(len(bucket.problems) < FEW for bucket in buckets):
        lines.append(f"{plural(few, 'bucket')} of fewer than {FEW} problems: too sure.")
    return lines


def write(
    directory: Path,
    passes: Passes,
    entropies_P: Sequence[Sequence[float] | None],
    buckets: Sequence[Bucket],
) -> None:
    """Write `rollouts.jsonl` to a directory."""
    bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.problems}
    with (directory / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for p, (name, entropies) in enumerate(zip(passes.first.names_P, entropies_P, strict=True)):
            plain = {
                "problem": name,
                "tags": list(passes.first.tags_P[p]),
                "first": _described(passes.first, passes.first_P[p], p),
                "second": _described(passes.second, passes.second_P[p], p),
                "entropies": entropies and list(entropies),
                "mean_entropy": entropies and fmean(entropies),
                "max_entropy": entropies and max(entropies),
                "bucket": bucket_of.get(p),
            }
            file.write(json.dumps(plain, allow_nan=False) + "\n")


def _described(results: Results, answer: Answer | None, p: int) -> dict[str, object]:
    """An answer and its grade; of a lost one, why it was lost."""
    if answer is None:
        return {"lost": " ".join(results.lost_P[p])}
    return {
        "prompt": answer.prompt,
        "text": answer.text,
        "prompt_tokens": list(answer.prompt_T),
        "tokens": list(answer.tokens_T),
        "reward": _number(results.outcomes.rewards_P_G_K[p, 0, 0]),
        "metrics": {name: _number(v[p, 0, 0]) for name, v in results.outcomes.metrics.items()},
    }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _draw(path: Path, buckets: Sequence[Bucket], title: str, by: str) -> None:
    if not buckets:
        return
    in_percent = all(bucket.compared.is_share for bucket in buckets)
    scale, metric = 100 if in_percent else 1, title.rpartition(", ")[2]
    x_M = [float(np.median(bucket.entropies)) for bucket in buckets]
    draw(
        path,
        {
            "first answer": Line(x_M, [[scale * each.compared.second for each in buckets]]),
            "second answer": Line(x_M, [[scale * each.compared.first for each in buckets]]),
        },
        title=f"{title} by entropy of the first answer",
        x_label=f"{by} entropy of its tokens, nats (median of a bucket)",
        y_label=f"{metric}, %" if in_percent else metric,
    )


def cli() -> None:
    more_help = (
        "\n\nOptions of a run or a recipe (RECIPE --help lists them) that also hold here are those "
        "of evaluate:\ndataset.*, sampling.*, engine.*, data=, prompt=, reward=, ..."
    )
    run_with_fields(main, ReconsiderConfig, more_help, whole_names(sys.argv[1:]))
