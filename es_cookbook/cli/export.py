"""Write a run's centre as files that other programs load.

    python -m es_cookbook export runs/mine output=exported
    python -m es_cookbook export runs/mine generation=20 output=exported
    python -m es_cookbook export runs/mine rank=8 output=adapter
    python -m es_cookbook export runs/mine rank=exact output=adapter
    python -m es_cookbook export runs/mine form=gguf form.matrices=q8_0 output=mine

The run directory is only read, and the run may be in progress.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import chz

from es_cookbook.cli.options import RecordedAt, new_output
from es_cookbook.common.checks import in_range
from es_cookbook.common.cli import run_cli, sigterm_interrupts
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.names import Names
from es_cookbook.common.terminal import plural, say
from es_cookbook.runs.export.base import EXPORT_FORMS, ExportForm

if TYPE_CHECKING:
    from es_cookbook.runs.centre.replay import Replay


@chz.chz
class ExportConfig(RecordedAt):
    """Write a run's centre as a Hugging Face model directory, a PEFT adapter or another form."""

    output: str = chz.field(doc="directory to create; must not exist")
    merge: bool = chz.field(
        default=False,
        doc="write the whole model in plain numbers: of adapter runs with the adapter merged, of "
        "steering with the vectors as biases, of quant_scales and quant_codes dequantised",
    )
    rank: int | Literal["exact"] | None = chz.field(
        default=None,
        doc="low-rank and full-rank runs: write an adapter of this rank, an approximation; exact: "
        "of the rank that holds the whole change",
    )
    form: ExportForm = Names(EXPORT_FORMS, default="transformers").field(
        "files that are written: a directory for transformers, PEFT and vLLM, or another form"
    )

    _rank = in_range("rank", at_least=1, at_most=2**16)


def export(config: ExportConfig) -> str:
    """Write the export, and return a message about it.

    Raises:
        ConfigError: The output is there already, or these options do not go with this run.
        ModelError: The base cannot be found or read.
        HistoryError: There is no such generation, the base is another than the run began with, or
            the rebuilt centre is not the recorded one.
        RunDirectoryError: There is no such run, or the output cannot be written.
    """
    output = new_output(config.output)
    say(f"{config.log_path}: rebuilding its centre for {output}")
    # torch, which the options do without.
    from es_cookbook.runs.centre.replay import open_replay
    from es_cookbook.runs.export.export import write_export

    replay = open_replay(
        Path(config.log_path), config.generation, model_name=config.model_name, trust=config.trust
    )
    _check_options(config, replay)
    written = write_export(replay, output, merge=config.merge, rank=config.rank, form=config.form)
    said = [*written.said, *written.notes]
    space = replay.space
    is_own = space.adapter is None and space.vectors is None
    if config.merge and is_own and not replay.search_space.moves_quantised:
        said.append("merge=true changes nothing: this run moves the model's own weights")
    which = "the start" if replay.fingerprint is None else f"fingerprint {replay.fingerprint:016x}"
    what = f"the centre after {plural(replay.generation, 'generation')} ({which})"
    return "\n".join([*said, f"exported {what} as {written.kind}: {output}"])


def _check_options(config: ExportConfig, replay: "Replay") -> None:
    if config.rank is None or replay.space.vectors is not None:
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


def main(config: ExportConfig) -> None:
    """Export, and print what was written.

    Raises:
        KeyboardInterrupt: It was stopped; there is no output.
    """
    try:
        with sigterm_interrupts():
            said = export(config)
    except KeyboardInterrupt:
        again = "nothing was written, so run the same command again"
        raise KeyboardInterrupt(f"interrupted; {again}") from None
    print(said)


def cli() -> None:
    run_cli(main, ExportConfig)
