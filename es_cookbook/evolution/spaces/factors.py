"""Thin factors beside shared weights: how engines host a whole population at once.

A space says by `SearchSpace.rank` or `SearchSpace.adapter` that its genomes have such a form,
and engines ask for nothing else:

- `rank`: each term of a genome is a product of two noises, beside the centre's weights.
- `AdapterFactors`: each genome has its own A and B, beside the base's weights.

Genomes of a space with neither are dense: each needs its own weights, in place of the model's.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Values: TypeAlias = "Callable[[str], torch.Tensor]"
"""Returns the values of the space's parameters, by name, at one point of the space."""


def term_scales(coefficients_S: Sequence[float], rank: int) -> NDArray[np.float32]:
    """Return the factors on A Bᵀ: coefficient / √rank, rounded once from float64 to float32."""
    return (np.array(coefficients_S, np.float64) / math.sqrt(rank)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LoRA:
    """A LoRA adapter's rank, and what its B A is scaled by.

    Attributes:
        alpha: the scale, times the rank or its root.
        rslora: whether its root.
    """

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor on B A, rounded to float32."""
        return float(np.float32(self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)))


@dataclasses.dataclass(frozen=True)
class AdapterFactors:
    """Adapted weights answer with W + s · B A, where A and B are made of the space's parameters.

    A is (rank, in) and B (out, rank), as in PEFT, also where W is stored (in, out).

    Attributes:
        targets: name of an adapted weight -> names of the parameters that give its A and its B.
        lora: rank and scale of all of them.
        transposed: names of adapted weights that are stored (in, out).
    """

    are_parameters: ClassVar[bool] = True
    """Whether A and B are parameters themselves, and not made of them."""

    targets: Mapping[str, tuple[str, str]]
    lora: LoRA
    transposed: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)

    def __getstate__(self) -> dict[str, object]:
        """Return only the fields: what a subclass has read and cached is read again elsewhere."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def factors(
        self, name: str, values_G: Sequence[Values]
    ) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        """Yield A and B of one adapted weight at each of several points, on the values' device."""
        a, b = self.targets[name]
        for value in values_G:
            yield value(a), value(b)

    def merged(
        self, name: str, weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor"
    ) -> "torch.Tensor":
        """Return an adapted weight with s · B A added, in float32, on the weight's device."""
        product = (b @ a) * self.lora.scale
        product = product.T if name in self.transposed else product
        return weight.float() + product.to(weight.device)


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B of a weight, as PEFT calls them.

    >>> factor_names("lm_head.weight")
    ('lm_head.lora_A.weight', 'lm_head.lora_B.weight')
    >>> factor_names("experts.down_proj[3]")
    ('experts.down_proj[3].lora_A.weight', 'experts.down_proj[3].lora_B.weight')
    """
    module = weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def factor_shapes(weights: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B of each weight (out, in), by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in weights.items():
        a, b = factor_names(name)
        shapes[a], shapes[b] = (rank, columns), (rows, rank)
    return shapes


@dataclasses.dataclass(frozen=True)
class StoredAdapter:
    """A trained adapter that a space starts from.

    Attributes:
        weights: name -> (out, in) of those it adapts.
        read: reads all factors: name -> float32 tensor. Picklable.
    """

    path: Path
    lora: LoRA
    weights: Mapping[str, tuple[int, int]]
    read: "Callable[[], Mapping[str, torch.Tensor]]" = dataclasses.field(compare=False)


ReadAdapter: TypeAlias = Callable[[Path, Mapping[str, tuple[int, int]]], StoredAdapter]
"""Opens the adapter in a directory, which has to be of some of these weights (out, in) and no
others; `es_cookbook.checkpoints.peft.read_adapter`."""
