"""Models in GGUF, the format of llama.cpp: one file with configuration, tokenizer and weights.

A file is dequantised once, into a model directory in a cache, and from there on it is a model like
any other: for engines, plans, exports and identities. transformers and `gguf` convert it. Plain
floats keep their type; what is quantised becomes bfloat16.

Before a library sees the file, its header is read here: every length, count, offset and type has to
fit into the file, so nothing is allocated because a header says so.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import contextlib
import functools
import hashlib
import io
import math
import mmap
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, cast

from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import ANY_SIZE, LARGEST_TEXT, opened, whole_directory
from es_cookbook.common.terminal import one_line, say, stderr_into

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedModel

CACHE = "ES_COOKBOOK_CACHE"
"""Environment variable: the directory of converted models; by default in that of the Hub."""
CACHE_SIZE = 64 * 2**30
"""Bytes of converted models that are kept; the least recently used one goes first."""
SUFFIX = ".gguf"
FloatType: TypeAlias = Literal["float16", "bfloat16", "q8_0"]
"""Of the matrices in a file that is written."""

_Value: TypeAlias = "int | float | bool | str | list[_Value]"
_STRING, _ARRAY = 8, 9
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The format's number of a type of fixed size -> how `struct` calls it."""
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}
"""ggml's number of a type that is not quantised -> torch's name."""
_LONGEST_NAME = 1024
"""Bytes of a key, a tensor's name or a token."""
_LONGEST_LIST = 2**16
"""Entries of an array that does not belong to the vocabulary."""
_PER_TOKEN = {"tokens": 1, "scores": 1, "token_type": 1, "merges": 4}
"""Arrays of the tokenizer -> entries for each row of the embedding, at most."""
_EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 32.0)
"""Of 3.1 and of 3.2."""
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _LLAMA3_SPLIT.replace("{1,3}", "")}
"""llama.cpp's name of a byte-level tokenizer's kind -> the expression by which it splits text."""
_SPLITS_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Kinds that split text as GPT-2 does, after every digit was split off."""
_SPLITS_AS_GPT2 = ("", "default", "gpt-2")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' name of a special token -> the format's."""
_NO_MODELS = {
    "adapter": "a LoRA adapter, which changes a model",
    "mmproj": "the vision tower of a model",
    "clip": "the vision tower of a model",
    "imatrix": "statistics for quantising a model",
}
"""`general.type` or `general.architecture` of a file without a language model -> what it is."""


class Tensor(NamedTuple):
    """A tensor of a file: ggml's shape (fastest dimension first) and type; its place in bytes."""

    shape: tuple[int, ...]
    type: int
    start: int
    size: int


class Header(NamedTuple):
    """What a file says before its weights."""

    metadata: Mapping[str, _Value]
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """In which its model is converted: that of its floats, norms apart, or bfloat16."""
        types = {tensor.type for tensor in self.tensors.values()}
        if types <= _FLOATS.keys():
            return _FLOATS[max(types)]  # Where others are narrower, the norms are float32.
        return "bfloat16"


@functools.cache
def import_gguf() -> ModuleType:
    """The package.

    Raises:
        ModelError: It is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF files need a package: pip install 'es-cookbook[gguf]'") from error
    # transformers asks for the same map again for each of a model's hundreds of modules.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    return gguf


def converted(path: Path) -> Path:
    """The model directory that a GGUF file stands for, from the cache or converted now.

    Raises:
        ModelError: It cannot be read or converted; says why.
    """
    try:
        with opened(path, ANY_SIZE, None) as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise ModelError(f"model_name: {error}") from error
    directory = _cache() / _digest(path, status.st_size, status.st_mtime_ns, status.st_ino)
    if not directory.exists():
        from filelock import FileLock

        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(directory.with_suffix(".lock")):  # Two processes may come at once.
                if not directory.exists():
                    _convert(path, directory)
                    _evict(keep=directory)
        except OSError as error:
            reason = error.strerror or error
            raise _refused(
                path,
                f"cannot be converted into {directory.parent}: {reason}; {CACHE} "
                "may name another directory",
            ) from error
    with contextlib.suppress(OSError):  # Somebody else's cache, which may be read.
        os.utime(directory)
    return directory


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get(CACHE) or Path(constants.HF_HOME) / "es_cookbook") / "gguf"


@functools.lru_cache(16)
def _digest(path: Path, *_version: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _evict(keep: Path) -> None:
    """Delete the least recently used models until the others fit."""
    models = [path for path in keep.parent.iterdir() if path.is_dir() and path != keep]
    left = CACHE_SIZE
    for model in (keep, *sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)):
        left -= sum(file.stat().st_size for file in model.iterdir())
        if left < 0 and model != keep:
            shutil.rmtree(model, ignore_errors=True)


def _convert(path: Path, directory: Path) -> None:
    from es_cookbook.checkpoints.tensors import first_line

    import_gguf()
    header = read_header(path)
    say(f"converting {path.name} once, into {directory}")
    with whole_directory(directory) as beside:
        try:
            with stderr_into(io.StringIO()):  # transformers draws bars over the tensors.
                _write_model(path, header, beside)
        except ModelError:
            raise
        except Exception as error:  # The libraries raise many kinds; to the user it is one mistake.
            raise _refused(path, f"cannot be converted: {first_line(error)}") from error


def _write_model(path: Path, header: Header, directory: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # Alone in a directory, so that nothing beside the file is read with it.
    link = directory / f"model{SUFFIX}"
    link.symlink_to(path.resolve())
    config = read_config(link, header)
    with torch.device("meta"):
        model = cast(
            "PreTrainedModel", AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        )
    needed = sum(parameter.numel() for parameter in model.parameters())
    # Layers beyond the last are for guessing several tokens at once.
    layers = [f"blk.{n}." for n in range(config.num_hidden_layers, len(header.tensors))]
    aside = (ROPE_FACTORS, *layers)
    there = sum(math.prod(t.shape) for n, t in header.tensors.items() if not n.startswith(aside))
    if needed != there:
        raise _refused(path, f"has {there:,} parameters; transformers knows {needed:,} of such")
    dtype: torch.dtype = getattr(torch, header.dtype)
    dense = getattr(transformers, "GgufConfig", None)  # Where it is missing, all models are dense.
    quantised = {} if dense is None else {"quantization_config": dense(dequantize=True)}
    result = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        output_loading_info=True,
        trust_remote_code=False,
        gguf_file=link.name,
        config=config,
        **quantised,
    )
    loaded, loading = cast("tuple[PreTrainedModel, dict[str, list[str]]]", result)
    if missing := sorted(loading["missing_keys"]):  # transformers makes them up at random
        raise _refused(path, f"lacks weights: {missing[0]} and {len(missing) - 1} more")
    # What was loaded is marked as quantised, which it is no longer, and cannot be saved.
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    vars(model.config).pop("_model_name_or_path", None)  # The name in the file.
    model.generation_config = loaded.generation_config
    model.generation_config.eos_token_id = _end_tokens(header.metadata) or None
    # AutoTokenizer would read the whole file once more, to choose this class.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=link.name)
    _set_split(path, tokenizer.backend_tokenizer, header.metadata)
    tokens = cast("list[str]", header.metadata["tokenizer.ggml.tokens"])
    for name, key in _SPECIAL.items():  # Older versions of transformers take their own.
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        is_there = type(token) is int and 0 <= token < len(tokens)
        setattr(tokenizer, f"{name}_token", tokens[cast(int, token)] if is_there else None)
    link.unlink()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def read_config(path: Path, header: Header) -> "PreTrainedConfig":
    """The model's config, with what transformers leaves out: heads' sizes, stretched positions."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False, local_files_only=True
    )
    of_model = f"{header.metadata['general.architecture']}."
    if (length := header.metadata.get(f"{of_model}attention.key_length")) is not None:
        if hasattr(config, "head_dim"):
            config.head_dim = length
        if hasattr(config, "query_pre_attn_scalar"):  # As llama.cpp has it; 62: Gemma 3 27B.
            scale = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = scale if config.num_hidden_layers == 62 else length
    for field, name in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
        if hasattr(config, field):
            setattr(config, field, f"blk.0.{name}.bias" in header.tensors)
    window = header.metadata.get(f"{of_model}attention.sliding_window")
    has_window = type(window) is int and 0 < window < config.max_position_embeddings
    if has_window and not hasattr(config, "sliding_window"):
        raise _refused(path, f"attends to {window} tokens, which {type(config).__name__} cannot")
    rope = rope_of(config)
    scaling = str(header.metadata.get(f"{of_model}rope.scaling.type", "none"))
    if scaling == "linear":
        rope.update(
            rope_type="linear", factor=header.metadata.get(f"{of_model}rope.scaling.factor")
        )
    elif scaling != "none":
        raise _refused(path, f"stretches positions by {one_line(scaling)!r:.40}, unknown here")
    if (tensor := header.tensors.get(ROPE_FACTORS)) is not None:
        with path.open("rb") as file:
            file.seek(tensor.start)
            stored = torch.frombuffer(bytearray(file.read(tensor.size)), dtype=torch.float32)
        for factor in _LLAMA3_FACTORS:
            rope.update(_LLAMA3, factor=factor)
            if torch.allclose(llama3_factors(config), stored, rtol=1e-3):
                return config
        raise _refused(path, f"stretches positions by {ROPE_FACTORS} in another way than Llama 3")
    return config


def rope_of(config: "PreTrainedConfig") -> dict[str, Any]:
    """How a model turns positions into angles, in the layers that see everything."""
    found = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    return found.get("full_attention", found)


def llama3_factors(config: "PreTrainedConfig") -> "torch.Tensor":
    """What llama.cpp divides the frequencies of positions by, where Llama 3 stretches them."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    exponents = torch.arange(len(stretched), dtype=torch.float32) / len(stretched)
    return rope_of(config)["rope_theta"] ** -exponents / stretched


def _set_split(path: Path, tokenizer: "Tokenizer", metadata: Mapping[str, _Value]) -> None:
    """Have a tokenizer split text as its file says: transformers knows few ways."""
    from tokenizers import Regex, pre_tokenizers

    if metadata.get("tokenizer.ggml.model") != "gpt2":
        if metadata.get("tokenizer.ggml.add_space_prefix") is False and isinstance(
            tokenizer.pre_tokenizer, pre_tokenizers.Metaspace
        ):
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", split=False)
        return
    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    with contextlib.suppress(ImportError):  # In older versions it is elsewhere.
        from transformers.integrations.gguf import gguf_tokenizer_mapping

        if pre in gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS:
            return
    if pre in _SPLITS_DIGITS:
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    elif pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    elif pre in _SPLITS_AS_GPT2:
        return
    else:
        raise _refused(path, f"splits text in the way {one_line(pre)!r:.40}, unknown here")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _end_tokens(metadata: Mapping[str, _Value]) -> list[int]:
    """llama.cpp ends an answer at each of these; a chat's turns often end with the second."""
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = (metadata.get(name) for name in names)
    return list(dict.fromkeys(token for token in found if type(token) is int))


def read_header(path: Path) -> Header:
    """Read a file's metadata and the places of its tensors.

    Raises:
        ModelError: It is no GGUF file of a whole language model, or contradicts itself; says how.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path, ANY_SIZE, None))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # An empty file cannot be mapped.
            raise _refused(path, f"cannot be read: {error}") from error
        return _Reader(path, stack.enter_context(contextlib.closing(data))).header()


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise self._broken("does not begin with the letters GGUF")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            order = " (another byte order)" if version & 0xFFFF == 0 else ""
            raise self._broken(f"is of version {version}{order}; accepted: 2 and 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: dict[str, _Value] = {}
        for _ in range(self._count(num_values, 13, "metadata")):
            key = self._string(_LONGEST_NAME)
            if key in metadata:
                raise self._broken(f"has {one_line(key)!r:.80} twice")
            metadata[key] = self._value(key, self._number("I"))
        _check_kind(self._path, metadata)
        placed = [self._tensor() for _ in range(self._count(num_tensors, 32, "tensors"))]
        header = Header(metadata, self._placed(placed, metadata.get("general.alignment", 32)))
        _check_sizes(self._path, header)
        return header

    def _broken(self, what: str) -> ModelError:
        return _refused(self._path, what)

    def _take(self, size: int) -> int:
        """Where `size` more bytes begin."""
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise self._broken(f"ends at byte {len(self._data):,}, in the middle of its header")
        return start

    def _unpacked(self, form: str) -> tuple[Any, ...]:
        form = "<" + form
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))

    def _number(self, form: str) -> int:
        return self._unpacked(form)[0]

    def _count(self, count: int, size: int, what: str) -> int:
        """A count of things of at least `size` bytes each, all of which must be in the file."""
        if count * size > len(self._data) - self._at:
            raise self._broken(f"announces {count:,} {what}, more than it has room for")
        return count

    def _string(self, longest: int) -> str:
        size = self._number("Q")
        if size > longest:
            raise self._broken(
                f"has a string of {size:,} bytes in its header; accepted: {longest:,}"
            )
        start = self._take(size)
        try:
            return self._data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"has a string in its header that is no UTF-8: {error}") from error

    def _value(self, key: str, kind: int) -> _Value:
        if kind in _FORMATS:
            return self._unpacked(_FORMATS[kind])[0]
        if kind == _STRING:
            return self._string(LARGEST_TEXT)
        if kind != _ARRAY:
            raise self._broken(f"has {one_line(key)!r:.80} of the unknown type {kind}")
        entries, length = self._number("I"), self._number("Q")
        group, _, name = key.rpartition(".")
        is_vocabulary = group == "tokenizer.ggml" and name in _PER_TOKEN
        if length > _LONGEST_LIST and not is_vocabulary:
            raise self._broken(f"has {length:,} entries in {one_line(key)!r:.80}")
        if entries == _STRING:
            self._count(length, 8, "strings")
            return [self._string(_LONGEST_NAME) for _ in range(length)]
        if entries not in _FORMATS:
            raise self._broken(f"has an array of the type {entries} in {one_line(key)!r:.80}")
        return list(self._unpacked(f"{self._count(length, 1, 'numbers')}{_FORMATS[entries]}"))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(_LONGEST_NAME), self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._broken(f"has the tensor {one_line(name)!r:.80} of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, tensors: list[tuple[str, tuple[int, ...], int, int]], alignment: _Value
    ) -> dict[str, Tensor]:
        """The tensors in the order of their places, none of which overlap."""
        if type(alignment) is not int or alignment not in {2**n for n in range(3, 21)}:
            raise self._broken(f"has an alignment of {alignment!r:.40}; accepted: a power of two")
        end = first = -(-self._at // alignment) * alignment
        placed: dict[str, Tensor] = {}
        for name, shape, kind, offset in sorted(tensors, key=lambda tensor: tensor[3]):
            shown = f"the tensor {one_line(name)!r:.80}"
            start, size = first + offset, self._size(shown, shape, kind)
            if name in placed or start < end or start % alignment:
                raise self._broken(f"has {shown} twice, or in a wrong place")
            end = start + size
            if end > len(self._data):
                raise self._broken(f"ends at byte {len(self._data):,}, before {shown} does")
            placed[name] = Tensor(shape, kind, start, size)
        return placed

    def _size(self, shown: str, shape: tuple[int, ...], kind: int) -> int:
        sizes = {int(each): size for each, size in import_gguf().GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            raise self._broken(f"has {shown} of the unknown type {kind}")
        block, size = sizes[kind]
        if 0 in shape or shape[0] % block:
            raise self._broken(f"has {shown} of a shape {shape} that its type cannot have")
        return math.prod(shape) // block * size


def _check_kind(path: Path, metadata: Mapping[str, _Value]) -> None:
    """Refuse files that hold something else than a whole language model."""
    for key in ("general.type", "general.architecture"):
        if (what := _NO_MODELS.get(str(metadata.get(key)))) is not None:
            raise _refused(path, f"is {what}, not a model")
    if not isinstance(metadata.get("general.architecture"), str):
        raise _refused(path, "does not name an architecture (general.architecture)")
    if metadata.get("split.count", 1) not in (0, 1):
        raise _refused(
            path, "is one of several parts of a model: merge them with llama-gguf-split --merge"
        )
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise _refused(path, "has a tokenizer.chat_template that is no text")


def _check_sizes(path: Path, header: Header) -> None:
    """Refuse counts in the metadata that the tensors do not bear out."""
    embedding = header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise _refused(path, f"has no embedding of tokens ({_EMBEDDING}): it is no language model")
    for name, most in _PER_TOKEN.items():
        found = header.metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(found, list) or len(found) > most * embedding.shape[1]:
            raise _refused(path, f"has another tokenizer.ggml.{name} than its embedding has rows")
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise _refused(path, "has no tokenizer (tokenizer.ggml.tokens)")
    for key, value in header.metadata.items():
        if key.endswith((".block_count", ".expert_count")) and not (
            type(value) is int and 0 <= value <= len(header.tensors) * 1024
        ):
            raise _refused(
                path, f"has {one_line(key)} {value!r:.40} and {len(header.tensors)} tensors"
            )


def _refused(path: Path, what: str) -> ModelError:
    return ModelError(f"model_name: the GGUF file {str(path)!r:.300} {what}")
