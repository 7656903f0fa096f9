"""A run's centre as files that other libraries load, rebuilt from base model and history.

A run that moves the model's own weights gives a Hugging Face model directory; a run over adapters
gives a PEFT adapter, or with merge=true a model directory with the adapter merged. With rank=r the
first kind gives a PEFT adapter too: the nearest of that rank to what the run changed, weight by
weight, and says how near that is.

The run directory is read and never written. The centre's fingerprint has to be the recorded one.
Nothing stands under `output` before all of it is there, and memory
holds a tensor at a time.
"""

from collections.abc import Sequence
from pathlib import Path

import es_cookbook
from es_cookbook.checkpoints.models import BaseIdentity
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import whole_directory
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.export.forms import (
    Written,
    write_fitted_adapter,
    write_model,
    write_own_adapter,
)
from es_cookbook.runs.export.model_card import model_card
from es_cookbook.runs.replay import Replay


def write_export(
    replay: Replay, output: Path, *, merge: bool = False, rank: int | None = None
) -> Written:
    """Write a centre with its model card.

    Args:
        replay: the centre.
        output: directory to make; it must not be there yet.
        merge: of an adapter run: write the whole model, with the adapter merged.
        rank: of a run that moves linear weights alone: write an adapter of this rank.

    Returns:
        What came out.

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
            card = _card(output.name, replay, base, written)
            (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"cannot write output {str(output)!r}: {error.strerror or error}; nothing was left "
            "there"
        ) from error
    return written


def _write(directory: Path, replay: Replay, merge: bool, rank: int | None) -> Written:
    if rank is not None:
        return write_fitted_adapter(directory, replay, rank)
    if (adapter := replay.space.adapter) is not None and not merge:
        return write_own_adapter(directory, replay, adapter)
    return write_model(directory, replay)


def _card(title: str, replay: Replay, base: BaseIdentity, written: Written) -> str:
    """The README.md."""
    front_matter: dict[str, str | Sequence[str]] = {
        "library_name": written.library,
        "pipeline_tag": "text-generation",
        "tags": ["es_cookbook", "evolution-strategies"],
    }
    if not Path(replay.model_name).is_dir():  # The Hub refuses a base model that is no name on it.
        front_matter["base_model"] = replay.model_name
        front_matter["base_model_relation"] = written.relation
    fingerprint = replay.fingerprint
    return model_card(
        title=title,
        front_matter=front_matter,
        what=(
            f"The centre of a population after {replay.generation} generations of evolution "
            f"strategies, as {written.kind}. It was rebuilt from the base model and the run's "
            "history"
            + (", and has the fingerprint that the run recorded." if replay.steps else ".")
        ),
        facts={
            "generations": str(replay.generation),
            "fingerprint": "none: it is the base" if fingerprint is None else f"{fingerprint:016x}",
            "base model": replay.model_name,
            "base weights": base.weights,
            "base tokenizer": base.tokenizer,
            "search space": type(replay.config.search_space).__name__,
            "sampled in": dtype_name(replay.dtype),
            "es_cookbook": es_cookbook.__version__,
        },
        loading=written.loading,
        metrics_path=replay.history.with_name(METRICS),
        generation=replay.generation,
        config_json=config_to_json(replay.config),
        errors=written.errors,
    )
