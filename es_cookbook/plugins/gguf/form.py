"""Exports as GGUF files: a model as one file, an adapter as one that llama.cpp adds to its base."""

import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.plugins.gguf.conversion import SUFFIX, FloatType
from es_cookbook.plugins.gguf.files import gguf_file
from es_cookbook.runs.export.base import ExportForm
from es_cookbook.runs.export.loading import Lines

if TYPE_CHECKING:  # Options do without torch.
    from es_cookbook.runs.centre.replay import Replay
    from es_cookbook.runs.export.forms import CentreFiles, Written


@chz.chz
class GGUF(ExportForm):
    """One file for llama.cpp, in a directory."""

    matrices: FloatType | None = chz.field(
        default=None, doc="type of the matrices; None: that of the model, float16 for float32"
    )

    @override
    def __call__(self, centre: "CentreFiles", directory: Path, final: Path) -> "Written":
        """Write the file, and that of an adapter's base unless the run began from one."""
        from es_cookbook.plugins.gguf.export import write_gguf, write_gguf_adapter

        replay, final = centre.replay, final.resolve()
        matrices, file = self._matrices_of(replay), directory / f"{final.name}{SUFFIX}"
        with tempfile.TemporaryDirectory(dir=final.parent) as beside:
            written = centre.write(Path(beside), None)
            if written.library != "peft":
                write_gguf(Path(beside), file, matrices, replay.model_name)
                kind = f"a GGUF file, its matrices {matrices}"
                loading = _llama_cpp(final / file.name)
                return dataclasses.replace(written, kind=kind, library="gguf", loading=loading)
            write_gguf_adapter(Path(beside), file, replay.model_name)
        notes = written.notes
        if (base := gguf_file(replay.model_name)) is None:
            base = file.with_name(f"{file.stem}-base{SUFFIX}")
            _write_base(base, replay, matrices)
            base = final / base.name
            notes = (*notes, f"its base is beside it: {base}")
        return dataclasses.replace(
            written,
            kind=f"{written.kind}, as a GGUF file",
            library="gguf",
            loading=_llama_cpp(final / file.name, base.resolve()),
            notes=notes,
        )

    def _matrices_of(self, replay: "Replay") -> FloatType:
        from es_cookbook.checkpoints.tensors import dtype_name

        bfloat16 = dtype_name(replay.dtype) == "bfloat16"
        return self.matrices or ("bfloat16" if bfloat16 else "float16")


def _write_base(file: Path, replay: "Replay", matrices: FloatType) -> None:
    from es_cookbook.plugins.gguf.export import write_gguf
    from es_cookbook.runs.export.forms import plain_base

    with tempfile.TemporaryDirectory(dir=file.parent) as beside:
        write_gguf(plain_base(replay, Path(beside)), file, matrices, replay.model_name)


def _llama_cpp(file: Path, base: Path | None = None) -> tuple[Lines, ...]:
    """What runs a GGUF file, or one of an adapter on its base."""
    names = ["--model", file] if base is None else ["--model", base, "--lora", file]
    command = ["llama-cli", *map(str, names), "--prompt", "1 + 1 =", "--predict", "16"]
    return (Lines("llama.cpp", "bash", shlex.join(command)),)
