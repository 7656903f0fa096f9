"""The notebooks are stored without outputs, and run from top to bottom."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.provisioning import local_provisioner
from nbclient import NotebookClient

from tests.families import sampled
from tests.programs import Programs

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "recipes/notebooks").glob("*.ipynb"))
SHORT = "num_generations = 1"
"""What a reader in a hurry would change in the cell of settings."""
ENDS = {
    "first_run.ipynb": "finished  held-out correct",
    "custom_reward_and_env.ipynb": "[(0, ",
    "reading_a_run.ipynb": "0 centre ",
    "gpu_countdown.ipynb": "exported the centre after 1 generation",
}
"""Notebook -> what its last cells show."""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def shown(notebook: Any) -> str:
    """Return all text below the cells."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = [output.get("text") or output["data"].get("text/plain", "") for output in outputs]
    return "\n".join(texts)


def test_there_is_a_notebook_for_every_end() -> None:
    assert {path.name for path in NOTEBOOKS} == set(ENDS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert notebook.cells[0].cell_type == "markdown"
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1, "one cell has the settings"


class Kernel(psutil.Process):
    """What Jupyter asks of the `Popen` of a kernel, of one that others have forked."""

    stdin = stdout = stderr = None

    def poll(self) -> int | None:
        return None if self.is_running() else 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sampled(NOTEBOOKS, 2), ids=lambda path: path.name)
def test_a_notebook_runs_on_a_cpu(
    path: Path, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = read(path)
    tags = [cell.metadata.get("tags", ()) for cell in notebook.cells]
    place = next(i for i, of_cell in enumerate(tags) if "parameters" in of_cell)
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(SHORT))
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=300, resources=where, shutdown_kernel="immediate")

    def launch(command: Sequence[str], cwd: str, **_: object) -> Kernel:
        module, no_gpu = command[command.index("-m") :], {"CUDA_VISIBLE_DEVICES": ""}
        return Kernel(programs.start(module, [os.devnull] * 3, Path(cwd), no_gpu))

    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a kernel has its own
    client.execute()
    programs.exit_code()
    text = shown(notebook)
    assert ENDS[path.name] in text and "unknown option" not in text
    # A line a generation, and none that is drawn again: a notebook is no terminal.
    assert "generation 1/1  reward" in text
    assert re.findall(r"[\x00-\x08\x0b-\x1f]", text.replace("\r\n", "\n")) == []
