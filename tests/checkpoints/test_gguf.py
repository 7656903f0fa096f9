"""A GGUF file is a model like any other: converted once, written again, and refused if broken."""

import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from es_cookbook.checkpoints import gguf as reading
from es_cookbook.checkpoints.gguf import FloatType, converted, read_header
from es_cookbook.checkpoints.gguf_export import write_gguf
from es_cookbook.checkpoints.identity import base_identity
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.checkpoints.models import end_of_sequence_ids, load_causal_lm, load_tokenizer
from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import as_program
from tests.gguf_models import CHAT_TEMPLATE, MODELS, TEXT, make_gguf_model
from tests.hub_server import HubServer, Repository
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(reading.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache/gguf"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf")
    return write(make_gguf_model("llama", path / "llama"), path / "llama.gguf").read_bytes()


@pytest.fixture
def file(llama: bytes, tmp_path: Path) -> Path:
    """A small file of a Llama."""
    (tmp_path / "llama.gguf").write_bytes(llama)
    return tmp_path / "llama.gguf"


def write(directory: Path, file: Path, matrices: FloatType = "float16") -> Path:
    write_gguf(directory, file, matrices, str(directory))
    return file


def greedy(model_name: Path) -> list[int]:
    model = load_causal_lm(str(model_name), "float32", CPU)
    tokens = torch.tensor([load_tokenizer(str(model_name)).encode(TEXT)])
    return model.generate(tokens, max_new_tokens=24, do_sample=False)[0].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    directory = make_gguf_model(name, tmp_path / "model")
    half = tmp_path / "half"
    load_causal_lm(str(directory), "float16", CPU).save_pretrained(half)
    load_tokenizer(str(directory)).save_pretrained(half)
    file = write(half, tmp_path / "model.gguf")
    found, expected = (
        dict(load_causal_lm(str(m), "auto", CPU).named_parameters()) for m in (file, half)
    )
    assert found.keys() == expected.keys()
    for parameter, value in found.items():
        torch.testing.assert_close(value, expected[parameter], rtol=2**-11, atol=0)
    assert greedy(file) == greedy(half)
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (
        "<pad>",
        "<eos>",
        "<bos>",
    )
    hard = (
        f"<bos>{TEXT}  ÄÖ 日本\n\n 007<eos>" if MODELS[name] != "sentencepiece" else f"<bos>{TEXT}"
    )
    assert tokenizer.encode(hard) == load_tokenizer(str(half)).encode(hard)


def test_a_quantised_file_becomes_bfloat16_of_what_it_stands_for(tmp_path: Path) -> None:
    directory = make_gguf_model("llama", tmp_path / "model")
    file = write(directory, tmp_path / "model.gguf", "q8_0")
    model = load_causal_lm(str(file), "auto", CPU)
    assert model.dtype == torch.bfloat16
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}[
        "blk.1.ffn_up.weight"
    ]
    values = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(model.get_parameter("model.layers.1.mlp.up_proj.weight"), values.bfloat16())
    exact = load_causal_lm(str(directory), "float32", CPU).get_parameter(
        "model.layers.1.mlp.up_proj.weight"
    )
    assert 0 < (values - exact).abs().max() < exact.abs().max() / 200


def test_a_file_is_converted_once_and_found_by_what_is_in_it(
    file: Path, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with as_program():
        identity = base_identity(str(file))
    assert capfd.readouterr().err.count("converting llama.gguf once") == 1
    copy = tmp_path / "elsewhere/other.gguf"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    before = model_directory(str(file)).stat().st_ino
    assert model_directory(str(copy.parent)).stat().st_ino == before, "the only file of a directory"
    assert capfd.readouterr().err == ""
    shutil.rmtree(cache)
    assert base_identity(str(copy)) == identity, "the same bits, whenever it is converted"


def test_two_processes_convert_a_file_once(file: Path, cache: Path) -> None:
    program = (
        "from es_cookbook.checkpoints.gguf import *\n"
        "from es_cookbook.common.terminal import as_program\n"
        f"with as_program(): print(converted(Path({str(file)!r})))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert len({out for out, _ in ended}) == 1
    assert sum(b"converting" in err for _, err in ended) == 1
    assert [path.suffix for path in sorted(cache.iterdir())] == ["", ".lock"]


def test_the_least_recently_used_model_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        write(make_gguf_model(name, tmp_path / name), tmp_path / f"{name}.gguf")
        for name in ("llama", "qwen2", "qwen3")
    ]
    first, second = map(converted, files[:2])
    size = sum(path.stat().st_size for path in first.iterdir())
    monkeypatch.setattr(reading, "CACHE_SIZE", int(2.8 * size))
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert converted(files[0]) == first
    third = converted(files[2])
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


def test_nothing_is_left_of_a_conversion_that_fails(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with pytest.raises(ModelError, match="cannot be converted: No space left on device"):
        converted(file)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_made_is_said(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(reading.CACHE, str(tmp_path / "llama.gguf/cache"))
    with pytest.raises(ModelError, match="Not a directory; ES_COOKBOOK_CACHE may name another dir"):
        converted(file)


def test_a_file_on_the_hub_is_fetched_by_its_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer() as hub:
        hub.lead_here(monkeypatch, cache=tmp_path / "hub")
        hub.repositories["me/small"] = Repository(False, {"q/llama.gguf": file.read_bytes()})
        assert base_identity("me/small:q/llama.gguf") == base_identity(str(file))
        hub.fail_with = 500
        load_tokenizer("me/small:q/llama.gguf")
        hub.fail_with = None
        with pytest.raises(ModelError, match=r"has no file 'b.gguf'; its GGUF files: q/llama.gguf"):
            model_directory("me/small:b.gguf")


def test_a_directory_with_two_files_and_a_file_that_is_not_there_are_said(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has 2 GGUF files; name one: model_name=.*llama.gguf"):
        model_directory(str(tmp_path))
    with pytest.raises(ModelError, match=r"there is no file '/no/such.gguf'"):
        model_directory("/no/such.gguf")


def test_every_token_that_ends_an_answer_does(tmp_path: Path) -> None:
    directory = make_gguf_model("qwen2", tmp_path / "model")
    model = load_causal_lm(str(directory), "auto", CPU)
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(directory)
    file = write(directory, tmp_path / "model.gguf")
    found = load_causal_lm(str(file), "auto", CPU), load_tokenizer(str(file))
    assert end_of_sequence_ids(*found) == (1, 7)


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    model = make_gguf_model("gemma3", tmp_path / "gemma3")
    config = model / "config.json"
    config.write_text(config.read_text().replace('"full_attention"\n', '"sliding_attention"\n'))
    small = make_tiny_model("llama", tmp_path / "llama")
    load_tokenizer(str(model)).save_pretrained(small)
    for directory, what in (
        (
            make_tiny_model("gemma2", tmp_path / "gemma2"),
            "of the architecture gemma2 cannot be wri",
        ),
        (make_tiny_model("qwen3", tmp_path / "qwen3"), "a tokenizer of the type WordLevel has no"),
        (model, "a GGUF file of gemma3_text cannot say (layer_types|rope_parameters)="),
        (small, "the tokenizer has the token 2.* and the embedding 40 rows"),
    ):
        with pytest.raises(ModelError, match=what):
            write(directory, tmp_path / f"{directory.name}.gguf")


def remade(
    file: Path, path: Path, change: Callable[[gguf.GGUFWriter, dict[str, Any]], None]
) -> Path:
    """A copy of a file with other metadata."""
    reader = gguf.GGUFReader(file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    values: dict[str, Any] = {name: field.contents() for name, field in fields.items()}
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    change(writer, values)
    for name, value in values.items():
        if name not in writer.kv_data[0]:
            types = fields[name].types if name in fields else [gguf.GGUFValueType.get_type(value)]
            writer.add_key_value(name, value, types[0], *types[1:])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"general.type": "adapter"}, "is a LoRA adapter, which changes a model, not a model"),
        ({"general.type": "mmproj"}, "is the vision tower of a model, not a model"),
        ({"general.architecture": "clip"}, "is the vision tower of a model, not a model"),
        ({"general.architecture": "rwkv6"}, "cannot be converted: .*rwkv6 is not supported"),
        ({"split.count": 2}, "is one of several parts of a model"),
        ({"llama.block_count": 2**31}, "has llama.block_count 2147483648 and"),
        ({"llama.block_count": 3}, "parameters; transformers knows"),
        ({"llama.embedding_length": 2**30}, "parameters; transformers knows"),
        ({"llama.attention.key_length": 2**20}, "parameters; transformers knows"),
        ({"llama.vocab_size": 2**31}, "parameters; transformers knows"),
        ({"llama.rope.scaling.type": "yarn"}, "stretches positions by 'yarn', unknown here"),
        ({"llama.attention.sliding_window": 64}, "attends to 64 tokens, which LlamaConfig cannot"),
        ({"tokenizer.ggml.pre": "tekken-9"}, "splits text in the way 'tekken-9', unknown here"),
        ({"tokenizer.ggml.tokens": ["a"] * 1000}, "another tokenizer.ggml.tokens than its embed"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"many": [0] * 70_000}, "has 70,000 entries in 'many'"),
        ({"long": ["x" * 2000]}, "has a string of 2,000 bytes in its header"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_metadata_that_the_weights_do_not_bear_out_is_refused(
    changed: dict[str, Any], sentence: str, file: Path, tmp_path: Path, cache: Path
) -> None:
    def change(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
        values.update(changed)
        for name in [name for name, value in values.items() if value is None]:
            del values[name]

    with pytest.raises(ModelError, match=sentence):
        converted(remade(file, tmp_path / "bad.gguf", change))
    assert not [path for path in cache.glob("*") if path.is_dir()]


def test_weights_that_transformers_would_drop_are_refused(file: Path, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
        writer.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((4, 32), np.float32))

    with pytest.raises(ModelError, match="parameters; transformers knows"):
        converted(remade(file, tmp_path / "bad.gguf", change))


def patched(data: bytes, at: int, form: str, *values: int) -> bytes:
    return data[:at] + struct.pack(f"<{form}", *values) + data[at + struct.calcsize(f"<{form}") :]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"", "cannot be read"),
        (lambda data: b"GGML" + data[4:], "does not begin with the letters GGUF"),
        (lambda data: patched(data, 4, "I", 1), "is of version 1; accepted: 2 and 3"),
        (lambda data: patched(data, 4, "I", 3 << 24), "(another byte order)"),
        (lambda data: patched(data, 8, "Q", 2**60), "announces 1,152,921,504,606,846,976 tensors"),
        (
            lambda data: patched(data, 16, "Q", 2**60),
            "announces 1,152,921,504,606,846,976 metadata",
        ),
        (lambda data: patched(data, 24, "Q", 2**60), "has a string of"),
        (lambda data: data[: data.rindex(b"blk.1.")], "in the middle of its header"),
        (lambda data: data[:-40], "before the tensor"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    change: Callable[[bytes], bytes], sentence: str, file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_tensors_may_not_share_bytes(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    header = read_header(file)
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4
    path = tmp_path / "bad.gguf"
    path.write_bytes(patched(data, at, "Q", 0))
    assert header.tensors["blk.0.ffn_up.weight"].start > 0
    with pytest.raises(ModelError, match="twice, or in a wrong place"):
        read_header(path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    began = time.monotonic()
    with pytest.raises(ModelError, match="is a pipe"):
        converted(tmp_path / "pipe.gguf")
    assert time.monotonic() - began < 5
