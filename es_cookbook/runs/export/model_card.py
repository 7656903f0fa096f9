"""The README.md of an export: where the weights come from, how they did, how to load them."""

import json
import math
from pathlib import Path

import es_cookbook
from es_cookbook.checkpoints.identity import BaseIdentity
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.errors import HistoryError
from es_cookbook.common.terminal import markdown, plural
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.export.forms import Written
from es_cookbook.runs.replay import Replay
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import read_metrics

_CURVE_ROWS = 12
_REWARDS = ("reward/mean", "reward/max_genome", "test/reward/mean")
_HELD_OUT = "test/env/all/"


def model_card(title: str, replay: Replay, base: BaseIdentity, written: Written) -> str:
    """The card of a centre as Markdown with a YAML head, as the Hub reads it."""
    what = (
        f"The centre of a population after {plural(replay.generation, 'generation')} of evolution "
        f"strategies, as {written.kind}. It was rebuilt from the base model and the run's history"
    )
    fingerprint = replay.fingerprint
    facts = {
        "generations": str(replay.generation),
        "fingerprint": "none: it is the base" if fingerprint is None else f"{fingerprint:016x}",
        "base model": replay.model_name,
        "base weights": base.weights,
        "base tokenizer": base.tokenizer,
        "search space": type(replay.search_space).__name__,
        "sampled in": dtype_name(replay.dtype),
        "es_cookbook": es_cookbook.__version__,
    }
    try:
        how = curve(replay.history.with_name(METRICS), replay.generation)
    except HistoryError:  # The weights are none the worse for it.
        how = "The metrics of the run cannot be read: their file is damaged."
    parts = [
        _front_matter(replay.model_name, written),
        f"# {title}",
        what + (", and has the fingerprint that the run recorded." if replay.steps else "."),
        markdown(("", ""), [(label, f"`{value}`") for label, value in facts.items()]),
        f"## How to load it\n\n```python\n{written.loading}\n```",
        f"## How it did\n\n{how}",
    ]
    if written.errors:
        rows = [(f"`{name}`", f"{error:.4g}") for name, error in written.errors.items()]
        head = "Frobenius norm of what the adapter leaves out, over that of what the run changed."
        parts.append(f"## Error of each weight\n\n{head}\n\n{markdown(('weight', 'error'), rows)}")
    config = json.dumps(replay.config, indent=2, ensure_ascii=False)
    parts.append(f"## Config\n\n```json\n{config}\n```")
    return "\n\n".join(parts) + "\n"


def _front_matter(model_name: str, written: Written) -> str:
    lines = [f"library_name: {written.library}", "pipeline_tag: text-generation"]
    lines += ["tags:", "- es_cookbook", "- evolution-strategies"]
    if not Path(model_name).is_dir():  # The Hub refuses a base model that is no name on it.
        lines += [f"base_model: {model_name}", f"base_model_relation: {written.relation}"]
    return "\n".join(["---", *lines, "---"])


def curve(metrics_path: Path, generation: int) -> str:
    """A dozen rows of the run's metrics, evenly spread; held-out measurements before others."""
    rows = [r for r in read_metrics(metrics_path) if r.get(GENERATION, math.nan) <= generation]
    measured = {key for row in rows for key in row}
    keys = [key for key in _REWARDS if key in measured]
    keys += sorted(key for key in measured if key.startswith(_HELD_OUT))
    if not keys:
        return "Nothing was measured."
    tested = [i for i, row in enumerate(rows) if any(k.startswith("test/") for k in row)]
    chosen = {tested[i] for i in _spread(len(tested), _CURVE_ROWS)}
    chosen |= set(_spread(len(rows), _CURVE_ROWS - len(chosen)))
    table = markdown(
        ("generation", *(f"`{key}`" for key in keys)),
        [
            (f"{rows[i][GENERATION]:.0f}", *(_cell(rows[i].get(k)) for k in keys))
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
