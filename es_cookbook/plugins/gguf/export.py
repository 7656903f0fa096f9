"""A model directory as one GGUF file, and a LoRA adapter as another, which llama.cpp runs.

llama.cpp has its own names for weights (`names.py`) and settings; the format is described in
`header.py`. Matrices are float16, bfloat16 or Q8_0, everything else float32.

Left out: architectures other than Llama, Qwen2, Qwen3 and Gemma 3, other quantised types
(`llama-quantize` makes them of such a file), and tokenizers that split text in a way without a name
here.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from es_cookbook.checkpoints.model_files import model_directory, weight_paths
from es_cookbook.checkpoints.models import load_tokenizer
from es_cookbook.checkpoints.tensors import weight_files
from es_cookbook.common.errors import ModelError
from es_cookbook.evolution.spaces.factors import LoRA
from es_cookbook.plugins.gguf.conversion import (
    ROPE_FACTORS,
    WHOLE_WORDS,
    FloatType,
    gguf_file,
    llama3_factors,
    read_config,
    rope_of,
)
from es_cookbook.plugins.gguf.header import import_gguf, read_header
from es_cookbook.plugins.gguf.names import ARCHITECTURES, as_llama_cpp, check_architecture, renaming

if TYPE_CHECKING:
    import gguf

_TYPES = {"float16": ("F16", 1), "bfloat16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
"""ggml's name of a type, and the number of a file that has it (`general.file_type`)."""
_ABOUT = tuple(f"general.{name}" for name in ("name", "basename", "size_label", "license"))
"""Metadata that is copied besides the tokenizer's."""
_NOT_SAID = {
    "architectures",
    "attention_dropout",
    "dtype",
    "initializer_range",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    *(f"{name}_token_id" for name in ("bos", "eos", "pad", "unk")),
}
"""Fields of a config that no file says and no output depends on, or that the tokenizer says."""
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""What PEFT puts before and behind the name of an adapted module."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def write_gguf(directory: Path, file: Path, matrices: FloatType, base: str) -> None:
    """Write a model directory as one GGUF file.

    If the base that it was trained from is a GGUF file, the tokenizer is copied from there.

    Raises:
        ModelError: llama.cpp has no form of this model that is known here; says why.
    """
    gguf = import_gguf()
    config = config_of(directory)
    writer = _writer(file, config, "model")
    writer.add_file_type(_TYPES[matrices][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_settings(writer, config)
    if (source := gguf_file(base)) is None:
        _add_tokenizer(writer, directory, config)
    else:
        for name, field in gguf.GGUFReader(source).fields.items():
            if name.startswith(("tokenizer.", *_ABOUT)):
                writer.add_key_value(name, field.contents(), field.types[0], *field.types[1:])
    wanted = gguf.GGMLQuantizationType[_TYPES[matrices][0]]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    rename, files = renaming(config), weight_files(weight_paths(str(directory)))
    for name, tensor in files.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        fits = tensor.dim() > 1 and tensor.shape[-1] % block == 0
        kind = wanted if fits else gguf.GGMLQuantizationType.F32
        if fits and matrices == "float16" and tensor.abs().max() > torch.finfo(torch.float16).max:
            raise ModelError(f"{name} has numbers beyond float16; accepted: form.matrices=bfloat16")
        values = as_llama_cpp(name, tensor.float(), config).numpy()
        writer.add_tensor(rename(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    if rope_of(config).get("rope_type") == "llama3":
        writer.add_tensor(ROPE_FACTORS, llama3_factors(config).numpy())
    _finish(writer)
    _compare(config, read_config(file, read_header(file)))


def _compare(config: PreTrainedConfig, written: PreTrainedConfig) -> None:
    """Refuse a model whose config a file cannot say."""
    said = written.to_dict()
    for name, value in config.to_dict().items():
        same = said.get(name) == value
        if isinstance(value, float) and not same:
            same = math.isclose(value, said.get(name) or 0.0, rel_tol=1e-6)
        if not same and name not in _NOT_SAID and not name.startswith("_"):
            raise ModelError(f"a GGUF file of {config.model_type} cannot say {name}={value!r:.100}")


def write_gguf_adapter(directory: Path, file: Path, base: str) -> None:
    """Write a PEFT adapter of a base's linear layers as a GGUF file, for `llama-cli --lora`.

    Raises:
        ModelError: As above.
    """
    config = config_of(model_directory(base))
    settings = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    lora = LoRA(settings["r"], settings["lora_alpha"], settings["use_rslora"])
    stored = weight_files([directory / "adapter_model.safetensors"])
    modules = [name.removesuffix(_A) for name in stored if name.endswith(_A)]
    placed = llama_cpp_factors(config)
    factors = (
        factor
        for module in modules
        for factor in placed(
            f"{module.removeprefix(_PREFIX)}.weight", *(stored[module + end] for end in (_A, _B))
        )
    )
    write_factors(file, config, lora, factors)


def llama_cpp_factors(
    config: PreTrainedConfig,
) -> Callable[[str, torch.Tensor, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]:
    """Return a function from a weight's name, A and B to llama.cpp's names and values of both.

    Raises:
        ModelError: llama.cpp's names of this architecture are not known here.
    """
    check_architecture(config)
    rename = renaming(config)

    def placed(weight: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{rename(weight)}.lora_a", a.float()
        # The rows of B are the outputs.
        yield f"{rename(weight)}.lora_b", as_llama_cpp(weight, b.float(), config)

    return placed


def write_factors(
    file: Path, config: PreTrainedConfig, lora: LoRA, factors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a LoRA adapter, given its factors as `llama_cpp_factors` returns them."""
    writer = _writer(file, config, "adapter")
    writer.add_string("adapter.type", "lora")
    # llama.cpp scales by alpha over the rank.
    writer.add_float32("adapter.lora.alpha", lora.alpha * (lora.rank**0.5 if lora.rslora else 1))
    for name, values in factors:
        writer.add_tensor(name, values.numpy())
    _finish(writer)


def _writer(file: Path, config: PreTrainedConfig, kind: str) -> "gguf.GGUFWriter":
    # Tensors go into a temporary file, so memory holds one of them.
    writer = import_gguf().GGUFWriter(file, ARCHITECTURES[config.model_type], use_temp_file=True)
    writer.add_type(kind)
    return writer


def _finish(writer: "gguf.GGUFWriter") -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def config_of(directory: Path) -> PreTrainedConfig:
    """Return the config of a model directory.

    Raises:
        ModelError: llama.cpp's names of its architecture are not known here.
    """
    config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    check_architecture(config)
    return config


def _add_settings(writer: "gguf.GGUFWriter", config: PreTrainedConfig) -> None:
    rope = rope_of(config)
    if (kind := rope.get("rope_type", "default")) not in ("default", "linear", "llama3"):
        raise ModelError(f"positions of the type {kind!r} cannot be written into a GGUF file")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "linear":
        writer.add_rope_scaling_type(import_gguf().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def _add_tokenizer(writer: "gguf.GGUFWriter", directory: Path, config: PreTrainedConfig) -> None:
    tokenizer = cast("PreTrainedTokenizerFast", load_tokenizer(str(directory)))
    fast: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    if fast["model"]["type"] != "BPE":
        raise ModelError(
            f"a tokenizer of the type {fast['model']['type']} has no form in GGUF here"
        )
    merges = [
        tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in fast["model"]["merges"]
    ]
    added = {token["id"]: token for token in fast["added_tokens"]}
    is_bytes = '"ByteLevel"' in json.dumps([fast["pre_tokenizer"], fast["decoder"]])
    tokens, types = _tokens(fast["model"], added, config.vocab_size)
    if is_bytes:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_split_name(fast["pre_tokenizer"], fast["model"]))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix('"Prepend"' in json.dumps(fast["normalizer"]))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        if (token := getattr(tokenizer, name)) is not None:
            getattr(writer, f"add_{name}")(token)
    writer.add_add_bos_token(tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id])
    if more := _end_tokens(directory) - {cast(int, tokenizer.eos_token_id)}:
        writer.add_eot_token_id(max(more))
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _end_tokens(directory: Path) -> set[int]:
    if not (directory / "generation_config.json").is_file():
        return set()
    found = cast("int | list[int] | None", GenerationConfig.from_pretrained(directory).eos_token_id)
    if found is None:
        return set()
    return set(found) if isinstance(found, list) else {found}


def _tokens(
    model: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], size: int
) -> tuple[list[str], list[int]]:
    """Return the token and the kind of token of every row of the embedding."""
    if (last := max([*model["vocab"].values(), *added])) >= size:
        raise ModelError(f"the tokenizer has the token {last} and the embedding {size} rows")
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    for token, i in model["vocab"].items():
        kind = _UNKNOWN if token == model["unk_token"] else _NORMAL
        if len(token) == 6 and token.startswith("<0x"):
            kind = _BYTE
        tokens[i], types[i] = token, kind
    for i, token in added.items():
        tokens[i] = token["content"]
        types[i] = _CONTROL if token["special"] else _USER_DEFINED
    return tokens, types


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return scores in the order of the merges: SentencePiece joins the best-scored pair first."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(merges):
        rank.setdefault("".join(pair), i)
    return [float(-rank.get(token, len(merges) + i)) for i, token in enumerate(tokens)]


def _split_name(pre_tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a byte-level tokenizer splits text."""
    is_whole = bool(model.get("ignore_merges"))
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    if len(patterns) == 1:
        for name, split in GGUF_PRE_TOKENIZER_SPLITS.items():
            if split == patterns[0] and is_whole == (name in WHOLE_WORDS):
                return name
    if not patterns and not is_whole and steps[-1].get("use_regex", True):
        if len(steps) == 1:
            return "gpt-2"
        if steps[0] == {"type": "Digits", "individual_digits": True}:
            return "smollm"
    raise ModelError(
        "the tokenizer splits text in a way that has no name in llama.cpp known here: "
        f"{json.dumps(pre_tokenizer):.200}"
    )
