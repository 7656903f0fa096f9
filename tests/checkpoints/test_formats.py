"""Formats of model files, quantisations and forms of export that other distributions register."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from es_cookbook.checkpoints.model_files import base_identity, hub_repository, model_directory
from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import as_program
from tests.distributions import Register

CPU = torch.device("cpu")
SHELF = """
from pathlib import Path
from es_cookbook.checkpoints.model_files import Format

class Shelf(Format):
    accepted = "a model on the shelf (shelf:NAME)"

    def directory(self, model_name, part):
        shelf, _, name = model_name.partition(":")
        return Path(__file__).with_name(name) if shelf == "shelf" else None
"""


def test_a_name_of_a_registered_format_is_a_model(
    register: Register, tiny_model: Callable[[str], Path]
) -> None:
    folder = register({"formats": {"shelf": "shelf:Shelf"}})
    (folder / "shelf.py").write_text(SHELF)
    (folder / "qwen2").symlink_to(tiny_model("qwen2"))
    assert model_directory("shelf:qwen2") == folder / "qwen2"
    assert base_identity("shelf:qwen2") == base_identity(str(tiny_model("qwen2")))
    said = r"run \(.*\), a model on the shelf \(shelf:NAME\)$"
    with pytest.raises(ModelError, match=said):
        model_directory("no-such:model")


def test_an_unusable_format_is_reported_once_and_others_are_read(
    register: Register, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = register({"formats": {"gguf": "shelf:Shelf", "gone": "gone:Gone", "my": "my:Shelf"}})
    (folder / "my.py").write_text(SHELF)
    (folder / "qwen2").symlink_to(tiny_model("qwen2"))
    with as_program():
        for _ in range(2):
            assert model_directory("shelf:qwen2") == folder / "qwen2"
            with pytest.raises(ModelError, match="is not a model directory"):
                model_directory("no-such:model")
    said = capsys.readouterr().err
    assert said.count("format gguf is not used: format 'gguf' is registered by other 1.0 and") == 1
    assert said.count("format gone is not used: gone:Gone cannot be imported") == 1
    assert "(of other 1.0)" in said


def test_repositories_are_distinguished_from_local_paths(tmp_path: Path) -> None:
    assert hub_repository("owner/name") == hub_repository("owner/name:file.gguf") == "owner/name"
    assert hub_repository("gpt2") == "gpt2"
    assert hub_repository(str(tmp_path)) is None
    assert hub_repository("runs/mine@12") is None
