"""Hugging Face causal LMs and their tokenizers: reading, writing, vocabularies.

Errors of libraries become one sentence.
"""

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from es_cookbook.checkpoints.linear_weights import linear_weights, named_weights, split_member
from es_cookbook.checkpoints.model_files import (
    CONFIG,
    TOKENIZER_FILES,
    model_directory,
    no_tokenizer,
    weight_paths,
)
from es_cookbook.checkpoints.quantised import (
    QuantisedCheckpoint,
    QuantisedWeight,
    QuantLinear,
    parameter_name,
    quantised_checkpoint,
    quantised_layers,
)
from es_cookbook.checkpoints.tensors import ReadTensors, weight_files
from es_cookbook.common.errors import EngineError, ModelError, first_line
from es_cookbook.common.files import LARGEST_CONFIG, parsed, read_file, whole_directory
from es_cookbook.common.terminal import one_line
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder

AsStored: TypeAlias = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""(parameter's name, value) -> the names and values that stand for it."""


def load_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """Load the model's own tokenizer, from a directory or the Hub.

    Raises:
        ModelError: It is missing or cannot be read; says where.
    """
    directory = model_directory(model_name, "tokenizer")
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        raise no_tokenizer(model_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        tokenizer.decode(tokenizer.encode("a b"))  # Values of other types fail only here.
        return tokenizer
    except Exception as error:  # transformers raises many kinds; to the user it is one mistake
        raise ModelError(
            f"model_name: cannot load the tokenizer of {model_name!r}: {first_line(error)}"
        ) from error


def load_causal_lm(model_name: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """Load the model in evaluation mode on `device`.

    Linear layers of a quantised checkpoint are `QuantLinear`: each has its weight dequantised, in
    the model's dtype, and the numbers and scales that it comes from.

    The dtype is "auto" for the checkpoint's own, or a torch dtype's name.

    Raises:
        ModelError: Config or weights are missing or cannot be read; says where.
    """
    directory = _checked_directory(model_name)
    checkpoint = quantised_checkpoint(model_name)
    quantised: dict[str, QuantisedWeight] = {}
    try:
        with no_progress_bar():
            if checkpoint is None:
                held = dtype if dtype == "auto" else getattr(torch, dtype)
                loaded = AutoModelForCausalLM.from_pretrained(
                    directory, dtype=held, output_loading_info=True, trust_remote_code=False
                )
            else:
                quantised = {layer: checkpoint.weight(layer) for layer in checkpoint.layers}
                loaded = _load_quantised(directory, checkpoint, quantised, dtype)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model_name: cannot load {model_name!r}: {first_line(error)}") from error
    model, loading = cast("tuple[PreTrainedModel, dict[str, list[str]]]", loaded)
    if missing := sorted(loading["missing_keys"]):  # transformers makes them up at random
        raise ModelError(
            f"model_name: {model_name!r} lacks weights of its architecture: {missing[0]} and "
            f"{len(missing) - 1} more"
        )
    _make_quantised(model, {layer: weight.to(device) for layer, weight in quantised.items()})
    # As it was given, not where the cache has it: PEFT and TRL write it into what they save.
    model.name_or_path = model.config.name_or_path = model_name
    cast("torch.nn.Module", model).to(device)  # in place; `PreTrainedModel.to` has no usable type
    return model.eval().requires_grad_(False)


def load_architecture(model_name: str, weights: bool = True) -> PreTrainedModel:
    """Build the model without its weights, to inspect its structure; takes no memory.

    If `weights`, the directory must have them nevertheless.

    Raises:
        ModelError: It cannot be read, or is not a causal LM; says where.
    """
    directory = _checked_directory(model_name, weights)
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            dtype = config.dtype
            # A dtype would be torch's default in all threads meanwhile, also in those that sample.
            model = AutoModelForCausalLM.from_config(config, dtype=None, trust_remote_code=False)
            model.config.dtype = dtype
            return model
    except Exception as error:
        raise ModelError(f"model_name: cannot load {model_name!r}: {first_line(error)}") from error


def architecture_for(search_space: SearchSpaceBuilder, model_name: str) -> PreTrainedModel:
    """Build the architecture, with quantised layers if the search space moves their parts.

    Raises:
        ModelError: As `quantised_architecture`.
    """
    if search_space.moves_quantised:
        return quantised_architecture(model_name)
    return load_architecture(model_name)


def quantised_architecture(model_name: str) -> PreTrainedModel:
    """Build the architecture, with the quantised layers of a quantised checkpoint.

    Raises:
        ModelError: As `load_architecture`, or it is quantised in an unknown format or of another
            architecture.
    """
    architecture = load_architecture(model_name)
    if (checkpoint := quantised_checkpoint(model_name)) is not None:
        _make_quantised(architecture, {c: checkpoint.outline(c) for c in checkpoint.layers})
    return architecture


def _load_quantised(
    directory: Path,
    checkpoint: QuantisedCheckpoint,
    quantised: Mapping[str, QuantisedWeight],
    dtype: str,
) -> tuple[object, object]:
    """Load a model as `from_pretrained` does, with quantised weights dequantised."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    # transformers would want its own quantisers for it.
    vars(config).pop("quantization_config", None)
    held = cast("torch.dtype | None", config.dtype if dtype == "auto" else getattr(torch, dtype))
    if held is None:
        held = quantised[checkpoint.layers[0]].dtype
    weights = {f"{c}.weight": weight.dequantised().to(held) for c, weight in quantised.items()}
    plain = checkpoint.plain(checkpoint.files, held)
    weights |= {name: plain[name] for name in plain if name not in weights}
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    model, loading = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=held, output_loading_info=True
    )
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, loading


def _make_quantised(model: PreTrainedModel, quantised: Mapping[str, QuantisedWeight]) -> None:
    parents = dict(model.named_modules())
    for layer, weight in quantised.items():
        parent, _, name = layer.rpartition(".")
        found = getattr(parents.get(parent), name, None)
        if not isinstance(found, torch.nn.Linear) or found.weight.shape != weight.shape:
            raise ModelError(
                f"model_name: the quantised layer {layer} of shape {tuple(weight.shape)} is "
                f"no linear layer of that shape in {type(model).__name__}"
            )
        setattr(parents[parent], name, QuantLinear(found, weight))


def save_model(
    write: Callable[[Path], None], tokenizer: PreTrainedTokenizerBase, path: Path
) -> None:
    """Write a Hugging Face model directory under another name, and rename it when it is complete.

    `write` fills it with all but the tokenizer, as `PreTrainedModel.save_pretrained` does.

    Raises:
        EngineError: The path exists.
    """
    if path.exists():
        raise EngineError(f"cannot save the centre: {str(path)!r} exists already")
    with whole_directory(path) as directory:
        write(directory)
        tokenizer.save_pretrained(directory)


def base_parameters(
    model_name: str, architecture: PreTrainedModel, names: Collection[str], dtype: str
) -> tuple[ReadTensors, torch.dtype]:
    """Return a base model's parameters as an engine holds them, each read when needed.

    A parameter is looked up in the checkpoint under its own name, or under another that is tied to
    it, an expert's as a part of its parameter, dequantised, and cast to the engine's dtype. Where
    the checkpoint stores the model otherwise (some architectures fuse or rename on loading, or keep
    parameters in float32 for any dtype), transformers loads the whole model, as an engine does,
    and this takes its memory. Parts of a quantised weight are as stored.
    Threads may share it.

    Args:
        model_name: directory or Hub name.
        architecture: the model without its weights.
        names: names that will be read, as in `parameter_infos`.
        dtype: "auto" for the checkpoint's own, or a dtype's name.

    Returns:
        The parameters, and the dtype that they are cast to.

    Raises:
        ModelError: The checkpoint cannot be read.
    """
    files = weight_files(weight_paths(model_name))
    cast_to = _held_dtype(architecture, files) if dtype == "auto" else _dtype_of(dtype)
    parts: Mapping[str, torch.Tensor] = {}
    if (checkpoint := quantised_checkpoint(model_name)) is not None:
        files, parts = checkpoint.plain(files, cast_to), checkpoint.parameters()
    parameters = dict(architecture.named_parameters())
    tied = reversed(first_names(architecture).items())
    stored_as = {first: name for name, first in tied if name in files}
    needed = {split_member(name)[0] for name in names if name not in parts}

    def read_stored(name: str) -> torch.Tensor:
        parameter, expert = split_member(name)
        tensor = files[stored_as[parameter]]
        return (tensor if expert is None else tensor[expert]).to(cast_to)

    read: Callable[[str], torch.Tensor] = read_stored
    in_float32 = architecture._get_dtype_plan(cast_to)  # pyright: ignore[reportPrivateUsage]
    if in_float32 or not all(
        name in stored_as and files[stored_as[name]].shape == parameters[name].shape
        for name in needed
    ):
        model = load_causal_lm(model_name, dtype, torch.device("cpu"))
        read = dict(named_weights(model)).__getitem__

    def read_any(name: str) -> torch.Tensor:
        return parts[name] if name in parts else read(name).detach()

    return ReadTensors(names, read_any), cast_to


def first_names(model: PreTrainedModel) -> dict[str, str]:
    """Map every name of a parameter, in the model's order, to the first name tied to it."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters}


def stored_form(model: PreTrainedModel) -> AsStored:
    """Return a function to the form in which checkpoints of the architecture store a parameter.

    transformers fuses and renames parameters of some architectures when it loads them (experts,
    for example), and other libraries know the checkpoints' names only.
    """
    found = get_model_conversion_mapping(model, add_legacy=False)
    conversions = [one for one in found if not isinstance(one, PrefixChange)]
    vars(model)["_weight_conversions"] = conversions or None  # asked for once, not each time
    revert = cast("Callable[..., dict[str, torch.Tensor]]", revert_weight_conversion)
    return lambda name, tensor: revert(model, {name: tensor})


def parameter_infos(model: PreTrainedModel) -> list[ParameterInfo]:
    """Return every parameter by its Hugging Face name; tied ones once, by the first name.

    Experts' parameters are there as their members (`linear_weights.named_weights`).
    After a quantised weight come the scales, zero points and codes that it is made of.
    """
    quantised = {f"{layer}.weight": (layer, weight) for layer, weight in quantised_layers(model)}
    transposed = linear_weights(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    infos: list[ParameterInfo] = []
    for name, parameter in named_weights(model):
        layer, weight = quantised.get(name, (name, None))
        bits = None if weight is None else weight.bits
        kind = "embedding" if id(parameter) in tables else "other"
        infos.append(
            ParameterInfo(
                name,
                tuple(parameter.shape),
                "linear" if name in transposed else kind,
                bits,
                transposed.get(name, False),
                _rms(parameter) if kind == "embedding" else None,
            )
        )
        if weight is not None:
            infos += [
                ParameterInfo(parameter_name(layer, part), tuple(tensor.shape), part, bits)
                for part, tensor in weight.parameters().items()
            ]
    return infos


def _rms(table: torch.Tensor) -> float | None:
    """Return the root mean square of a table's first rows; None if it has no values."""
    return None if table.is_meta else float(table.detach()[:1024].float().square().mean().sqrt())


def end_of_sequence_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the tokens that end a sequence by generation config, config or tokenizer.

    Raises:
        ModelError: One of them is not the number of a token.
    """
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        for token in cast("list[object]", ids if isinstance(ids, list) else [ids]):
            if token is not None and not (type(token) is int and 0 <= token < 2**31):
                raise ModelError(
                    "model_name: eos_token_id must be the number of a token, or a list of such, "
                    f"found {token!r:.60} in the {type(source).__name__}"
                )
            found |= set() if token is None else {token}
    return tuple(sorted(found))


class Vocabulary:
    """The rows of a model's embedding that are tokens: only these are sampled.

    Embeddings are often longer than the tokenizer, padded to a round number or for tokens that were
    never added, and a tokenizer may have holes. Such rows have no text. Their logits are far below
    all others, so the distribution is over existing tokens.

    Attributes:
        size: rows of its embedding.
        ends: tokens that end a sequence, which its tokenizer need not know.
        never: rows of its head without a token, which are not sampled.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.size = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
        self.ends = end_of_sequence_ids(model, tokenizer)
        named = {*tokenizer.get_vocab().values(), *self.ends}
        # A head may have fewer rows than the embedding, or more.
        num_logits = getattr(model.get_output_embeddings(), "out_features", self.size)
        self.never = frozenset(range(num_logits)) - named


def keep_tokens(logits: torch.Tensor, never: torch.Tensor) -> torch.Tensor:
    """Mask logits in place: those without a token get the lowest value of their type.

    They stay finite, since kernels read infinities slowly.
    """
    return logits.index_fill_(-1, never, torch.finfo(logits.dtype).min)


def _held_dtype(architecture: PreTrainedModel, files: ReadTensors) -> torch.dtype:
    """Return the dtype that transformers takes for "auto": the config's, or the first weight's."""
    configured = cast("torch.dtype | None", architecture.config.dtype)
    if configured is not None:
        return configured
    dtypes = (tensor.dtype for tensor in files.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"a dtype is float32, bfloat16 or float16, found {name!r:.60}")
    return found


@contextlib.contextmanager
def no_progress_bar() -> Generator[None]:
    """Hide transformers' progress bars for weights inside the block."""
    if not is_progress_bar_enabled():
        yield
        return
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()


def _checked_directory(model_name: str, weights: bool = True) -> Path:
    """Return a model's directory, after checks that it is one and runs no code of others."""
    path = model_directory(model_name, "weights" if weights else "config")
    if not (path / CONFIG).exists():
        raise ModelError(
            f"model_name: directory {model_name!r} has no config.json: it is no model directory"
        )
    if weights:
        weight_paths(model_name)  # refuses
    _check_kernels(model_name, path / CONFIG)
    return path


def _check_kernels(model_name: str, path: Path) -> None:
    """Refuse a config that names kernels on the Hub, which transformers would fetch and run."""
    try:
        waiting = [parsed(read_file(path, LARGEST_CONFIG, None))]
    except (OSError, ValueError):  # Loading the model reports it.
        return
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            for name, value in cast("dict[str, object]", found).items():
                waiting.append(value)
                if name.endswith(("attn_implementation", "experts_implementation")) and (
                    "/" in str(value)
                ):
                    raise ModelError(
                        f"model_name: the config.json of {model_name!r} has kernels of others run, "
                        f"as {one_line(name)} {value!r:.60}; take that out of it"
                    )
