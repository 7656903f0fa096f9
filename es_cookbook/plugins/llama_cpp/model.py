"""What the engine knows of a model besides its file: tokenizer, centre, and places of factors."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.checkpoints.models import (
    Vocabulary,
    load_architecture,
    load_tokenizer,
    parameter_infos,
)
from es_cookbook.checkpoints.peft import read_adapter
from es_cookbook.checkpoints.tensors import dtype_name
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder
from es_cookbook.plugins.gguf.export import llama_cpp_factors, write_factors
from es_cookbook.plugins.gguf.names import check_architecture

_BYTES_OF_KEY = 2
"""Keys and values are kept in float16."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its weights, and the centre of a search space over it.

    Attributes:
        tokenizer: the file's own.
    """

    name: str
    architecture: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    space: SearchSpace

    @functools.cached_property
    def centre(self) -> Centre:
        """The centre of an adapter, which begins without the model's weights."""
        return Centre({}, self.space)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.architecture, self.tokenizer)

    @property
    def dtype(self) -> str:
        """The dtype of the dequantised weights."""
        dtype = cast("torch.dtype | None", self.architecture.config.dtype)
        return dtype_name(dtype or torch.float32)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        config = self.architecture.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * config.num_key_value_heads * head * _BYTES_OF_KEY

    @functools.cached_property
    def factors(self) -> dict[str, int]:
        """llama.cpp's names of the adapter's factors, and their bytes, in a fixed order."""
        return {name: tensor.numel() * 4 for name, tensor in self._factors(Genome())}

    def write_genome(self, file: Path, genome: Genome) -> None:
        """Write a genome as an adapter of llama.cpp."""
        assert self.space.adapter is not None
        lora = self.space.adapter.lora
        write_factors(file, self.architecture.config, lora, self._factors(genome))

    def fill(self, factors: npt.NDArray[np.float32], genome: Genome) -> None:
        """Write a genome's factors, one after the other."""
        flat, done = torch.from_numpy(factors), 0
        for _, tensor in self._factors(genome):
            flat[done : done + tensor.numel()] = tensor.reshape(-1)
            done += tensor.numel()

    def _factors(self, genome: Genome) -> Iterator[tuple[str, torch.Tensor]]:
        adapter = self.space.adapter
        assert adapter is not None
        values: Callable[[str], torch.Tensor] = functools.partial(self.centre.perturbed, genome)
        for weight in adapter.targets:
            ((a, b),) = adapter.factors(weight, [values])
            yield from self._placed(weight, a, b)

    @functools.cached_property
    def _placed(self) -> Callable[..., Iterator[tuple[str, torch.Tensor]]]:
        return llama_cpp_factors(self.architecture.config)


def load(model_name: str, search_space: SearchSpaceBuilder) -> Model:
    """Read a model's config and tokenizer.

    Raises:
        ModelError: They cannot be read, llama.cpp's names of the architecture are not known here,
            or the search space does not suit the model.
    """
    tokenizer, architecture = load_tokenizer(model_name), load_architecture(model_name)
    check_architecture(architecture.config)
    directory = model_directory(model_name)
    if (directory / "generation_config.json").is_file():
        architecture.generation_config = GenerationConfig.from_pretrained(directory)
    search_space = search_space.tokenized(
        functools.partial(tokenizer.encode, add_special_tokens=False)
    )
    space = search_space(parameter_infos(architecture), read_adapter)
    return Model(model_name, architecture, tokenizer, space)
