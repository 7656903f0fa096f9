"""Evaluations as a table of 80 columns, with what must be known to read its intervals."""

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from io import TextIOWrapper

from es_cookbook.commands.evaluate.measuring import Evaluation, Setting
from es_cookbook.common.terminal import plural, printable
from es_cookbook.population.evaluate import ks_of
from es_cookbook.population.results import Comparison, Estimate, Results, compare
from es_cookbook.population.statistics import FEW
from es_cookbook.rl.objectives import REWARD

WIDTH = 80
_NAME = 20
_MOST_TAGS = 40
"""More make no table that anybody reads; the file has them."""


def estimates_of(results: Results, seed: int, solved: str | None) -> dict[str, dict[str, Estimate]]:
    """By tag, and `all`, every metric; pass@k of the metric `solved` over all problems."""
    found = {"all": {metric: results.estimate(metric, seed) for metric in results.metrics}}
    if results.attempts > 1 and solved is not None:
        found["all"] |= {
            f"pass@{k}": results.pass_at(k, seed, solved) for k in ks_of(results.attempts)
        }
    for tag in results.tags:
        found[tag] = {metric: results.estimate(metric, seed, tag) for metric in results.metrics}
    return found


def compared(first: Results, second: Results, seed: int) -> list[Comparison]:
    """Every metric that both have."""
    both = [metric for metric in first.metrics if metric in second.metrics]
    return [compare(first, second, metric, seed) for metric in both]


def print_text(text: str) -> None:
    """Print what a model or its tags may be part of, which a terminal may have no letters for."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print(text)


def report(
    setting: Setting,
    evaluation: Evaluation,
    estimates: Mapping[str, Mapping[str, Estimate]],
    metric: str,
    against: Evaluation | None = None,
    comparisons: Sequence[Comparison] = (),
) -> str:
    """All of it as text; `metric` is the one that is shown by tag and told of in words."""
    parts = [heading(setting, evaluation), _table(estimates["all"], metric)]
    if tags := [tag for tag in estimates if tag != "all"]:
        parts.append(_by_tag({tag: estimates[tag][metric] for tag in tags}, metric))
    if lost := evaluation.results.lost:
        parts.append(lost_text(lost, len(evaluation.results.names_P) * setting.attempts))
    if against is not None:
        parts.append(
            comparison_text(
                f"Against {against.title}, problem by problem:",
                comparisons,
                metric,
                setting.attempts,
            )
        )
        parts += _not_held_out(setting, against)
    if notes := notes_on(estimates["all"], comparisons):
        parts.append("\n".join(notes))
    return printable("\n\n".join(parts))


def heading(setting: Setting, evaluation: Evaluation) -> str:
    """Who was measured, on what and how."""
    count = len(evaluation.results.names_P)
    which = "held-out problem" if setting.split == "test" else "training problem"
    temperature = setting.temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    said = (
        f"{plural(count, which)}{f' of {setting.problems}' if setting.problems else ''}, "
        f"{plural(setting.attempts, 'attempt')} at each, {how}, at most "
        f"{plural(setting.config.sampling.max_tokens, 'token')}, seed {setting.config.seed}"
    )
    return "\n".join([evaluation.title, _wrapped(said), *_not_held_out(setting, evaluation)])


def _not_held_out(setting: Setting, evaluation: Evaluation) -> list[str]:
    """How many of the problems were trained on, where that matters and is not none."""
    if setting.split == "train" or evaluation.trained_on == 0:
        return []
    if evaluation.trained_on is None:
        if not evaluation.generation:  # A model, of which nobody expects to know it.
            return []
        return [_wrapped(f"Which of these problems {evaluation.name} trains on is not known.")]
    count = plural(len(evaluation.results.names_P), "problem")
    said = f"Not held out: {evaluation.name} trains on {evaluation.trained_on} of {count}."
    return [_wrapped(said)]


def _table(estimates: Mapping[str, Estimate], metric: str) -> str:
    order = sorted(estimates, key=lambda name: _place(name, metric))
    rows = [_row(name, estimates[name]) for name in order]
    return "\n".join([f"{'':<{_NAME}}{'mean':>10}   95 % interval", *rows])


def _place(name: str, metric: str) -> tuple[bool, bool, bool]:
    """Sorts what is asked for first, then pass@k, then the reward."""
    return name != metric, "@" not in name, name != REWARD


def _row(name: str, estimate: Estimate, problems: bool = False) -> str:
    value, low, high, share = estimate.value, estimate.low, estimate.high, estimate.is_share
    decimals = _decimals(value, low, high)
    left = f"{_cut(name)}{_number(value, share, decimals):>10}   "
    interval = _interval(low, high, share, decimals)
    right = f"{estimate.problems:>8}" if problems else ""
    return f"{left}{interval:<22}{estimate.method:<10}{right}".rstrip()


def _by_tag(estimates: Mapping[str, Estimate], metric: str) -> str:
    lines = [
        f"{_cut(f'{metric}, by tag')}{'mean':>10}   {'95 % interval':<32}{'problems':>8}",
        *(_row(tag, estimates[tag], problems=True) for tag in list(estimates)[:_MOST_TAGS]),
    ]
    if (more := len(estimates) - _MOST_TAGS) > 0:
        lines.append(f"and {plural(more, 'tag')} more, which output=FILE.json has")
    return "\n".join(lines)


def lost_text(lost: Mapping[str, int], num_rollouts: int) -> str:
    """How many were lost, and for which reasons."""
    lines = [f"lost: {sum(lost.values())} of {plural(num_rollouts, 'rollout')}, left out above"]
    most = sorted(lost.items(), key=lambda item: -item[1])
    lines += [
        textwrap.indent(_wrapped(f"{number} x {reason:.300}", WIDTH - 2), "  ")
        for reason, number in most[:5]
    ]
    if len(most) > 5:
        lines.append(f"  and {plural(len(most) - 5, 'other reason')}")
    return "\n".join(lines)


def comparison_text(
    title: str,
    comparisons: Sequence[Comparison],
    metric: str,
    attempts: int,
    names: tuple[str, str] = ("this", "other"),
) -> str:
    """All metrics of two, by names of their columns, and one metric in words."""
    this, other = names
    lines = [
        _wrapped(title),
        f"{'':<{_NAME}}{this:>11}{other:>11}{'difference':>11}   95 % interval",
        *map(compared_line, sorted(comparisons, key=lambda found: _place(found.metric, metric))),
    ]
    for found in comparisons:
        if found.metric == metric:
            same = found.problems - found.better - found.worse
            test = "exact McNemar test" if found.is_share and attempts == 1 else "sign test"
            told = (
                f"{metric}: better on {plural(found.better, 'problem')}, worse on {found.worse}, "
                f"the same on {same}; p {_p(found.p)} ({test})"
            )
            lines += ["", _wrapped(told)]
    return "\n".join(lines)


def compared_line(found: Comparison) -> str:
    share, decimals = found.is_share, _decimals(found.first, found.second)
    numbers = [_number(value, share, decimals) for value in (found.first, found.second)]
    numbers.append(_number(found.difference, share, decimals, signed=True))
    interval = _interval(found.low, found.high, share, decimals, signed=True)
    return f"{_cut(found.metric)}{''.join(f'{n:>11}' for n in numbers)}   {interval}"


def notes_on(estimates: Mapping[str, Estimate], comparisons: Sequence[Comparison]) -> list[str]:
    """Sentences on which intervals are not to be trusted."""
    problems = max((estimate.problems for estimate in estimates.values()), default=0)
    bootstrapped = [name for name, e in estimates.items() if e.method == "bootstrap"]
    notes: list[str] = []
    if problems < FEW and (bootstrapped or comparisons):
        notes.append(
            f"{plural(problems, 'problem')} are few: intervals by bootstrap"
            f"{', those of differences too,' if comparisons else ''} are narrower than they should "
            "be."
        )
    alike = ", ".join(n for n in bootstrapped if estimates[n].low == estimates[n].high)
    differences = ", ".join(c.metric for c in comparisons if c.low == c.high)
    for what in (alike, differences and f"the difference in {differences}"):
        if what:
            notes.append(
                f"{what}: the same for every problem, so a bootstrap cannot tell how uncertain it "
                "is."
            )
    return [_wrapped(note) for note in notes]


def _number(value: float, is_share: bool, decimals: int, signed: bool = False) -> str:
    """A value; of a share in percent, and of a difference of shares in points of percent."""
    if not math.isfinite(value):
        return "unknown"
    sign = "+" if signed else ""
    if is_share:
        return f"{100 * value:{sign}.1f}" + ("" if signed else " %")
    return f"{value:{sign}.{decimals}f}"


def _interval(low: float, high: float, is_share: bool, decimals: int, signed: bool = False) -> str:
    if not math.isfinite(low):
        return "unknown"
    sign = "+" if signed else ""
    if is_share:
        unit = "points" if signed else "%"
        return f"{100 * low:{sign}.1f} to {100 * high:{sign}.1f} {unit}"
    return f"{low:{sign}.{decimals}f} to {high:{sign}.{decimals}f}"


def _decimals(*values: float) -> int:
    """So many that the largest of these has four digits."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0)
    return 3 if largest == 0 else min(max(3 - math.floor(math.log10(largest)), 0), 6)


def _p(p: float) -> str:
    return "< 1e-300" if p == 0 else f"= {p:.2g}"


def _cut(name: str) -> str:
    return f"{name if len(name) < _NAME else name[: _NAME - 3] + '..':<{_NAME}}"


def _wrapped(text: str, width: int = WIDTH) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
