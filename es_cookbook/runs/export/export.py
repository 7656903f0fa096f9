"""A run's centre as files that other libraries load, rebuilt from base model and history.

A run that moves the model's own weights becomes a Hugging Face model directory; a run over adapters
becomes a PEFT adapter, or with merge=true a model directory with the adapter merged. With rank=r
the first kind becomes a PEFT adapter too: the nearest of that rank to what the run changed, weight
by weight; the export says how near it is.

The run directory is read and never written. The centre's fingerprint has to be the recorded one.
Nothing stands under `output` before all of it is there, and memory holds a tensor at a time.
"""

import json
import math
from pathlib import Path
from typing import Literal

import es_cookbook
from es_cookbook.checkpoints.model_files import hub_repository
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.errors import HistoryError, RunDirectoryError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.terminal import markdown, plural
from es_cookbook.runs.centre.replay import Replay
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.export.base import ExportForm, Transformers
from es_cookbook.runs.export.forms import CentreFiles, Written
from es_cookbook.runs.tracking.base import GENERATION
from es_cookbook.runs.tracking.jsonl import read_metrics

_CURVE_ROWS = 12
_MOVED = "Paths are those of the export; if it has been moved, put its new place there."
_REWARDS = ("reward/mean", "reward/max_genome", "test/reward/mean")
_HELD_OUT = "test/env/all/"


def write_export(
    replay: Replay,
    output: Path,
    *,
    merge: bool = False,
    rank: int | Literal["exact"] | None = None,
    form: ExportForm | None = None,
) -> Written:
    """Write a centre with its model card to `output`, which must not be there yet.

    With `merge`, the whole model in plain numbers: an adapter is merged, and a quantised checkpoint
    that the run moved dequantised; with `rank`, an adapter of this rank of a run that moves linear
    weights alone, or of the smallest one that holds all of what the run changed. The `form`, by
    default `Transformers`, is what any of these is kept as.

    Raises:
        ModelError: A model that the form cannot hold.
        HistoryError: The base is another than the run began with, or the rebuilt centre is not the
            recorded one.
        RunDirectoryError: The output cannot be written.
    """
    base, centre = replay.check_base(), CentreFiles(replay, merge, rank)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(output) as directory:
            written = (form or Transformers())(centre, directory, output)
            card = _model_card(output.name, replay, base, written)
            (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"cannot write output {str(output)!r}: {error.strerror or error}; nothing was left "
            "there"
        ) from error
    return written


def _model_card(title: str, replay: Replay, base: tuple[str, str], written: Written) -> str:
    """Where the weights come from, how they did and how to load them, as the Hub reads it."""
    what = (
        f"The centre of a population after {plural(replay.generation, 'generation')} of evolution "
        f"strategies, as {written.kind}. It was rebuilt from the base model and the run's history"
    )
    fingerprint = replay.fingerprint
    facts = {
        "generations": str(replay.generation),
        "fingerprint": "none: it is the base" if fingerprint is None else f"{fingerprint:016x}",
        "base model": replay.model_name,
        "base weights": base[0],
        "base tokenizer": base[1],
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
        f"## How to load it\n\n{_MOVED}",
        *(f"{note[0].upper()}{note[1:]}." for note in written.notes),
        *(lines.as_markdown() for lines in written.loading),
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
    # The Hub refuses a base model that is no name on it.
    if (repository := hub_repository(model_name)) is not None:
        lines += [f"base_model: {repository}", f"base_model_relation: {written.relation}"]
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
