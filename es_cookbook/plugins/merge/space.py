"""Coefficients of several LoRA adapters: merging as a search over a few numbers.

A weight W answers with W + Σ_k c_k · s_k B_k A_k, where A_k, B_k and the scale s_k are those of
trained adapter k (task arithmetic, Ilharco et al. 2022, arXiv:2212.04089; searched by evolution in
Akiba et al. 2024, arXiv:2403.13187). The parameters are the coefficients c, one vector of them for
the whole model or for each layer. They start at `start_at`, 1 / the number of adapters if unset:
the mean of the adapters. With c = (1, 0, ...) the model is the base with the first adapter.

The sum is one adapter of the ranks together: A is the factors A_k above each other, and B the
products c_k · (s_k B_k) beside each other, each rounded to float32 once. So engines host a
population as they host any adapters, and the result is exported as one.

There are so few parameters that CMA-ES (`optimizer=cma`) learns their covariance. A checkpoint that
was fine-tuned whole is merged by its adapter (`es-cookbook export rank=16` of a run,
or any tool that fits one to the difference of two checkpoints).
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder, layer_of
from es_cookbook.evolution.spaces.factors import (
    AdapterFactors,
    LoRA,
    ReadAdapter,
    StoredAdapter,
    Values,
    factor_names,
)
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch

_COEFFICIENTS = "coefficients"
"""Last part of the name of a vector of coefficients."""


@chz.chz
class Merge(SearchSpaceBuilder):
    """Coefficients of trained LoRA adapters, added to the same base."""

    has_adapter: ClassVar[bool] = True
    start_option: ClassVar[str] = "adapters"

    adapters: tuple[str, ...] = chz.field(
        default=(), doc="directories of the PEFT LoRA adapters, two or more, separated by commas"
    )
    each: Literal["model", "layer"] = chz.field(
        default="model", doc="what has separate coefficients: the model, or each of its layers"
    )
    start_at: float | None = chz.field(
        default=None, doc="coefficient of every adapter at the start; None: 1 / their number"
    )

    @chz.validate
    def _adapters(self) -> None:
        check_range(self, "start_at", prefix="search_space.")
        if len(self.adapters) < 2:
            raise ConfigError(
                "search_space=merge needs search_space.adapters=A,B: directories of at least two "
                f"trained PEFT LoRA adapters of the base; found {len(self.adapters)}"
            )
        if len(set(map(os.path.realpath, self.adapters))) < len(self.adapters):
            raise ConfigError(
                f"search_space.adapters must be different ones, found {','.join(self.adapters)}"
            )

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "_MergeSpace":
        """Build the space over the weights that any of the adapters changes."""
        plain = Adapter(include=self.include, exclude=self.exclude, noise=self.noise)
        adapters = (chz.replace(plain, start=path) for path in self.adapters)
        trained = [adapter(parameters, read_adapter) for adapter in adapters]
        starts = [space.start for space in trained if space.start is not None]
        adapted = {name for start in starts for name in start.weights}
        names = [p.name for p in parameters if p.name in adapted]
        of_weight = {name: self._vector(name) for name in names}
        shapes = {vector: (len(starts),) for vector in of_weight.values()}
        rank = max(sum(s.lora.rank for s in starts if name in s.weights) for name in names)
        factors = _MergedFactors(
            {name: (vector, vector) for name, vector in of_weight.items()},
            LoRA(rank, float(rank)),
            tuple(starts),
            transposed=frozenset().union(*(space.adapter.transposed for space in trained)),
        )
        start_at = 1 / len(starts) if self.start_at is None else self.start_at
        shares = self.shares(shapes)
        return _MergeSpace(shapes, self.noise, shares, adapter=factors, start_at=start_at)

    def _vector(self, weight: str) -> str:
        """Return the name of the coefficients of a weight."""
        layer = layer_of(weight) if self.each == "layer" else None
        return f"layers.{layer.rpartition('.')[2]}.{_COEFFICIENTS}" if layer else _COEFFICIENTS


@dataclasses.dataclass(frozen=True)
class _MergedFactors(AdapterFactors):
    """One adapter that is the sum of several, each with a coefficient.

    Attributes:
        starts: the adapters.
    """

    are_parameters: ClassVar[bool] = False

    starts: tuple[StoredAdapter, ...]

    @override
    def factors(
        self, name: str, values_G: Sequence[Values]
    ) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
        import torch

        vector, _ = self.targets[name]
        coefficients_G = [values(vector) for values in values_G]
        if not coefficients_G:
            return
        device = coefficients_G[0].device
        parts = [(k, a.to(device), b.to(device)) for k, a, b in self._parts(name)]
        a = torch.cat([a for _, a, _ in parts])
        unused = self.lora.rank - len(a)
        a = torch.nn.functional.pad(a, (0, 0, 0, unused))  # The same for all genomes.
        for coefficients in coefficients_G:
            b = torch.cat([coefficients[k] * b for k, _, b in parts], dim=1)
            yield a, torch.nn.functional.pad(b, (0, unused))

    def _parts(self, name: str) -> list[tuple[int, "torch.Tensor", "torch.Tensor"]]:
        """Return place, A and s · B of each adapter that changes a weight."""
        a, b = factor_names(name)
        return [
            (k, factors[a], factors[b] * start.lora.scale)
            for k, (start, factors) in enumerate(zip(self.starts, self._read, strict=True))
            if name in start.weights
        ]

    @functools.cached_property
    def _read(self) -> "Sequence[Mapping[str, torch.Tensor]]":
        """Factors of each adapter; read at the first use, once a process."""
        return [start.read() for start in self.starts]


@dataclasses.dataclass(frozen=True)
class _MergeSpace(FullRankSpace):
    """Vectors of coefficients, one number for each adapter, perturbed by dense noise."""

    adapter: _MergedFactors = dataclasses.field(kw_only=True)
    start_at: float = dataclasses.field(kw_only=True)

    @override
    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return all coefficients at the start; the model's parameters do not matter."""
        import torch

        return {name: torch.full(shape, self.start_at) for name, shape in self.shapes.items()}
