"""Vectors that genomes have beside shared weights: virtual tokens, and additions to activations.

A table holds the vectors of all resident genomes for one module of the model. The module's
replacement, or a hook on it, finds each row's genome as low-rank parts do, so any mix of genomes
runs in one batch:

- Virtual tokens have ids after the model's vocabulary, the same ids for all genomes. The embedding
  looks them up in the table of the row's genome. To all else they are tokens of a prompt: they are
  attended to, cached and shared like others.
- Vectors of layers are added to a layer's outputs at every position.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch.kernels.modules import has_kernels
from es_cookbook.evolution.spaces.base import SearchSpace

VectorFactors: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A table's vectors, and the genome of each block of a batch's rows."""
_Factors: TypeAlias = "Callable[[int], VectorFactors | None]"
"""Those of a table, by its index, for the batch of the calling thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class VectorTable:
    """Vectors of all resident genomes for one module.

    Attributes:
        vectors_G: (genomes, vectors, hidden), float32; the last row is 0.
    """

    vectors_G: torch.Tensor

    def __len__(self) -> int:
        return len(self.vectors_G)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that batches read."""
        return (self.vectors_G,)

    def rows(self, genome_of_block: torch.Tensor) -> VectorFactors:
        """Return the vectors for blocks of these genomes."""
        return self.vectors_G, genome_of_block


def host_vectors(model: PreTrainedModel, space: SearchSpace, first: int, factors: _Factors) -> None:
    """Have modules use the tables from index `first` on, in the order of the space's vectors."""
    for index, (name, where) in enumerate((space.vectors or {}).items(), first):
        module = model.get_submodule(where)
        if len(space.shapes[name]) == 2:
            model.set_input_embeddings(_WithVirtualTokens(module, index, factors))
        else:
            module.register_forward_hook(_adding(index, factors))


def check_vectors(model: PreTrainedModel, space: SearchSpace, context_length: int) -> None:
    """Refuse a model that cannot host a space's vectors; its weights do not matter.

    Raises:
        ConfigError: Its embedding is more than a table, or has another width than its layers; or
            virtual tokens fill the context.
    """
    if space.vectors is None:
        return
    if context_length < space.num_virtual + 2:
        raise ConfigError(
            f"search_space: {space.num_virtual} virtual tokens leave no room for a prompt and its "
            f"answer in a context of {context_length} tokens; lower search_space.num_tokens or "
            "raise engine.max_model_len"
        )
    embedding, config = model.get_input_embeddings(), model.config.get_text_config()
    is_table = type(embedding).forward is nn.Embedding.forward
    for name, where in space.vectors.items():
        *virtual, width = space.shapes[name]
        is_own = model.get_submodule(where) is embedding and is_table
        if width != getattr(config, "hidden_size", None) or (virtual and not is_own):
            raise ConfigError(
                f"search_space: {type(model).__name__} cannot have vectors of genomes at {where}, "
                "because its embedding scales its rows, or has another width than its layers; use "
                "search_space=adapter"
            )


class _WithVirtualTokens(nn.Module):
    """An embedding, with ids after its own for the virtual tokens of each row's genome."""

    def __init__(self, embedding: nn.Module, index: int, factors: _Factors) -> None:
        super().__init__()
        assert isinstance(embedding, nn.Embedding)
        self.embedding, self.num_embeddings = embedding, embedding.num_embeddings
        self._index, self._factors = index, factors

    @property
    def weight(self) -> torch.Tensor:
        """The embedding's own."""
        return self.embedding.weight

    @override
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        virtual = ids >= self.num_embeddings
        found = self.embedding(ids.masked_fill(virtual, 0))
        factors = self._factors(self._index)
        # A GPU would have the host wait for the answer.
        if factors is not None and (not has_kernels(ids.device) or virtual.any()):
            vectors_G, genome_of_block = factors
            rows = genome_of_block[:, None].expand(-1, ids.numel() // len(genome_of_block))
            own = rows.reshape(ids.shape), (ids - self.num_embeddings).clamp(min=0)
            found = torch.where(virtual[..., None], vectors_G[own].to(found.dtype), found)
        return found


def _adding(index: int, factors: _Factors) -> Callable[..., object]:
    """Return a forward hook that adds the vector of each row's genome to a layer's outputs."""

    def hook(module: nn.Module, inputs: object, output: object) -> object:
        del module, inputs
        if (own := factors(index)) is None:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        hidden, *others = cast("tuple[torch.Tensor, ...]", outputs)
        vectors_G, genome_of_block = own
        blocks = hidden.reshape(len(genome_of_block), -1, hidden.shape[-1])
        moved = (blocks + vectors_G[genome_of_block].to(hidden.dtype)).view_as(hidden)
        return (moved, *others) if isinstance(output, tuple) else moved

    return hook
