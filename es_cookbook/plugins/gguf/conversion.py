"""Models in GGUF, the format of llama.cpp: one file with configuration, tokenizer and weights.

A file is dequantised once, into a model directory in a cache, and from there on it is a model like
any other: for engines, plans, exports and identities. transformers converts config and tokenizer,
`weights.py` the weights. Plain floats keep their type; quantised weights become bfloat16.

Before a library sees the file, its header is checked (`header.py`).
"""

import contextlib
import copy
import functools
import io
import json
import logging
import math
import os
import shlex
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from typing_extensions import override

from es_cookbook.checkpoints.model_files import CONFIG, Format, Part, cached_model, digest_of
from es_cookbook.common.errors import HubError, ModelError, first_line
from es_cookbook.common.files import ANY_SIZE, opened
from es_cookbook.common.terminal import one_line, say
from es_cookbook.plugins.gguf.header import Header, Value, read_header, refused
from es_cookbook.plugins.hub.client import FIRST_SECONDS, asking, endpoint

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_CONVERSION = 2
"""Version of the conversion; directories of older versions are not used."""
SUFFIX = ".gguf"
FloatType: TypeAlias = Literal["float16", "bfloat16", "q8_0"]
"""Types of the matrices in a written file."""

_ROPE_THETA = 10_000.0
"""llama.cpp's default."""
ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 32.0)
"""Factors of Llama 3.1 and 3.2."""
_SPLITS_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Kinds that split off every digit and then split as GPT-2 does."""
WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "tekken",
)
"""Kinds that use whole words of the vocabulary without merges, and begin texts with BOS."""
_SPLITS_AS_GPT2 = ("", "default", "gpt-2")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' name of a special token -> the format's."""


class GGUFFiles(Format):
    """GGUF files, each converted once; on the Hub it is `owner/name:file.gguf`."""

    accepted = "a GGUF file"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        file = gguf_file(model_name)
        return None if file is None else converted(file)


def gguf_file(model_name: str) -> Path | None:
    """Return the GGUF file of a model name: itself, a directory's only one, or one on the Hub.

    Raises:
        ModelError: The file does not exist, or a directory has several.
    """
    path = Path(model_name)
    if not os.path.isdir(path):
        if not model_name.endswith(SUFFIX):
            return None
        if os.path.exists(path):
            return path
        repository, _, name = model_name.partition(":")
        if name and repository.count("/") == 1 and not repository.startswith((".", "/", "~")):
            return _hub_file(repository, name)
        raise ModelError(
            f"model_name: there is no file {model_name!r}; a file on the Hub is "
            f"owner/name:file{SUFFIX}"
        )
    if (path / CONFIG).exists():
        return None
    files = sorted(each for each in path.iterdir() if each.suffix == SUFFIX)
    if len(files) > 1:
        raise ModelError(
            f"model_name: the directory {str(path)!r} has {len(files)} GGUF files; name one: "
            f"model_name={shlex.quote(str(files[0]))}"
        )
    return files[0] if files else None


def _hub_file(repository: str, name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, name)
        if not isinstance(found, str):
            with asking(f"model {repository}"):
                about = HfApi().model_info(repository, timeout=FIRST_SECONDS)
                files = [each.rfilename for each in about.siblings or []]
                if name not in files:
                    there = ", ".join(each for each in files if each.endswith(SUFFIX)) or "none"
                    raise HubError(f"it has no such file; its GGUF files: {there:.500}")
                say(f"fetching {name} of {repository} from {endpoint()}")
                found = hf_hub_download(repository, name)
    except (HubError, HFValidationError) as error:
        raise ModelError(f"model_name: {repository}:{name}: {error}") from error
    return Path(found)


def converted(path: Path) -> Path:
    """Return the model directory of a GGUF file; convert it if it is not in the cache.

    Raises:
        ModelError: It cannot be read or converted; says why.
    """
    try:
        with opened(path, ANY_SIZE, None) as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise ModelError(f"model_name: {error}") from error
    digest = _digest(path, status.st_size, status.st_mtime_ns, status.st_ino)
    what = f"the GGUF file {str(path)!r:.300}"
    return cached_model(what, f"{digest}-{_CONVERSION}", functools.partial(_convert, path))


@functools.lru_cache(16)
def _digest(path: Path, *_version: int) -> str:
    return digest_of(path)


def _convert(path: Path, directory: Path) -> None:
    header = read_header(path)
    say(f"converting {path.name} once")
    try:
        with _quiet():
            _write_model(path, header, directory)
    except ModelError:
        raise
    except Exception as error:  # The libraries raise many kinds; to the user it is one mistake.
        raise refused(path, f"cannot be converted: {first_line(error)}") from error


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Suppress transformers' progress bars and warnings."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)


def _write_model(path: Path, header: Header, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from es_cookbook.plugins.gguf.weights import is_known, write_weights

    # Alone in a directory, so that nothing beside the file is read with it.
    link = directory / f"model{SUFFIX}"
    link.symlink_to(path.resolve())
    config = read_config(link, header)
    with torch.device("meta"):
        model = cast(
            "PreTrainedModel", AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        )
    needed = sum(parameter.numel() for parameter in model.parameters())
    # The last layers may be there to guess several tokens at once.
    blocks = cast(int, header.metadata[f"{header.metadata['general.architecture']}.block_count"])
    layers = range(config.num_hidden_layers, blocks)
    aside = (ROPE_FACTORS, *(f"blk.{n}." for n in layers))
    there = sum(math.prod(t.shape) for n, t in header.tensors.items() if not n.startswith(aside))
    if needed != there:
        raise refused(path, f"has {there:,} parameters; transformers knows {needed:,} of such")
    model.config.dtype = getattr(torch, header.dtype)
    vars(model.config).pop("_model_name_or_path", None)  # The name in the file.
    model.generation_config.eos_token_id = _end_tokens(header.metadata) or None
    # AutoTokenizer would read the whole file once more, to choose this class.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=link.name)
    _set_split(path, tokenizer.backend_tokenizer, header.metadata)
    tokenizer = _with_its_tokens(tokenizer, header.metadata)
    if is_known(header, model):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
        write_weights(path, header, model, directory / "model.safetensors")
    else:
        _load_weights(path, link, model)
        model.save_pretrained(directory)
    link.unlink()
    tokenizer.save_pretrained(directory)


def _load_weights(path: Path, link: Path, model: "PreTrainedModel") -> None:
    """Load all weights of a file, dequantised by transformers, into a model."""
    from transformers.utils.quantization_config import GgufConfig

    result = type(model).from_pretrained(
        link.parent,
        dtype=model.config.dtype,
        output_loading_info=True,
        trust_remote_code=False,
        gguf_file=link.name,
        config=copy.deepcopy(model.config),
        quantization_config=GgufConfig(dequantize=True),
    )
    loaded, loading = cast("tuple[PreTrainedModel, dict[str, list[str]]]", result)
    if missing := sorted(loading["missing_keys"]):  # transformers makes them up at random
        raise refused(path, f"lacks weights: {missing[0]} and {len(missing) - 1} more")
    for name, tensor in loaded.state_dict().items():
        if not tensor.isfinite().all():
            raise refused(path, f"has numbers that are not finite, in {name}")
    # The loaded model is still marked as quantised and cannot be saved.
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()


def read_config(path: Path, header: Header) -> "PreTrainedConfig":
    """Read the model's config, with what transformers omits: head sizes, scaled positions."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, trust_remote_code=False, local_files_only=True
    )
    of_model = f"{header.metadata['general.architecture']}."

    def said(name: str, default: object = None) -> Any:  # noqa: ANN401 - as its kind of file has it
        return header.metadata.get(f"{of_model}{name}", default)

    for name in ("block_count", "context_length", "epsilon"):  # Or transformers makes them up.
        if not any(key.startswith(of_model) and key.endswith(name) for key in header.metadata):
            raise refused(path, f"does not say {of_model}{name}")
    for name in ("bos", "eos", "pad"):
        setattr(config, f"{name}_token_id", _special_token(header.metadata, _SPECIAL[name]))
    if (length := said("attention.key_length")) is not None:
        if hasattr(config, "head_dim"):
            config.head_dim = length
        if hasattr(config, "query_pre_attn_scalar"):  # As llama.cpp has it; 62: Gemma 3 27B.
            scale = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = scale if config.num_hidden_layers == 62 else length
    for field, name in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
        if hasattr(config, field):
            setattr(config, field, f"blk.0.{name}.bias" in header.tensors)
    window = said("attention.sliding_window")
    is_sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if is_sliding and not window:
        raise refused(path, f"does not say {of_model}attention.sliding_window")
    if window and window < config.max_position_embeddings:
        if not hasattr(config, "sliding_window"):
            raise refused(path, f"attends to {window} tokens, which {type(config).__name__} cannot")
        config.sliding_window = window
    rope = rope_of(config)
    if rope:  # transformers' defaults differ from those of some architectures.
        rope["rope_theta"] = said("rope.freq_base", _ROPE_THETA)
    if (base := said("rope.freq_base_swa")) is not None:
        cast("dict[str, Any]", config.rope_parameters)["sliding_attention"]["rope_theta"] = base
    turned = said("rope.dimension_count")
    if rope and turned is not None and not hasattr(config, "global_head_dim"):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if "partial_rotary_factor" in rope:
            rope["partial_rotary_factor"] = turned / head
        elif turned != head:
            what = f"turns {turned} of a head's {head} dimensions"
            raise refused(path, f"{what}, which {type(config).__name__} cannot")
    scaling = str(said("rope.scaling.type", "none"))
    if scaling == "linear":
        rope.update(rope_type="linear", factor=said("rope.scaling.factor"))
    elif scaling != "none":
        raise refused(path, f"stretches positions by {one_line(scaling)!r:.40}, unknown here")
    if (tensor := header.tensors.get(ROPE_FACTORS)) is not None:
        with path.open("rb") as file:
            file.seek(tensor.start)
            stored = torch.frombuffer(bytearray(file.read(tensor.size)), dtype=torch.float32)
        for factor in _LLAMA3_FACTORS:
            rope.update(_LLAMA3, factor=factor)
            if torch.allclose(llama3_factors(config), stored, rtol=1e-3):
                return config
        raise refused(path, f"stretches positions by {ROPE_FACTORS} in another way than Llama 3")
    return config


def rope_of(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return the RoPE parameters of layers with full attention."""
    found = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    return found.get("full_attention", found)


def llama3_factors(config: "PreTrainedConfig") -> "torch.Tensor":
    """Return the factors by which llama.cpp divides RoPE frequencies for Llama 3 scaling."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretched = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    exponents = torch.arange(len(stretched), dtype=torch.float32) / len(stretched)
    return rope_of(config)["rope_theta"] ** -exponents / stretched


def _set_split(path: Path, tokenizer: "Tokenizer", metadata: Mapping[str, Value]) -> None:
    """Set the pre-tokenizer that the file names; transformers does not know all kinds."""
    from tokenizers import normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = str(metadata.get("tokenizer.ggml.pre", ""))
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        if pre in GGUF_PRE_TOKENIZER_SPLITS:  # transformers would split by it nevertheless.
            raise refused(path, f"splits text in the way {pre!r}, which its tokenizer does not")
        is_metaspace = isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace)
        if metadata.get("tokenizer.ggml.model") == "llama" and metadata.get(
            "tokenizer.ggml.add_space_prefix", True
        ):  # Before a text, and behind each special token.
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            tokenizer.normalizer = normalizers.Sequence(steps)
            tokenizer.pre_tokenizer = None if is_metaspace else tokenizer.pre_tokenizer
        elif is_metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "never", split=False)
        return
    if pre in WHOLE_WORDS:
        cast("BPE", tokenizer.model).ignore_merges = True
    if pre in _SPLITS_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
        )
    elif pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *_SPLITS_AS_GPT2):
        raise refused(path, f"splits text in the way {one_line(pre)!r:.40}, unknown here")


def _with_its_tokens(
    tokenizer: "PreTrainedTokenizerFast", metadata: Mapping[str, Value]
) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with the file's special tokens, also where texts begin and end.

    transformers adds those of its classes, behind the last row of the embedding.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    tokens = cast("list[str]", metadata["tokenizer.ggml.tokens"])
    if len(tokenizer) > len(tokens):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < len(tokens)]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(state)),
            chat_template=tokenizer.chat_template,
        )
    for name, key in _SPECIAL.items():
        token = _special_token(metadata, key)
        setattr(tokenizer, f"{name}_token", None if token is None else tokens[token])
    # If a file does not say, llama.cpp decides by the kind of tokenizer.
    kinds = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    is_begun = any(kind in ("llama", *WHOLE_WORDS) for kind in kinds)
    template, added = ["$A"], list[tuple[str, int]]()
    for name, default in (("bos", is_begun), ("eos", False)):
        token = _special_token(metadata, name)
        if token is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            template.insert(0 if name == "bos" else len(template), tokens[token])
            added.append((tokens[token], token))
    if added:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=added
        )
    return tokenizer


def _special_token(metadata: Mapping[str, Value], name: str) -> int | None:
    """Return a special token's id; None if it is not in the vocabulary, as in llama.cpp."""
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = cast("list[str]", metadata["tokenizer.ggml.tokens"])
    return token if type(token) is int and 0 <= token < len(tokens) else None


def _end_tokens(metadata: Mapping[str, Value]) -> list[int]:
    """Return the tokens that end an answer in llama.cpp; chat turns often end with the second."""
    found = (_special_token(metadata, name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if token is not None))
