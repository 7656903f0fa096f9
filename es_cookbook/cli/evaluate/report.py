"""An evaluation as a table of 80 columns, and as a JSON file with every problem."""

import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping, Sequence

import es_cookbook
from es_cookbook.cli.evaluate.measuring import Evaluation, Setting
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.terminal import one_line, plural, printable
from es_cookbook.population.results import FEW, Comparison, Estimate, Results, compare
from es_cookbook.rl.objectives import REWARD
from es_cookbook.runs.tracking.jsonl import finite

_WIDTH = 80
_NAME = 20
FORMAT = "es_cookbook evaluation 1"


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation with its estimates, alone or compared with another.

    Attributes:
        estimates: by tag, `all` for all problems, and metric.
        comparisons: of every metric that both evaluations have.
    """

    setting: Setting
    evaluation: Evaluation
    against: Evaluation | None
    estimates: Mapping[str, Mapping[str, Estimate]]
    comparisons: Sequence[Comparison]


def measured(
    setting: Setting, evaluation: Evaluation, against: Evaluation | None, metric: str
) -> Measured:
    """Estimate all metrics; pass@k and maj@k are of `metric` if it was reported."""
    results, seed = evaluation.results, setting.config.seed
    found = {"all": {name: results.estimate(name, seed) for name in results.metrics}}
    found["all"] |= results.at_ks(metric if metric in results.metrics else None)
    for tag in results.tags:
        # A row may have the tag "all" itself.
        found.setdefault(tag, {n: results.estimate(n, seed, tag) for n in results.metrics})
    both = compared(results, against.results, seed) if against else []
    return Measured(setting, evaluation, against, found, both)


def compared(first: Results, second: Results, seed: int) -> list[Comparison]:
    """Compare every metric that both have."""
    both = [metric for metric in first.metrics if metric in second.metrics]
    return [compare(first, second, metric, seed) for metric in both]


def report(found: Measured, metric: str) -> str:
    """Return the whole page; `metric` is also shown by tag and compared in words."""
    evaluation, estimates = found.evaluation, found.estimates
    attempts = evaluation.results.attempts
    parts = [_heading(found.setting, evaluation), _table(estimates["all"], metric)]
    if tags := [tag for tag in estimates if tag != "all"]:
        parts.append(_by_tag({tag: estimates[tag][metric] for tag in tags}, metric))
    if lost := evaluation.results.lost:
        parts.append(_lost(lost, len(evaluation.results.names_P) * attempts))
    if found.against is not None:
        title = f"Against {found.against.title}, problem by problem:"
        parts.append(_comparison(title, found.comparisons, metric, attempts))
        parts.append(_not_held_out(found.setting, found.against))
    parts.append(_notes(estimates["all"], found.comparisons))
    return printable("\n\n".join(filter(None, parts)))


def answers_text(evaluations: Sequence[Evaluation], count: int) -> str:
    """Return the answers to the first few problems, with their rewards."""
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
    when = "base" if evaluation.is_base else f"generation {evaluation.generation}"
    return evaluation.name if evaluation.generation is None else when


def _heading(setting: Setting, evaluation: Evaluation) -> str:
    """Return the heading: the model that was measured, the problems and the sampling."""
    config, count = setting.config, len(evaluation.results.names_P)
    which = "held-out problem" if setting.split == "test" else "training problem"
    how = f"temperature {t:g}" if (t := config.eval_temperature) else "greedy"
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
    """Return a note on held-out problems that the run trains on; "" if there are none."""
    name, known = evaluation.name, evaluation.trained_on
    if setting.split == "train" or known == 0 or (known is None and not evaluation.generation):
        return ""
    if known is None:
        return _wrapped(f"Which of these problems {name} trains on is not known.")
    count = plural(len(evaluation.results.names_P), "problem")
    return _wrapped(f"Not held out: {name} trains on {known} of {count}.")


def _table(estimates: Mapping[str, Estimate], metric: str) -> str:
    order = sorted(estimates, key=lambda name: _place(name, metric))
    differ = len({estimate.answers for estimate in estimates.values()}) > 1
    head = f"{'':<{_NAME}}{'mean':>10}   {'95 % interval':<32}{'answers' * differ:>8}".rstrip()
    rows = (_row(name, estimates[name], str(estimates[name].answers) * differ) for name in order)
    return "\n".join([head, *rows])


def _place(name: str, metric: str) -> tuple[bool, bool, bool]:
    """Return a sort key: the requested metric first, then pass@k, then the reward."""
    return name != metric, "@" not in name, name != REWARD


def _row(name: str, estimate: Estimate, count: str = "") -> str:
    left = f"{_cut(name)}{_number(estimate.value, estimate.is_share):>10}   "
    interval = _interval(estimate.low, estimate.high, estimate.is_share)
    return f"{left}{interval:<22}{estimate.method:<10}{count:>8}".rstrip()


def _by_tag(estimates: Mapping[str, Estimate], metric: str) -> str:
    head = f"{_cut(f'{metric}, by tag')}{'mean':>10}   {'95 % interval':<32}{'problems':>8}"
    rows = (_row(tag, each, str(each.problems)) for tag, each in estimates.items())
    return "\n".join([head, *rows])


def _lost(lost: Mapping[str, int], num_rollouts: int) -> str:
    """Return the number of lost rollouts and the most frequent reasons."""
    head = f"lost: {sum(lost.values())} of {plural(num_rollouts, 'rollout')}, left out above"
    most = sorted(lost.items(), key=lambda item: -item[1])[:5]
    return "\n".join([head, *(_wrapped(f"{n} x {why:.300}", indent="  ") for why, n in most)])


def _comparison(title: str, comparisons: Sequence[Comparison], metric: str, attempts: int) -> str:
    """Return all metrics of two evaluations as a table, and one metric in words."""
    lines = [
        _wrapped(title),
        f"{'':<{_NAME}}{'this':>11}{'other':>11}{'difference':>11}   95 % interval",
        *map(compared_line, sorted(comparisons, key=lambda found: _place(found.metric, metric))),
    ]
    for found in comparisons:
        if found.metric == metric:
            same = found.problems - found.better - found.worse
            test = "exact McNemar test" if found.is_share and attempts == 1 else "sign test"
            p = "< 1e-300" if found.p == 0 else f"= {found.p:.2g}"
            told = (
                f"{metric}: better on {plural(found.better, 'problem')}, worse on {found.worse}, "
                f"the same on {same}; p {p} ({test})"
            )
            lines += ["", _wrapped(told)]
    return "\n".join(lines)


def compared_line(found: Comparison) -> str:
    """Return a line of the table of comparisons."""
    share = found.is_share
    numbers = [_number(value, share) for value in (found.first, found.second)]
    numbers.append(_number(found.difference, share, signed=True))
    interval = _interval(found.low, found.high, share, signed=True)
    return f"{_cut(found.metric)}{''.join(f'{n:>11}' for n in numbers)}   {interval}"


def _notes(estimates: Mapping[str, Estimate], comparisons: Sequence[Comparison]) -> str:
    """Return warnings about intervals and means that mislead."""
    notes: list[str] = []
    most = max((estimate.answers for estimate in estimates.values()), default=0)
    if some := ", ".join(name for name, each in estimates.items() if each.answers < most):
        notes.append(
            f"{some}: not reported by all {plural(most, 'answer')}; the mean is over those that "
            "report it."
        )
    problems = max((estimate.problems for estimate in estimates.values()), default=0)
    is_bootstrapped = any(estimate.method == "bootstrap" for estimate in estimates.values())
    if problems < FEW and (is_bootstrapped or comparisons):
        notes.append(
            f"{plural(problems, 'problem')} are few: intervals by bootstrap are too narrow."
        )
    return "\n".join(map(_wrapped, notes))


def _number(value: float, is_share: bool, signed: bool = False) -> str:
    """Return a value as text: shares in percent, differences of shares in percentage points."""
    if not math.isfinite(value):
        return "unknown"
    sign = "+" if signed else ""
    if is_share:
        return f"{100 * value:{sign}.1f}" + ("" if signed else " %")
    return f"{value:{sign}.4g}"


def _interval(low: float, high: float, is_share: bool, signed: bool = False) -> str:
    if not math.isfinite(low):
        return "unknown"
    ends = " to ".join(_number(end, is_share, signed).removesuffix(" %") for end in (low, high))
    return ends + is_share * (" points" if signed else " %")


def _cut(name: str) -> str:
    return f"{name if len(name) < _NAME else name[: _NAME - 3] + '..':<{_NAME}}"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def to_json(found: Measured) -> str:
    """Return everything that was measured as JSON; unknown numbers are null."""
    setting, evaluation, config = found.setting, found.evaluation, found.setting.config
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
            tag: {metric: dataclasses.asdict(each) for metric, each in of_tag.items()}
            for tag, of_tag in found.estimates.items()
        },
        "lost": dict(evaluation.results.lost),
        "against": found.against and _described(found.against),
        "comparisons": [dataclasses.asdict(comparison) for comparison in found.comparisons],
        "version": es_cookbook.__version__,
        "problems": _problems(evaluation.results),
    }
    return json.dumps(finite(plain), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _described(evaluation: Evaluation) -> dict[str, object]:
    names = ("name", "generation", "model", "metrics", "trained_on")
    return {name: getattr(evaluation, name) for name in names}


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
        }
        for p, name in enumerate(results.names_P)
    ]
