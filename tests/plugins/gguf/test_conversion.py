"""A GGUF file is a model like any other: converted once, written again, and refused if broken."""

import os
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from es_cookbook.checkpoints import model_files
from es_cookbook.checkpoints.model_files import base_identity, model_directory
from es_cookbook.checkpoints.models import end_of_sequence_ids, load_causal_lm, load_tokenizer
from es_cookbook.checkpoints.tensors import TensorFile
from es_cookbook.common.errors import ModelError
from es_cookbook.common.terminal import as_program
from es_cookbook.plugins.gguf import weights
from es_cookbook.plugins.gguf.conversion import FloatType, converted
from es_cookbook.plugins.gguf.export import write_gguf
from es_cookbook.plugins.gguf.header import read_header
from tests.families import sampled
from tests.gguf_models import CHAT_TEMPLATE, MODELS, TEXT, make_gguf_model
from tests.hub_server import HubServer, Repository
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(model_files.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache/models"


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


@pytest.mark.parametrize("name", sampled(MODELS, 4))
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
    # transformers' classes of tokenizers add their own special tokens behind the last row.
    rows = len(found["model.embed_tokens.weight"])
    assert len(tokenizer) == rows > max(tokenizer.encode("<s>a</s><|endoftext|><mask>"))


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


def _flip_as_if_untouched(path: Path) -> None:
    status, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped, with its old time": _flip_as_if_untouched,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "its manifest": lambda path: path.parent.with_name(f"{path.parent.name}.json").write_text("{"),
    "one more": lambda path: path.with_name("more.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_in_the_cache_is_not_as_it_was_made_is_made_anew(
    damage: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = converted(file)
    made = {path.name: path.read_bytes() for path in directory.iterdir()}
    DAMAGES[damage](directory / "model.safetensors")
    with as_program():
        assert converted(file) == directory
    assert "differs from what was converted, or was never checked" in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == made


def test_two_at_once_convert_a_file_once(
    file: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with as_program(), ThreadPoolExecutor(2) as threads:
        assert len({*threads.map(converted, [file] * 2)}) == 1
    assert capfd.readouterr().err.count("converting") == 1
    assert [path.suffix for path in sorted(cache.iterdir())] == ["", ".json", ".lock"]


def test_the_least_recently_used_model_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        write(make_gguf_model(name, tmp_path / name), tmp_path / f"{name}.gguf")
        for name in ("llama", "qwen2", "qwen3")
    ]
    first, second = map(converted, files[:2])
    size = sum(path.stat().st_size for path in first.iterdir())
    monkeypatch.setattr(model_files, "CACHE_SIZE", int(2.8 * size))
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert converted(files[0]) == first
    third = converted(files[2])
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


def test_every_token_that_ends_an_answer_does(tmp_path: Path) -> None:
    directory = make_gguf_model("qwen2", tmp_path / "model")
    model = load_causal_lm(str(directory), "auto", CPU)
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(directory)
    file = write(directory, tmp_path / "model.gguf")
    found = load_causal_lm(str(file), "auto", CPU), load_tokenizer(str(file))
    assert end_of_sequence_ids(*found) == (1, 7)


def test_nothing_is_left_of_a_conversion_that_fails(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(TensorFile, "write", fail)
    with pytest.raises(ModelError, match="cannot be converted: No space left on device"):
        converted(file)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


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
        with pytest.raises(ModelError, match=r"no such file; its GGUF files: q/llama.gguf"):
            model_directory("me/small:b.gguf")


def test_a_directory_with_two_files_and_a_file_that_is_not_there_are_said(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has 2 GGUF files; name one: model_name=.*llama.gguf"):
        model_directory(str(tmp_path))
    with pytest.raises(ModelError, match=r"there is no file '/no/such.gguf'"):
        model_directory("/no/such.gguf")


def test_what_a_file_cannot_say_is_refused(tmp_path: Path) -> None:
    model = make_gguf_model("gemma3", tmp_path / "gemma3")
    config = model / "config.json"
    config.write_text(config.read_text().replace('"full_attention"\n', '"sliding_attention"\n'))
    small = make_tiny_model("llama", tmp_path / "llama")
    load_tokenizer(str(model)).save_pretrained(small)
    for directory, what in (
        (make_tiny_model("gemma2", tmp_path / "gemma2"), "names for gemma2 are not known here"),
        (make_tiny_model("qwen3", tmp_path / "qwen3"), "a tokenizer of the type WordLevel has no"),
        (model, "a GGUF file of gemma3_text cannot say (layer_types|rope_parameters)="),
        (small, "the tokenizer has the token 2.* and the embedding 40 rows"),
    ):
        with pytest.raises(ModelError, match=what):
            write(directory, tmp_path / f"{directory.name}.gguf")


def remade(file: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a file with other metadata, without what is None."""
    reader = gguf.GGUFReader(file)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    values: dict[str, Any] = {name: field.contents() for name, field in fields.items()}
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    change(values)
    for name, value in values.items():
        if name not in writer.kv_data[0] and value is not None:
            types = fields[name].types if name in fields else [gguf.GGUFValueType.get_type(value)]
            writer.add_key_value(name, value, types[0], *types[1:])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_model_has_the_bytes_that_transformers_writes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which converts other architectures, as a whole."""
    ours = {path.name: path.read_bytes() for path in converted(file).iterdir()}
    monkeypatch.setenv(model_files.CACHE, str(tmp_path / "other"))
    monkeypatch.setattr(weights, "is_known", lambda *_: False)
    assert {path.name: path.read_bytes() for path in converted(file).iterdir()} == ours


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"general.architecture": "rwkv6"}, "cannot be converted: .*rwkv6 is not supported"),
        ({"split.count": 2, "general.architecture": None}, "is one of several parts of a model"),
        ({"llama.attention.causal": False}, "is an embedding model, which generates no text"),
        ({"llama.block_count": 2**31}, "has llama.block_count 2147483648, which it cannot"),
        ({"llama.block_count": 3}, "parameters; transformers knows"),
        ({"llama.rope.dimension_count": 4}, "turns 4 of a head's 8 dimensions, which LlamaConfig"),
        ({"llama.context_length": None}, "does not say llama.context_length"),
        ({"llama.rope.scaling.type": "yarn"}, "stretches positions by 'yarn', unknown here"),
        ({"llama.attention.sliding_window": 64}, "attends to 64 tokens, which LlamaConfig cannot"),
        ({"tokenizer.ggml.pre": "tekken-9"}, "splits text in the way 'tekken-9', unknown here"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "has 300 tokens and 289 rows of the embedding"),
        ({"tokenizer.chat_template": "x" * 2**21}, "it has a string of 2,097,152 bytes"),
        ({"nested": [[1], [2]]}, "it has arrays of arrays"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_metadata_that_the_weights_do_not_bear_out_is_refused(
    changed: dict[str, Any], sentence: str, file: Path, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(ModelError, match=sentence):
        converted(remade(file, tmp_path / "bad.gguf", lambda values: values.update(changed)))
    assert not [path for path in cache.glob("*") if path.is_dir()]


def patched(data: bytes, at: int, form: str, *values: int) -> bytes:
    return data[:at] + struct.pack(f"<{form}", *values) + data[at + struct.calcsize(f"<{form}") :]


def with_bytes(data: bytes, count: int) -> bytes:
    """A file with an array of bytes, `b`, before its metadata."""
    (num_values,) = struct.unpack("<Q", data[16:24])
    array = struct.pack("<Q1sIIQ", 1, b"b", 9, 0, count) + bytes(count)
    return patched(data, 16, "Q", num_values + 1)[:24] + array + data[24:]


def dimensions(data: bytes, *shape: int) -> bytes:
    name = b"blk.0.ffn_up.weight"
    return patched(data, data.index(name) + len(name) + 4, "QQ", *shape)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"", "cannot be read"),
        (lambda data: b"GGML" + data[4:], "does not begin with the letters GGUF"),
        (lambda data: patched(data, 4, "I", 3 << 24), "(another byte order)"),
        (lambda data: patched(data, 8, "Q", 2**60), "announces 1,152,921,504,606,846,976 tensors"),
        (lambda data: patched(data, 24, "Q", 2**60), "has a string of"),
        (lambda data: data[: data.rindex(b"blk.1.")], "in the middle of its header"),
        (lambda data: data[:-40], "ends in the middle of its weights"),
        (lambda data: with_bytes(data, 2**21 + 1), "too many entries in its arrays"),
        (lambda data: dimensions(data, 2**63, 2**63), "cannot be read"),
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


@pytest.mark.parametrize("name", ["llama", "llama with biases"])
def test_a_text_begins_and_ends_as_the_file_says(name: str, tmp_path: Path) -> None:
    base = write(make_gguf_model(name, tmp_path / "model"), tmp_path / "base.gguf")
    plain = load_tokenizer(str(base))
    for flags, first, last in (
        ({"add_bos_token": True}, ["<bos>"], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["<bos>"], ["<eos>"]),
        ({"add_bos_token": None}, ["<bos>"], []),
    ):
        new = {f"tokenizer.ggml.{flag}": value for flag, value in flags.items()}
        other = remade(base, tmp_path / "other.gguf", lambda values, new=new: values.update(new))
        tokenizer = load_tokenizer(str(other))
        tokens = plain.convert_ids_to_tokens(plain.encode(TEXT))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(TEXT)) == [*first, *tokens, *last]
        assert tokenizer.encode(TEXT, add_special_tokens=False) == plain.encode(TEXT)


@pytest.mark.parametrize("says", [True, None])
def test_sentencepiece_begins_text_with_a_space_unless_the_file_says_no(
    says: bool | None, tmp_path: Path
) -> None:
    """Behind special tokens too, and before a text that has one: as llama.cpp does."""

    def change(values: dict[str, Any]) -> None:
        assert values["tokenizer.ggml.add_space_prefix"] is False
        values["tokenizer.ggml.add_space_prefix"] = says

    for name in ("llama with biases", "gemma3"):
        base = write(make_gguf_model(name, tmp_path / name), tmp_path / f"{name}.gguf")
        plain = load_tokenizer(str(base))
        tokenizer = load_tokenizer(str(remade(base, tmp_path / f"{name} other.gguf", change)))
        for text, as_plain in (
            ("hello", " hello"),
            (" two", "  two"),
            ("<bos>a b<eos>", "<bos> a b<eos>"),
        ):
            assert tokenizer.encode(text) == plain.encode(as_plain)


def test_a_word_of_the_vocabulary_needs_no_merges_where_its_kind_says_so(
    file: Path, tmp_path: Path
) -> None:
    for kind, tokens in (("llama-bpe", ["Ġagain"]), ("smaug-bpe", ["Ġagai", "n"])):

        def change(values: dict[str, Any], kind: str = kind) -> None:
            merges = values["tokenizer.ggml.merges"]
            kept = [merge for merge in merges if merge.replace(" ", "") != "Ġagain"]
            assert len(kept) == len(merges) - 1
            new = {"merges": kept, "pre": kind, "add_bos_token": None}
            values.update({f"tokenizer.ggml.{name}": value for name, value in new.items()})

        tokenizer = load_tokenizer(str(remade(file, tmp_path / "other.gguf", change)))
        assert tokenizer.tokenize(" again") == tokens
        begins = tokenizer.encode("again")[0] == tokenizer.bos_token_id
        assert begins == (kind == "llama-bpe"), "where the file does not say"


def test_weights_that_are_not_finite_are_refused(file: Path, tmp_path: Path) -> None:
    start = read_header(file).tensors["blk.1.ffn_up.weight"].start
    path = tmp_path / "bad.gguf"
    path.write_bytes(patched(file.read_bytes(), start, "H", 0x7E00))
    with pytest.raises(ModelError, match=r"are not finite, in model.layers.1.mlp.up_proj.weight"):
        converted(path)


def test_tensors_may_not_share_bytes(file: Path, tmp_path: Path) -> None:
    """A small file could stand for a model that fills the memory."""
    data = file.read_bytes()
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    changed = patched(data, at + 2 * 8 + 4, "Q", 0)
    for name in (b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"):
        changed = patched(changed, changed.index(name) + len(name) + 4, "QQ", 32, 280)
        changed = patched(changed, changed.index(name) + len(name) + 24, "Q", 0)
    path = tmp_path / "bad.gguf"
    path.write_bytes(changed)
    with pytest.raises(ModelError, match="its tensors share bytes"):
        read_header(path)
