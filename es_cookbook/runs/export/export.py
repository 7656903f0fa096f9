"""A run's centre as files that other libraries load, rebuilt from base model and history.

A run that moves the model's own weights becomes a Hugging Face model directory; a run over adapters
becomes a PEFT adapter, or with merge=true a model directory with the adapter merged. With rank=r
the first kind becomes a PEFT adapter too: the nearest of that rank to the change, weight by weight,
and the export tells its error.

The run directory is only read. The fingerprint of the centre must be the recorded one. `output`
appears when it is complete, and memory holds one tensor at a time.
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
from es_cookbook.runs.tracking.jsonl import read_metrics, result_of

_MOVED = "Paths are those of the export; if it has been moved, put its new place there."


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
    """Return a model card for the Hub: origin of the weights, loading code, and results."""
    what = (
        f"The centre of a population after {plural(replay.generation, 'generation')} of evolution "
        f"strategies, as {written.kind}. It was rebuilt from the base model and the run's history"
    )
    fingerprint = replay.fingerprint
    facts = {
        "generations": str(replay.generation),
        "fingerprint": "none: it is the start" if fingerprint is None else f"{fingerprint:016x}",
        "base model": replay.model_name,
        "base weights": base[0],
        "base tokenizer": base[1],
        "search space": type(replay.search_space).__name__,
        "sampled in": dtype_name(replay.dtype),
        "es_cookbook": es_cookbook.__version__,
    }
    try:
        log_path = replay.history.parent
        rows = read_metrics(log_path / METRICS)
        rows = [row for row in rows if row.get(GENERATION, math.nan) <= replay.generation]
        how = f"From the start to this centre: {result_of(log_path, rows).gain()}."
    except HistoryError:  # The weights do not depend on it.
        how = "The metrics of the run cannot be read: their file is damaged."
    parts = [
        _front_matter(replay.model_name, written),
        f"# {title}",
        what + (", and has the fingerprint that the run recorded." if replay.steps else "."),
        markdown(("", ""), [(label, f"`{value}`") for label, value in facts.items()]),
        f"## How to load it\n\n{_MOVED}",
        *(f"{note[0].upper()}{note[1:]}." for note in (*written.said, *written.notes)),
        *(lines.as_markdown() for lines in written.loading),
        f"## How it did\n\n{how}",
    ]
    config = json.dumps(replay.config, indent=2, ensure_ascii=False)
    parts.append(f"## Config\n\n```json\n{config}\n```")
    return "\n\n".join(parts) + "\n"


def _front_matter(model_name: str, written: Written) -> str:
    lines = [f"library_name: {written.library}", "pipeline_tag: text-generation"]
    lines += ["tags:", "- es_cookbook", "- evolution-strategies"]
    # The Hub refuses a base model that is not a name on it.
    if (repository := hub_repository(model_name)) is not None:
        lines += [f"base_model: {repository}", f"base_model_relation: {written.relation}"]
    return "\n".join(["---", *lines, "---"])
