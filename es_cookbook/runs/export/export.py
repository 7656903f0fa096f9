"""A run's centre as files that other libraries load, rebuilt from base model and history.

A run that moves the model's own weights gives a Hugging Face model directory; a run over adapters
gives a PEFT adapter, or with merge=true a model directory with the adapter merged. With rank=r the
first kind gives a PEFT adapter too: the nearest of that rank to what the run changed, weight by
weight, and says how near that is.

The run directory is read and never written, and the run may be going on. The centre's fingerprint
has to be the recorded one. Nothing stands under `output` before all of it is there, and memory
holds a tensor at a time.
"""

from collections.abc import Sequence
from pathlib import Path

import chz

import es_cookbook
from es_cookbook.checkpoints.models import BaseIdentity
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, ModelError, RunDirectoryError
from es_cookbook.common.files import whole_directory
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.export.forms import (
    Written,
    write_fitted_adapter,
    write_model,
    write_own_adapter,
)
from es_cookbook.runs.export.model_card import model_card
from es_cookbook.runs.replay import Replay, open_replay


@chz.chz
class ExportConfig:
    """Write a run's centre as a Hugging Face model directory or a PEFT adapter."""

    log_path: str = chz.field(doc="run directory; it is only read")
    output: str = chz.field(doc="directory to make; it must not be there yet")
    generation: int | None = chz.field(
        default=None, doc="the centre after so many generations, 0 is the base; all if unset"
    )
    merge: bool = chz.field(
        default=False, doc="of an adapter run: write the whole model, with the adapter merged"
    )
    rank: int | None = chz.field(
        default=None,
        doc="of a low-rank or full-rank run: write an adapter of this rank, an approximation",
    )
    model_name: str | None = chz.field(
        default=None, doc="where the base model is now, if not where it was"
    )

    @chz.validate
    def _ranges(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"rank must be at least 1, found {self.rank}")
        if self.generation is not None and self.generation < 0:
            raise ConfigError(f"generation must be 0 or more, found {self.generation}")


def export(config: ExportConfig) -> str:
    """Write the export; gives what is to be said about it.

    Raises:
        ConfigError: The output is there already, or these options do not go with this run.
        ModelError: The base cannot be found or read.
        HistoryError: There is no such generation, the base is another than the run began with, or
            the rebuilt centre is not the recorded one.
        RunDirectoryError: There is no such run, or the output cannot be written.
    """
    output = Path(config.output)
    if output.exists() or output.is_symlink():
        raise ConfigError(f"output {str(output)!r} is there already; give another one")
    try:
        replay = open_replay(Path(config.log_path), config.generation, model_name=config.model_name)
    except ModelError as error:
        if config.model_name is not None:
            raise
        raise ModelError(
            f"{error}; if the base has moved, give model_name=its new place"
        ) from error
    _check_options(config, replay)
    base = replay.check_base()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_directory(output) as directory:
            written = _write(directory, config, replay)
            card = _card(config, replay, base, written)
            (directory / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"cannot write output {str(output)!r}: {error.strerror or error}; nothing was left "
            "there"
        ) from error
    said = list(written.said)
    if config.merge and replay.space.adapter is None:
        said.append("merge=true changes nothing: this run moves the model's own weights")
    which = "the base" if replay.fingerprint is None else f"fingerprint {replay.fingerprint:016x}"
    said.append(
        f"exported the centre after {replay.generation} generations ({which}) as {written.kind}: "
        f"{output}"
    )
    return "\n".join(said)


def _write(directory: Path, config: ExportConfig, replay: Replay) -> Written:
    if config.rank is not None:
        return write_fitted_adapter(directory, replay, config.rank)
    if (adapter := replay.space.adapter) is not None and not config.merge:
        return write_own_adapter(directory, replay, adapter)
    return write_model(directory, replay)


def _check_options(config: ExportConfig, replay: Replay) -> None:
    if config.rank is None:
        return
    if config.merge:
        raise ConfigError("rank gives an adapter and merge=true a whole model; give one of them")
    if (adapter := replay.space.adapter) is not None:
        raise ConfigError(
            f"rank={config.rank} is for runs that move whole weights; this run's adapter has rank "
            f"{adapter.lora.rank} and is written as it is without it"
        )
    kinds = {info.name: info.kind for info in replay.infos}
    if others := [name for name in replay.space.shapes if kinds[name] != "linear"]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"rank={config.rank}: an adapter holds changes of linear weights only, and this run "
            f"also moves {', '.join(others[:3])}{more}; leave rank out for a whole model"
        )


def _card(config: ExportConfig, replay: Replay, base: BaseIdentity, written: Written) -> str:
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
        title=Path(config.output).name,
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
        metrics_path=Path(config.log_path) / METRICS,
        generation=replay.generation,
        config_json=config_to_json(replay.config),
        errors=written.errors,
    )
