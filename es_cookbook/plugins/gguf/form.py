"""Exports as GGUF files: a model as one file, an adapter as one that llama.cpp adds to its base."""

import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.plugins.gguf.conversion import SUFFIX, FloatType, gguf_file
from es_cookbook.runs.export.base import ExportForm
from es_cookbook.runs.export.loading import Lines

if TYPE_CHECKING:  # Options do without torch.
    from es_cookbook.runs.export.forms import CentreFiles, Written


@chz.chz
class GGUF(ExportForm):
    """One file for llama.cpp, in a directory."""

    matrices: FloatType | None = chz.field(
        default=None, doc="type of the matrices; None: the model's dtype, float16 for float32"
    )

    @override
    def __call__(self, centre: "CentreFiles", directory: Path, final: Path) -> "Written":
        """Write the file, and that of an adapter's base unless the run began from one."""
        from es_cookbook.checkpoints.tensors import dtype_name
        from es_cookbook.plugins.gguf.export import config_of, write_gguf, write_gguf_adapter
        from es_cookbook.runs.export.forms import plain_base

        replay, final = centre.replay, final.resolve()
        config_of(model_directory(replay.model_name))  # Refused before the centre is rebuilt.
        bfloat16 = dtype_name(replay.dtype) == "bfloat16"
        matrices = self.matrices or ("bfloat16" if bfloat16 else "float16")
        name = f"{final.name}{SUFFIX}"
        kind, models = f"a GGUF file, its matrices {matrices}", ["--model", str(final / name)]
        with tempfile.TemporaryDirectory(dir=final.parent) as beside:
            written = centre.write(Path(beside), None)
            notes = written.notes
            if written.library != "peft":
                write_gguf(Path(beside), directory / name, matrices, replay.model_name)
            else:
                write_gguf_adapter(Path(beside), directory / name, replay.model_name)
                base = gguf_file(replay.model_name)
                if base is None:
                    base = final / f"{final.name}-base{SUFFIX}"
                    plain = plain_base(replay, Path(beside))
                    write_gguf(plain, directory / base.name, matrices, replay.model_name)
                    notes = (*notes, f"its base is beside it: {base}")
                kind = f"{written.kind}, as a GGUF file"
                models = ["--model", str(base.resolve()), "--lora", str(final / name)]
        command = ["llama-cli", *models, "--prompt", "1 + 1 =", "--predict", "16"]
        loading = (Lines("llama.cpp", "bash", shlex.join(command)),)
        return dataclasses.replace(written, kind=kind, library="gguf", loading=loading, notes=notes)
