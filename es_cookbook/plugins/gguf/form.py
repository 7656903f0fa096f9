"""Exports as GGUF files: the centre as one file for llama.cpp, an adapter merged."""

import dataclasses
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.gguf.conversion import SUFFIX, FloatType
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
        from es_cookbook.checkpoints.tensors import dtype_name
        from es_cookbook.plugins.gguf.export import write_gguf

        if centre.rank is not None:
            raise ConfigError("a GGUF file holds the whole model: leave rank out with form=gguf")
        replay, final = centre.replay, final.resolve()
        bfloat16 = dtype_name(replay.dtype) == "bfloat16"
        matrices = self.matrices or ("bfloat16" if bfloat16 else "float16")
        name = f"{final.name}{SUFFIX}"
        with tempfile.TemporaryDirectory(dir=final.parent) as beside:
            written = dataclasses.replace(centre, merge=True).write(Path(beside), None)
            write_gguf(Path(beside), directory / name, matrices, replay.model_name)
        command = ["llama-cli", "--model", str(final / name), "--prompt", "1 + 1 =", "--predict"]
        return dataclasses.replace(
            written,
            kind=f"a GGUF file, its matrices {matrices}",
            library="gguf",
            loading=(Lines("llama.cpp", "bash", shlex.join([*command, "16"])),),
        )
