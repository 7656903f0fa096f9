"""The README.md of an export: where the weights come from, how they did, how to load them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from es_cookbook.runs.tracking.jsonl import read_metrics

_CURVE_ROWS = 12
_REWARDS = ("reward/mean", "reward/max_genome", "test/reward/mean")
_HELD_OUT = "test/env/all/"


def model_card(
    *,
    title: str,
    front_matter: Mapping[str, str | Sequence[str]],
    what: str,
    facts: Mapping[str, str],
    loading: str,
    metrics_path: Path,
    generation: int,
    config_json: str,
    errors: Mapping[str, float] | None = None,
) -> str:
    """The card as Markdown with a YAML head, as the Hub reads it.

    `what` is a paragraph about what this is, `loading` Python that loads it, and `errors` are
    relative ones by weight, where weights were approximated.
    """
    parts = [
        _front_matter(front_matter),
        f"# {title}",
        what,
        _table(("", ""), [(label, f"`{value}`") for label, value in facts.items()]),
        f"## How to load it\n\n```python\n{loading}\n```",
        f"## How it did\n\n{_curve(metrics_path, generation)}",
    ]
    if errors:
        rows = [(f"`{name}`", f"{error:.4g}") for name, error in errors.items()]
        head = "Frobenius norm of what the adapter leaves out, over that of what the run changed."
        parts.append(f"## Error of each weight\n\n{head}\n\n{_table(('weight', 'error'), rows)}")
    parts.append(f"## Config\n\n```json\n{config_json.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _front_matter(fields: Mapping[str, str | Sequence[str]]) -> str:
    lines: list[str] = []
    for key, value in fields.items():
        if isinstance(value, str):
            lines.append(f"{key}: {value}")
        else:
            lines += [f"{key}:", *(f"- {item}" for item in value)]
    return "\n".join(["---", *lines, "---"])


def _curve(metrics_path: Path, generation: int) -> str:
    """A dozen rows of the run's metrics, evenly spread; held-out measurements before others."""
    rows = [r for r in read_metrics(metrics_path) if r["progress/generation"] <= generation]
    measured = {key for row in rows for key in row}
    keys = [key for key in _REWARDS if key in measured]
    keys += sorted(key for key in measured if key.startswith(_HELD_OUT))
    if not keys:
        return "Nothing was measured."
    tested = [i for i, row in enumerate(rows) if any(k.startswith("test/") for k in row)]
    chosen = {tested[i] for i in _spread(len(tested), _CURVE_ROWS)}
    chosen |= set(_spread(len(rows), _CURVE_ROWS - len(chosen)))
    table = _table(
        ("generation", *(f"`{key}`" for key in keys)),
        [
            (f"{rows[i]['progress/generation']:.0f}", *(_cell(rows[i].get(k)) for k in keys))
            for i in sorted(chosen)
        ],
    )
    return (
        "`reward/...` is of the population drawn around a generation's centre, `test/...` of that "
        f"centre itself. This is the centre of generation {generation}.\n\n{table}"
    )


def _spread(length: int, count: int) -> list[int]:
    """At most so many indices into a list, the last among them.

    >>> _spread(10, 4)
    [0, 3, 6, 9]
    """
    count = min(length, count)
    if count < 2:
        return list(range(length))[-count:] if count else []
    return [round(i * (length - 1) / (count - 1)) for i in range(count)]


def _cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
