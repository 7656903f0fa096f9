"""Exports that llama.cpp and Ollama run: an adapter, and the Modelfile beside it."""

from pathlib import Path

import pytest

from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.common.errors import ModelError
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.gguf.export import write_gguf
from es_cookbook.plugins.llama_cpp.form import GGUFAdapter
from tests.gguf_models import make_gguf_model
from tests.runs.recorded_run import record_run


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model, base = make_gguf_model("llama", tmp_path / "llama"), tmp_path / "base.gguf"
    write_gguf(model, base, "float16", str(model))
    return base


def test_a_modelfile_adds_the_adapter_to_the_file_of_the_run(tmp_path: Path, base: Path) -> None:
    run = record_run(tmp_path / "run", base, Adapter(rank=2))
    config = ExportConfig(log_path=str(run.path), output=str(tmp_path / "mine"), form=GGUFAdapter())
    export(config)
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        *("mine.gguf", "Modelfile", "README.md")
    }
    text = (tmp_path / "mine/Modelfile").read_text()
    assert text == f"FROM {base}\nADAPTER ./mine.gguf\n"
    card = (tmp_path / "mine/README.md").read_text()
    assert f"ollama create mine -f {tmp_path / 'mine/Modelfile'}\nollama run mine" in card


def test_a_merged_model_has_a_modelfile_too_and_a_run_without_an_adapter_is_told_of_it(
    tmp_path: Path, base: Path
) -> None:
    run = record_run(tmp_path / "run", base, LowRank())
    into = {"log_path": str(run.path), "output": str(tmp_path / "mine"), "form": GGUFAdapter()}
    with pytest.raises(ModelError, match="rank=8 writes the nearest one, merge=true a whole"):
        export(ExportConfig(**into))
    export(ExportConfig(**into, merge=True))
    assert (tmp_path / "mine/Modelfile").read_text() == "FROM ./mine.gguf\n"
