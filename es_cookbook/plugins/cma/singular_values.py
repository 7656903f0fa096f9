"""The singular values of a trained adapter: a space of a few hundred numbers (ESSA).

ESSA (Korotyshova et al. 2025, arXiv:2507.04453) starts from a LoRA adapter that supervised
fine-tuning made and decomposes its factors apart, A = U S Vᵀ and B likewise. Directions stay as
gradients left them; what is searched is how strong each is. The parameters here are offsets δ of
the largest `fraction` of each factor's singular values, named "<module>.lora_A.singular_values" (or
B), and start at 0. A genome's factor is the adapter's own plus a rank-1 update for each of them,

    A <- A + (δ_i * U[:, i])[:, None] * V[:, i][None, :],   i = 0, 1, ..., largest value first

where both products and the sum are rounded to float32 by themselves, and δ_i = 0 adds nothing. So
with all offsets 0 the adapter's bits are unchanged, and a factor whose offsets are -S is 0. The
signs of U and V, which no decomposition fixes, cancel to the bit.

What moves, the centre and its fingerprint, are the offsets, exact on every machine. The singular
vectors are LAPACK's, in float64, rounded to float32: another LAPACK may give another last bit, or
other vectors where two singular values agree. Export where the run was if that matters.

Steps are of the singular values' own size, so `sigma` is in their units: a tenth of a typical one
is a good start. CMA-ES (`optimizer=cma`) names offsets by coordinates; plain ES works as well.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import chz
import numpy as np
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder
from es_cookbook.evolution.spaces.factors import (
    AdapterFactors,
    ReadAdapter,
    StoredAdapter,
    Values,
    factor_names,
)
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch


@chz.chz
class SingularValues(SearchSpaceBuilder):
    """Singular values of the factors of a trained LoRA adapter (ESSA)."""

    has_adapter: ClassVar[bool] = True
    start_option: ClassVar[str] = "start"

    start: str | None = chz.field(
        default=None, doc="directory of the PEFT LoRA adapter whose singular values are searched"
    )
    fraction: float = chz.field(
        default=1.0, doc="share of each factor's singular values that may change, the largest first"
    )

    @chz.validate
    def _fields(self) -> None:
        check_range(self, "fraction", above=0, at_most=1, prefix="search_space.")
        if self.start is None:
            raise ConfigError(
                "search_space=singular_values needs search_space.start=..., the directory of a "
                "trained PEFT LoRA adapter"
            )

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "_SingularValuesSpace":
        """Build the space over the adapter's factors; it has to fit include and exclude."""
        builder = Adapter(
            include=self.include, exclude=self.exclude, noise=self.noise, start=self.start
        )
        trained = builder(parameters, read_adapter)
        assert trained.start is not None
        offsets = {f: f"{f.removesuffix('.weight')}.singular_values" for f in trained.shapes}
        num_values = {f: math.ceil(self.fraction * min(trained.shapes[f])) for f in trained.shapes}
        shapes = {offsets[f]: (number,) for f, number in num_values.items()}
        pairs = trained.adapter.targets.items()
        targets = {name: (offsets[a], offsets[b]) for name, (a, b) in pairs}
        shares = self.shares(shapes, together=list(targets.values()))
        factors = _DecomposedFactors(
            targets,
            trained.adapter.lora,
            trained.start,
            num_values,
            transposed=trained.adapter.transposed,
        )
        return _SingularValuesSpace(shapes, self.noise, shares, adapter=factors)


@dataclasses.dataclass(frozen=True)
class _DecomposedFactors(AdapterFactors):
    """A trained adapter's factors, with singular values changed by offsets.

    Attributes:
        num_values: name of each of its factors -> how many singular values have offsets.
    """

    are_parameters: ClassVar[bool] = False

    start: StoredAdapter
    num_values: Mapping[str, int]

    @override
    def factors(
        self, name: str, values_G: Sequence[Values]
    ) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
        a, b = (self.decomposed[factor] for factor in factor_names(name))
        for offsets_a, offsets_b in super().factors(name, values_G):
            yield a.at(offsets_a), b.at(offsets_b)

    @functools.cached_property
    def decomposed(self) -> "Mapping[str, _Decomposed]":
        """Each factor of the adapter by name; made at the first use, once a process."""
        factors = self.start.read()
        return {name: _decompose(factors[name], n) for name, n in self.num_values.items()}


@dataclasses.dataclass(frozen=True)
class _SingularValuesSpace(FullRankSpace):
    """Offsets of singular values; an adapter whose factors are functions of them."""

    adapter: _DecomposedFactors = dataclasses.field(kw_only=True)

    @override
    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return zeros.

        Raises:
            ModelError: A factor of the adapter is 0, and so has no directions.
        """
        import torch

        for name, factor in self.adapter.decomposed.items():
            if not factor.start.any():
                raise ModelError(
                    f"search_space.start: {name} of the adapter in "
                    f"{str(self.adapter.start.path)!r} is 0, so its singular vectors mean nothing; "
                    "train the adapter first"
                )
        return {name: torch.zeros(shape) for name, shape in self.shapes.items()}


@dataclasses.dataclass(frozen=True)
class _Decomposed:
    """One factor, float32 on the CPU.

    Attributes:
        start: the factor in the adapter.
        columns: (values, rows), left singular vectors.
        rows: (values, columns), right singular vectors.
    """

    start: "torch.Tensor"
    columns: "torch.Tensor"
    rows: "torch.Tensor"

    def at(self, offsets: "torch.Tensor") -> "torch.Tensor":
        """Return the factor with its singular values changed, on the device of the offsets."""
        factor = self.start.to(offsets.device, copy=True)
        columns, rows = self.columns.to(offsets.device), self.rows.to(offsets.device)
        for column, row, offset in zip(columns, rows, offsets.tolist(), strict=True):
            if offset:
                factor.add_((column * offset)[:, None] * row[None, :])
        return factor


def _decompose(factor: "torch.Tensor", num_values: int) -> _Decomposed:
    import torch

    left, _, right = np.linalg.svd(factor.double().numpy(), full_matrices=False)
    vectors = (left.T[:num_values], right[:num_values])
    columns, rows = (torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in vectors)
    return _Decomposed(factor, columns, rows)
