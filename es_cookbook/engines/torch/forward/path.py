"""How batches of a model run: as flat rows or by its own forward, and in which dtypes."""

import dataclasses

import torch
from typing_extensions import override

_LEAST_SIZE = 128
"""Inputs or outputs of a layer below which products in int8 gain less than half."""


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """How batches of a model run.

    Attributes:
        flat: as flat rows over a slot cache; the rest says how the model's own forward does it.
        padded: prompts of different lengths make a batch, padded on the left and masked.
        mixed: so do different genomes.
        elastic: rows can leave the model's cache and join others; all state of theirs is in it.
        wide: all but the products of a 16-bit model is in float32 (see `modules.widen`).
        products: dtype of linear layers' products on the CPU; None: that of their weights; of int8,
            in float32 until the weights are packed.
        kept: what keys and values on the CPU are kept in, on the flat path.
        cached: the model has a cache that is right; without one every token runs all before it.
    """

    flat: bool = False
    padded: bool = True
    mixed: bool = True
    elastic: bool = True
    cached: bool = True
    wide: bool = False
    products: torch.dtype | None = None
    kept: torch.dtype = torch.float32

    def rows_of(self, weight: torch.Tensor) -> torch.dtype:
        """Dtype of the rows that a linear layer of this weight reads and makes.

        Models keep some weights in float32; what they multiply is not rounded.
        """
        is_narrow = weight.dtype.itemsize < torch.float32.itemsize
        if not (self.wide and self.products and is_narrow):
            return weight.dtype
        return torch.float32 if self.products == torch.int8 else self.products

    def multiplies(self, weight: torch.Tensor) -> bool:
        """Whether products with this weight are in float32 on the CPU, by `products.multiply`."""
        products = self.products or weight.dtype
        return weight.device.type == "cpu" and products in (torch.float32, torch.int8)

    def quantises(self, weight: torch.Tensor) -> bool:
        """Whether a packed copy of this linear weight is in int8 (`int8.Int8Weight`).

        Small ones are not, nor those that a model of 16 bits keeps in float32.
        """
        is_kept = self.wide and weight.dtype == torch.float32
        return self.products == torch.int8 and not is_kept and min(weight.shape) >= _LEAST_SIZE

    @override
    def __str__(self) -> str:
        """In the words of docs/models.md: "flat", or "own" and what the model cannot do.

        >>> print(Path(flat=True), Path(), Path(padded=False, cached=False), sep="; ")
        flat; own; own, equal lengths, no cache
        """
        if self.flat:
            return "flat"
        words = (
            (self.padded, "equal lengths"),
            (self.mixed, "one genome a batch"),
            (self.elastic, "fixed batches"),
            (self.cached, "no cache"),
        )
        return ", ".join(("own", *(word for can, word in words if not can)))


FLAT = Path(flat=True)
