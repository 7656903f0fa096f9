"""An evaluation as a table of 80 columns, and as a JSON file with every problem.

The table says what must be known to read its intervals. With the file another evaluation can be
compared. What is read may be anybody's: it is numbers and names, and nothing in it is called or
imported.
"""

import dataclasses
import json
import math
import platform
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import es_cookbook
from es_cookbook.cli.evaluate.measuring import Evaluation, Setting
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.common.terminal import one_line, plural, printable
from es_cookbook.population.evaluate import ks_of, majority_ks_of
from es_cookbook.population.results import Comparison, Estimate, Results, compare
from es_cookbook.population.statistics import FEW
from es_cookbook.rl.objectives import REWARD, Outcomes
from es_cookbook.runs.tracking.jsonl import finite

WIDTH = 80
_NAME = 20
_MOST_TAGS = 40
"""More make no table that anybody reads; the file has them."""


_MOST_VALUES = 2**23
"""Of a hundred thousand problems."""
FORMAT = "es_cookbook evaluation 1"
_PACKAGES = ("numpy", "torch", "transformers")


def estimates_of(results: Results, seed: int, solved: str | None) -> dict[str, dict[str, Estimate]]:
    """By tag, and `all`, every metric; pass@k and maj@k of `solved` over all problems."""
    found = {"all": {metric: results.estimate(metric, seed) for metric in results.metrics}}
    if results.attempts > 1 and solved is not None:
        found["all"] |= {f"pass@{k}": results.pass_at(k, solved) for k in ks_of(results.attempts)}
        if results.can_vote:
            ks = majority_ks_of(results.attempts)
            found["all"] |= {f"maj@{k}": results.majority_at(k, solved) for k in ks}
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
    attempts = evaluation.results.attempts
    parts = [heading(setting, evaluation), _table(estimates["all"], metric)]
    if tags := [tag for tag in estimates if tag != "all"]:
        parts.append(_by_tag({tag: estimates[tag][metric] for tag in tags}, metric))
    if lost := evaluation.results.lost:
        parts.append(lost_text(lost, len(evaluation.results.names_P) * attempts))
    if against is not None:
        title = f"Against {against.title}, problem by problem:"
        parts.append(comparison_text(title, comparisons, metric, attempts))
        parts.append(_not_held_out(setting, against))
    parts.append(notes_on(estimates["all"], comparisons))
    return printable("\n\n".join(filter(None, parts)))


def answers_text(evaluations: Sequence[Evaluation], count: int) -> str:
    """What each said at the first few problems, with its reward, for people to read."""
    lines: list[str] = []
    for p, name in enumerate(evaluations[0].results.names_P[:count]):
        lines += ["", one_line(name)]
        for evaluation in evaluations:
            if evaluation.answers_P:
                reward = evaluation.results.outcomes.rewards_P_G_K[p, 0, 0]
                said = one_line(evaluation.answers_P[p]) or "(nothing)"
                lines.append(f"  {_when(evaluation)}: {said}  (reward {reward:.3g})")
    return printable("\n".join(["Answers:", *lines])) if lines else ""


def _when(evaluation: Evaluation) -> str:
    if evaluation.generation is None:
        return evaluation.name
    return "base" if evaluation.generation == 0 else f"generation {evaluation.generation}"


def heading(setting: Setting, evaluation: Evaluation) -> str:
    """Who was measured, on what and how."""
    config, count = setting.config, len(evaluation.results.names_P)
    which = "held-out problem" if setting.split == "test" else "training problem"
    temperature = config.eval_temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    attempts = plural(config.eval_attempts, "attempt")
    if evaluation.voters:
        attempts = f"{plural(evaluation.voters * count, 'rollout')}: one attempt of each genome"
    said = (
        f"{plural(count, which)}{f' of {setting.problems}' if setting.problems else ''}, "
        f"{attempts} at each, {how}, at most "
        f"{plural(config.sampling.max_tokens, 'token')}, seed {config.seed}"
    )
    lines = [evaluation.title, _wrapped(said), _not_held_out(setting, evaluation)]
    return "\n".join(filter(None, lines))


def _not_held_out(setting: Setting, evaluation: Evaluation) -> str:
    """How many of the problems were trained on, where that matters and is not none."""
    name, known = evaluation.name, evaluation.trained_on
    if setting.split == "train" or known == 0 or (known is None and not evaluation.generation):
        return ""  # Of a model nobody expects to know it.
    if known is None:
        return _wrapped(f"Which of these problems {name} trains on is not known.")
    count = plural(len(evaluation.results.names_P), "problem")
    return _wrapped(f"Not held out: {name} trains on {known} of {count}.")


def _table(estimates: Mapping[str, Estimate], metric: str) -> str:
    order = sorted(estimates, key=lambda name: _place(name, metric))
    answers = {estimate.answers for estimate in estimates.values()}
    if len(answers) == 1:
        rows = [_row(name, estimates[name]) for name in order]
        return "\n".join([f"{'':<{_NAME}}{'mean':>10}   95 % interval", *rows])
    rows = [_row(name, estimates[name], str(estimates[name].answers)) for name in order]
    return "\n".join([f"{'':<{_NAME}}{'mean':>10}   {'95 % interval':<32}{'answers':>8}", *rows])


def _place(name: str, metric: str) -> tuple[bool, bool, bool]:
    """Sorts what is asked for first, then pass@k, then the reward."""
    return name != metric, "@" not in name, name != REWARD


def _row(name: str, estimate: Estimate, count: str = "") -> str:
    value, low, high, share = estimate.value, estimate.low, estimate.high, estimate.is_share
    decimals = _decimals(value, low, high)
    left = f"{_cut(name)}{_number(value, share, decimals):>10}   "
    interval = _interval(low, high, share, decimals)
    return f"{left}{interval:<22}{estimate.method:<10}{count:>8}".rstrip()


def _by_tag(estimates: Mapping[str, Estimate], metric: str) -> str:
    lines = [
        f"{_cut(f'{metric}, by tag')}{'mean':>10}   {'95 % interval':<32}{'problems':>8}",
        *(
            _row(tag, estimate, str(estimate.problems))
            for tag, estimate in list(estimates.items())[:_MOST_TAGS]
        ),
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


def notes_on(estimates: Mapping[str, Estimate], comparisons: Sequence[Comparison]) -> str:
    """Sentences on which intervals are not to be trusted."""
    problems = max((estimate.problems for estimate in estimates.values()), default=0)
    bootstrapped = [name for name, e in estimates.items() if e.method == "bootstrap"]
    notes: list[str] = []
    most = max((estimate.answers for estimate in estimates.values()), default=0)
    if few := ", ".join(name for name, e in estimates.items() if e.answers < most):
        notes.append(
            f"{few}: not reported by all {plural(most, 'answer')}, so a mean is over those that "
            "do, and does not compare with one over others."
        )
    both = max((found.problems for found in comparisons), default=0)
    for found in comparisons:
        if found.problems < both:
            notes.append(
                f"the difference in {found.metric}: over {found.problems} of "
                f"{plural(both, 'problem')}, of which both report it."
            )
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
    return "\n".join(map(_wrapped, notes))


def _number(value: float, is_share: bool, decimals: int, signed: bool = False) -> str:
    """A value; of a share in percent, and of a difference of shares in points of percent."""
    if not math.isfinite(value):
        return "unknown"
    return _digits(value, is_share, decimals, signed) + (" %" if is_share and not signed else "")


def _interval(low: float, high: float, is_share: bool, decimals: int, signed: bool = False) -> str:
    if not math.isfinite(low):
        return "unknown"
    ends = (_digits(end, is_share, decimals, signed) for end in (low, high))
    return " to ".join(ends) + is_share * (" points" if signed else " %")


def _digits(value: float, is_share: bool, decimals: int, signed: bool) -> str:
    sign = "+" if signed else ""
    return f"{100 * value:{sign}.1f}" if is_share else f"{value:{sign}.{decimals}f}"


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


def to_json(
    setting: Setting,
    evaluation: Evaluation,
    estimates: Mapping[str, Mapping[str, Estimate]],
    against: Evaluation | None = None,
    comparisons: Sequence[Comparison] = (),
) -> str:
    """Everything that was measured; unknown numbers are null.

    `estimates` are by tag, `all` for all problems, and metric.
    """
    config = setting.config
    plain = {
        "format": FORMAT,
        **_described(evaluation),
        "settings": {
            "problems": setting.problems or "the run's own",
            "split": setting.split,
            "attempts": config.eval_attempts,
            "temperature": config.eval_temperature,
            "sampling.max_tokens": config.sampling.max_tokens,
            "sampling.top_p": config.sampling.top_p,
            "seed": config.seed,
            "rollout_timeout": config.rollout_timeout,
            "turn_timeout": config.turn_timeout,
            "dataset": json.loads(config_to_json(config.dataset)),
        },
        "estimates": {
            tag: {metric: dataclasses.asdict(found) for metric, found in of_tag.items()}
            for tag, of_tag in estimates.items()
        },
        "lost": dict(evaluation.results.lost),
        "against": against and _described(against),
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
        "versions": {
            "es_cookbook": es_cookbook.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "problems": _problems(evaluation.results),
    }
    text = json.dumps(finite(plain), indent=1, ensure_ascii=False, allow_nan=False)
    return text + "\n"


def read(path: Path) -> tuple[Evaluation, Mapping[str, object]]:
    """Read what `to_json` wrote: the evaluation, and how it was made.

    Raises:
        ConfigError: It cannot be read, or is something else; names the file.
    """
    try:
        plain = parsed(read_file(path, LARGEST_TEXT, None), _MOST_VALUES)
        if not isinstance(plain, dict) or cast("dict[str, object]", plain).get("format") != FORMAT:
            raise ConfigError(f"{path} is no evaluation that this version can read ({FORMAT!r})")
        plain = cast("dict[str, Any]", plain)
        return _evaluation(plain), dict(plain["settings"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged, or was changed: {type(error).__name__}: {error}"[:300]
        ) from error


def _described(evaluation: Evaluation) -> dict[str, object]:
    return {
        "name": evaluation.name,
        "generation": evaluation.generation,
        "model": dict(evaluation.model),
        "metrics": dict(evaluation.metrics),
        "trained_on": evaluation.trained_on,
    }


def _problems(results: Results) -> list[dict[str, object]]:
    metrics = results.outcomes.metrics
    return [
        {
            "name": name,
            "tags": list(results.tags_P[p]),
            "reward": results.outcomes.rewards_P_G_K[p, 0].tolist(),
            "tokens": results.outcomes.tokens_P_G_K[p, 0].tolist(),
            "metrics": {metric: metrics[metric][p, 0].tolist() for metric in sorted(metrics)},
            "lost": list(results.lost_P[p]),
            "answers": _numbered(results.answers_P[p]) if results.answers_P else [],
        }
        for p, name in enumerate(results.names_P)
    ]


def _evaluation(plain: Mapping[str, Any]) -> Evaluation:
    problems: list[dict[str, Any]] = plain["problems"]
    metrics = {metric for problem in problems for metric in problem["metrics"]}
    results = Results(
        names_P=[str(problem["name"]) for problem in problems],
        tags_P=[tuple(map(str, problem["tags"])) for problem in problems],
        outcomes=Outcomes(
            _values([problem["reward"] for problem in problems]),
            _values([problem["tokens"] for problem in problems]),
            {m: _values([problem["metrics"][m] for problem in problems]) for m in metrics},
        ),
        lost_P=[list(map(str, problem["lost"])) for problem in problems],
        answers_P=[_answers(problem["answers"], len(problem["reward"])) for problem in problems],
    )
    generation = plain["generation"]
    return Evaluation(
        name=str(plain["name"]),
        generation=None if generation is None else int(generation),
        model={str(key): value and str(value) for key, value in plain["model"].items()},
        metrics={
            str(name): math.nan if value is None else float(value)
            for name, value in plain["metrics"].items()
        },
        results=results,
        trained_on=None if (count := plain["trained_on"]) is None else int(count),
    )


def _numbered(answers: Sequence[str | None]) -> list[int | None]:
    """Equal answers as equal numbers, without a word of the model's."""
    numbers: dict[str, int] = {}
    return [None if a is None else numbers.setdefault(a, len(numbers)) for a in answers]


def _answers(found: object, attempts: int) -> list[str | None]:
    """None where there is not one for each attempt."""
    answers = cast("list[object]", found) if isinstance(found, list) else []
    if len(answers) != attempts:
        return [None] * attempts
    return [None if answer is None else str(answer) for answer in answers]


def _values(values_P_K: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """`values_P_G_K` of one genome, None as NaN."""
    found = np.array(values_P_K, dtype=np.float64)
    if found.ndim != 2 or not found.size:
        raise ValueError("every problem must have as many attempts, and at least one")
    return found[:, None, :]
