"""Formats of model files, quantisations and forms of export that other distributions register."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from es_cookbook.checkpoints.model_files import base_identity, hub_repository, model_directory
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.checkpoints.quantised import quantised_layers
from es_cookbook.cli.export import ExportConfig, main
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.common.terminal import as_program
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.full_rank import FullRank
from tests.distributions import Register
from tests.runs.recorded_run import record_run

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
DOUBLED = '''
from pathlib import Path
import torch
from es_cookbook.checkpoints.model_files import weight_paths
from es_cookbook.checkpoints.quantised import QuantisedCheckpoint, QuantisedWeight
from es_cookbook.checkpoints.tensors import ReadTensors, weight_files

class Doubled(QuantisedWeight):
    """Stored as twice what it stands for."""

    bits, dtype, shape = 16, torch.float32, None

    def __init__(self, twice):
        self.twice, self.shape = twice, twice.shape

    def parameters(self):
        return {}

    def dequantised(self):
        return self.twice.float() / 2

    def moved(self, values):
        return self

    def to(self, device):
        return Doubled(self.twice.to(device))

class Checkpoint(QuantisedCheckpoint):
    packages = "other"

    def __init__(self, model_name, settings):
        self.files = weight_files(weight_paths(model_name))
        self.layers = tuple(name.removesuffix(".twice") for name in self.files if "twice" in name)

    def weight(self, layer):
        return Doubled(self.files[f"{layer}.twice"])

    def outline(self, layer):
        return Doubled(self.files[f"{layer}.twice"].to("meta"))

    def parameters(self):
        return ReadTensors((), self.files.__getitem__)

    def plain(self, names, dtype):
        def read(name):
            layer = name.removesuffix(".weight")
            if layer not in self.layers:
                return self.files[name]
            return self.weight(layer).dequantised().to(dtype)
        return ReadTensors({name.replace(".twice", ".weight") for name in names}, read)

    def write(self, directory, moved):
        raise NotImplementedError
'''
COUNTED = '''
import dataclasses
import tempfile
from pathlib import Path
import chz
from es_cookbook.runs.export.base import ExportForm

@chz.chz
class Counted(ExportForm):
    """Names of the files."""

    unit: str = chz.field(default="files", doc="what is counted")

    def __call__(self, centre, directory, final):
        with tempfile.TemporaryDirectory() as beside:
            written = centre.write(Path(beside), None)
            names = sorted(path.name for path in Path(beside).iterdir())
        (directory / "count.txt").write_text(f"{len(names)} {self.unit}: {names}")
        return dataclasses.replace(written, kind="a count", loading=())
'''


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


def test_a_format_that_cannot_be_used_is_told_once_and_all_else_is_read(
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


def test_a_repository_is_told_from_what_is_here(tmp_path: Path) -> None:
    assert hub_repository("owner/name") == hub_repository("owner/name:file.gguf") == "owner/name"
    assert hub_repository("gpt2") == "gpt2"
    assert hub_repository(str(tmp_path)) is None
    assert hub_repository("runs/mine@12") is None


def test_weights_of_a_registered_quantisation_are_held_and_exported_as_what_they_stand_for(
    register: Register, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = register({"quantisations": {"doubled": "doubled:Checkpoint"}})
    (folder / "doubled.py").write_text(DOUBLED)
    plain, model = tiny_model("llama"), tmp_path / "model"
    model.mkdir()
    for path in plain.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "doubled"}
    (model / "config.json").write_text(json.dumps(config))
    stored = load_file(plain / "model.safetensors")
    for name in [name for name in stored if "_proj" in name]:
        stored[name.replace(".weight", ".twice")] = 2 * stored.pop(name)
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    found, expected = (load_causal_lm(str(path), "auto", CPU) for path in (model, plain))
    quantised = {f"{layer}.weight" for layer, _ in quantised_layers(found)}
    assert len(quantised) == 2 * 7
    for name, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    with pytest.raises(ConfigError, match=r"_proj\.weight is quantised to 16 bits"):
        record_run(tmp_path / "no", model, FullRank(), ())
    run = record_run(tmp_path / "run", model, Adapter(rank=2, init="orthogonal"))
    run_cli(main, ExportConfig, [str(run.path), f"output={tmp_path / 'out'}", "merge=True"])
    merged = load_causal_lm(str(tmp_path / "out"), "auto", CPU)
    changed = {
        name
        for name, parameter in merged.named_parameters()
        if not torch.equal(parameter, expected.get_parameter(name))
    }
    assert changed == {*quantised, "lm_head.weight"}


def test_a_registered_form_of_export_has_options_of_its_own(
    register: Register, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = register({"exports": {"counted": "counted:Counted"}})
    (folder / "counted.py").write_text(COUNTED)
    run = record_run(tmp_path / "run", tiny_model("qwen2"), FullRank())
    output = tmp_path / "out"
    options = ["form=counted", "form.unit=things", f"output={output}"]
    run_cli(main, ExportConfig, [str(run.path), *options])
    assert "things: ['config.json'" in (output / "count.txt").read_text()
    assert "as a count" in (output / "README.md").read_text()
