"""Exports for programs on llama.cpp: a GGUF adapter, and a Modelfile by which Ollama serves it."""

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.errors import ModelError
from es_cookbook.plugins.gguf.conversion import SUFFIX, gguf_file
from es_cookbook.plugins.gguf.form import GGUF
from es_cookbook.runs.export.loading import Lines

if TYPE_CHECKING:  # Options do without torch.
    from es_cookbook.runs.export.forms import CentreFiles, Written

MODELFILE = "Modelfile"


@chz.chz
class GGUFAdapter(GGUF):
    """A GGUF adapter, or with merge=true a whole model, and a Modelfile for Ollama beside it."""

    @override
    def __call__(self, centre: "CentreFiles", directory: Path, final: Path) -> "Written":
        """Write the file as form=gguf does, and the Modelfile.

        Raises:
            ModelError: The run has no adapter, and neither `rank` nor `merge` is given.
        """
        is_adapter = centre.rank is not None or centre.replay.space.adapter is not None
        if not (is_adapter or centre.merge):
            raise ModelError(
                "form=gguf_adapter: this run moves the model's own weights, and has no adapter; "
                "rank=8 writes the nearest one, merge=true a whole model"
            )
        written, final = super().__call__(centre, directory, final), final.resolve()
        lines = [f"FROM ./{final.name}{SUFFIX}"]
        if written.relation == "adapter":
            base = gguf_file(centre.replay.model_name)
            whole = f"./{final.name}-base{SUFFIX}" if base is None else str(base.resolve())
            lines = [f"FROM {whole}", f"ADAPTER ./{final.name}{SUFFIX}"]
        (directory / MODELFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        create = ["ollama", "create", final.name, "-f", str(final / MODELFILE)]
        ollama = f"{shlex.join(create)}\n{shlex.join(['ollama', 'run', final.name, '1 + 1 ='])}"
        return dataclasses.replace(
            written, loading=(*written.loading, Lines("Ollama", "bash", ollama))
        )
