"""Files of a model or an adapter that somebody else made: a sentence, no library's traceback."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from es_cookbook.checkpoints.model_files import copy_file, model_directory
from es_cookbook.checkpoints.models import end_of_sequence_ids, load_tokenizer
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.common.errors import ModelError
from tests.tiny_run import write_tiny_model

PLAIN = {"r": 1, "lora_alpha": 1.0}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (json.dumps({"lora_alpha": 1.0}), "r must be a number above 0, found None"),
        (json.dumps(PLAIN | {"r": "x"}), "r must be a number above 0, found 'x'"),
        (json.dumps(PLAIN | {"r": 10**30}), "r must be a number above 0, found 1000000"),
        (json.dumps(PLAIN | {"lora_alpha": [1]}), "lora_alpha must be a number above 0"),
        (json.dumps(PLAIN | {"target_parameters": 3}), "target_parameters must be names, found 3"),
        ("[]", r"must be an object, found \[\]"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5_000, "digits"),
        (json.dumps(PLAIN), "adapter_model.safetensors' holds no tensors"),
    ],
)
def test_an_adapter_that_is_none_is_refused_by_its_field(
    tmp_path: Path, config: str, said: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=said):
        read_adapter(tmp_path, {"a.weight": (2, 2)})


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_as_an_adapter_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="it must be a regular file"):
        read_adapter(tmp_path, {"a.weight": (2, 2)})


@pytest.mark.parametrize("ids", ["x", [[1]], 10**30, -1, True, {"a": 1}, 2.0])
def test_tokens_that_are_none_are_refused(ids: object) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids), config=None)
    with pytest.raises(ModelError, match="eos_token_id must be the number of a token"):
        end_of_sequence_ids(cast("Any", model), cast("Any", None))


def test_a_tokenizer_with_values_of_other_types_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "a"}))
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_pipe_in_a_model_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be opened: it must be"):
        model_directory(str(tmp_path))


def test_links_inside_of_the_hubs_cache_are_copied_and_links_out_of_a_model_are_not(
    tmp_path: Path,
) -> None:
    blobs, snapshot = tmp_path / "models--me--a/blobs", tmp_path / "models--me--a/snapshots/1"
    for folder in (blobs, snapshot, tmp_path / "export"):
        folder.mkdir(parents=True)
    (blobs / "0").write_text("terms")
    (snapshot / "LICENSE").symlink_to("../../blobs/0")
    copy_file(snapshot / "LICENSE", tmp_path / "export")
    assert (tmp_path / "export/LICENSE").read_text() == "terms"
    assert not (tmp_path / "export/LICENSE").is_symlink()
    (tmp_path / "secret").write_text("key")
    (snapshot / "NOTICE").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="is a link out of the model's directory"):
        copy_file(snapshot / "NOTICE", tmp_path / "export")
    assert not (tmp_path / "export/NOTICE").exists()
