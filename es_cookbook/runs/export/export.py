"""A run's centre as files that other libraries load, rebuilt from base model and history.

A run that moves the model's own weights becomes a Hugging Face model directory; a run over adapters
becomes a PEFT adapter, or with merge=true a model directory with the adapter merged. With rank=r
the first kind becomes a PEFT adapter too: the nearest of that rank to what the run changed, weight
by weight; the export says how near it is.

The run directory is read and never written. The centre's fingerprint has to be the recorded one.
Nothing stands under `output` before all of it is there, and memory holds a tensor at a time.
"""

from pathlib import Path
from typing import Literal

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import whole_directory
from es_cookbook.runs.export.forms import (
    Written,
    exact_rank,
    write_fitted_adapter,
    write_model,
    write_own_adapter,
)
from es_cookbook.runs.export.model_card import model_card
from es_cookbook.runs.replay import Replay


def write_export(
    replay: Replay,
    output: Path,
    *,
    merge: bool = False,
    rank: int | Literal["exact"] | None = None,
) -> Written:
    """Write a centre with its model card to `output`, which must not be there yet.

    With `merge`, the whole model of an adapter run, with the adapter merged; with `rank`, an
    adapter of this rank of a run that moves linear weights alone, or of the smallest one that holds
    all of what the run changed.

    Raises:
        HistoryError: The base is another than the run began with, or the rebuilt centre is not the
            recorded one.
        RunDirectoryError: The output cannot be written.
    """
    base = replay.check_base()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(output) as directory:
            written = _write(directory, replay, merge, rank)
            card = model_card(output.name, replay, base, written)
            (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"cannot write output {str(output)!r}: {error.strerror or error}; nothing was left "
            "there"
        ) from error
    return written


def _write(
    directory: Path, replay: Replay, merge: bool, rank: int | Literal["exact"] | None
) -> Written:
    if rank is not None:
        fitted = exact_rank(replay) if rank == "exact" else rank
        return write_fitted_adapter(directory, replay, fitted)
    if (adapter := replay.space.adapter) is not None and not merge:
        return write_own_adapter(directory, replay, adapter)
    return write_model(directory, replay)
