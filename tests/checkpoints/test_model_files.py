"""A Hub name is a directory of the cache, fetched once; a sentence where it cannot be had."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from es_cookbook import LowRank, RayPoolBuilder, TorchEngineBuilder, VLLMEngineBuilder
from es_cookbook.checkpoints import model_files
from es_cookbook.checkpoints.models import load_architecture, load_causal_lm, load_tokenizer
from es_cookbook.common.errors import ModelError
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from tests.hub_server import TOKEN, HubServer, Repository

NAME = "some/model"


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    hub.lead_here(monkeypatch, cache=tmp_path / "cache")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture
def served(hub: HubServer, tiny_model: Callable[[str], Path]) -> Repository:
    return hub.serve(NAME, tiny_model("qwen2"))


def test_a_name_is_fetched_loaded_and_then_needs_no_hub(
    hub: HubServer, served: Repository, tiny_model: Callable[[str], Path]
) -> None:
    own = str(tiny_model("qwen2"))
    assert load_tokenizer(NAME).get_vocab() == load_tokenizer(own).get_vocab()
    assert not any("model.safetensors" in request for request in hub.requests), "not needed yet"
    model = load_causal_lm(NAME, "auto", torch.device("cpu"))
    expected = load_causal_lm(own, "auto", torch.device("cpu")).state_dict()
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
    assert model.name_or_path == model.config.name_or_path == NAME, "as it was given"
    hub.requests.clear()
    hub.hang = 600
    assert model_files.base_identity(NAME) == model_files.base_identity(own)
    load_tokenizer(NAME)
    load_architecture(NAME)
    assert model_files.find_file(NAME, "no.json") is None
    assert hub.requests == []


@pytest.mark.parametrize("name", ["../other.safetensors", "{folder}/other.safetensors"])
def test_an_index_names_files_of_its_model_alone(tmp_path: Path, name: str) -> None:
    save_file({}, tmp_path / "other.safetensors", {"format": "pt"})
    model = tmp_path / "model"
    model.mkdir()
    index = {"weight_map": {"a": name.format(folder=tmp_path)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="which is outside of the model"):
        model_files.weight_paths(str(model))


def test_a_model_that_cannot_be_fetched_is_one_sentence(hub: HubServer, tmp_path: Path) -> None:
    hub.fail_with = 500
    with pytest.raises(ModelError) as caught:
        load_tokenizer(NAME)
    assert str(caught.value) == (
        f"model_name: '{NAME}' is not a directory, its files are not all in the cache "
        f"({tmp_path / 'cache'}), and {hub.url} answered with status 500"
    )
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"weights.gguf": b""}, "has no config.json on http://.*, so it is not a model for"),
        ({"config.json": b"{}"}, "has no weights: none of model.safetensors, "),
    ],
)
def test_a_repository_that_is_no_model_is_one_sentence(
    hub: HubServer, files: dict[str, bytes], sentence: str
) -> None:
    hub.repositories[NAME] = Repository(False, files)
    with pytest.raises(ModelError, match=f"model_name: '{NAME}' {sentence}"):
        load_causal_lm(NAME, "auto", torch.device("cpu"))


@pytest.mark.parametrize(
    "builder", [VLLMEngineBuilder(), RayPoolBuilder(engine=TorchEngineBuilder())]
)
async def test_no_engine_starts_a_process_for_a_name_that_cannot_be_had(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, builder: VLLMEngineBuilder | RayPoolBuilder
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr("es_cookbook.engines.ray.cluster.Cluster.connect", start)
    monkeypatch.setitem(sys.modules, "vllm", None)  # Whoever imports it meets an error.
    with pytest.raises(ModelError, match="has no model no/such, or it is private"):
        await builder(model_name="no/such", search_space=LowRank())
    assert len(hub.requests) == 1


@pytest.mark.parametrize("name", ["a" * 5000, f"{'a' * 5000}@3", f"/{'a' * 5000}", "a\0b", "@"])
def test_a_name_that_can_be_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"is not a model directory|there is no directory"):
        model_files.model_directory(name)


def test_an_adapter_or_a_file_as_a_model_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')
    said = rf"is a PEFT adapter, .*: model_name=BASE .* search_space\.start={tmp_path}/sft, where"
    with pytest.raises(ModelError, match=said):
        model_files.model_directory(str(tmp_path / "sft"))
    for name, what in (("a.safetensors", "a file"), ("notes.txt", "a file")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ModelError, match=f"{name}' is {what}, not a model; accepted: a dir"):
            model_files.model_directory(str(tmp_path / name))


def test_the_model_of_a_recipe_has_a_name() -> None:
    assert model_files.model_directory("bundled:countdown") == BUNDLED_MODEL
    assert model_files.model_directory("bundled:markovian").parent.name == "markovian"
    for name, said in (
        ("chat", "no recipe 'chat' brings a model: "),
        ("countdwn", "did you mean 'countdown'?"),
        ("../countdown", "no recipe '../countdown' brings a model"),
        ("", "no recipe '' brings a model"),
    ):
        with pytest.raises(ModelError, match=re.escape(said)):
            model_files.model_directory(f"bundled:{name}")
