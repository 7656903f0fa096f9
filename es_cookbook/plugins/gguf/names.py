"""llama.cpp's names of a model's weights, and its own order and offset of their values.

llama.cpp has its own order of the rotary dimensions in Llama's queries and keys, and 1 added to
Gemma's norms. The package `gguf` knows the names.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from es_cookbook.common.errors import ModelError
from es_cookbook.plugins.gguf.header import import_gguf

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
"""transformers' `model_type` -> llama.cpp's architecture."""


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuse an architecture whose names are not known here.

    Raises:
        ModelError: Says which are.
    """
    if config.model_type not in ARCHITECTURES:
        raise ModelError(
            f"llama.cpp's names for {config.model_type} are not known here; accepted: "
            f"{', '.join(ARCHITECTURES)}"
        )


def renaming(config: PreTrainedConfig) -> Callable[[str], str]:
    """Return a function from the name of a weight or bias to llama.cpp's."""
    gguf = import_gguf()
    architecture = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        architecture[ARCHITECTURES[config.model_type]], config.num_hidden_layers
    )

    def rename(name: str) -> str:
        found = names.get_name(name, (".weight", ".bias"))
        if found is None:
            raise ModelError(f"llama.cpp has no place for the weight {name} of {config.model_type}")
        return found

    return rename


def as_llama_cpp(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Return a weight's or bias's values as a file has them."""
    if _has_offset(name, config):
        return tensor + 1
    if (heads := _turned_heads(name, config)) is None:
        return tensor
    # transformers rotates dimension i of a head together with i + half, llama.cpp 2 i with 2 i + 1.
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def as_transformers(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Return the values of a file as transformers has them: the inverse of `as_llama_cpp`."""
    if _has_offset(name, config):
        return tensor - 1
    if (heads := _turned_heads(name, config)) is None:
        return tensor
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _has_offset(name: str, config: PreTrainedConfig) -> bool:
    return config.model_type == "gemma3_text" and name.endswith("norm.weight")


def _turned_heads(name: str, config: PreTrainedConfig) -> int | None:
    """Return the number of heads whose dimensions stand in another order; None if none do."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(name.split(".")[-2]) if config.model_type == "llama" else None
