"""LoRA factors as the parameters: the base is frozen, so it may be quantised.

A weight W (out x in) that is adapted answers with W + s · B A, A (rank x in), B (out x rank) and
s = alpha / rank (LoRA, Hu et al. 2021, arXiv:2106.09685), or alpha / √rank (rsLoRA, Kalajdzievski
2023, arXiv:2312.03732). A and B are what the centre keeps, what genomes perturb by dense noise and
what steps move, in the exact arithmetic of `full_rank`; their names are the weight's with `lora_A`
and `lora_B` in it, as PEFT calls them.

A new adapter starts with B A = 0, to the bit, so that the centre is the base. With
n(factor) = ε(init_seed, the factor's name + ".init"), each product rounded to float32,

    lora        A = n(A) / √(3 · in), the variance of PEFT's own start; B = 0
    gaussian    A = n(A) / rank, as PEFT's of that name; B = 0
    orthogonal  both at random, in ranks of their own: n / √(3 · in) in the first half of A's ranks
                and in the second half of B's, and 0 in the others

A loaded one starts where it was left. Which start matters to ES more than to gradients: genomes add
σ · ε to the factors, so where B = 0 a genome's A shows only through its own small B, in a product
of two noises, and a genome that perturbs A alone shows nothing at all. `orthogonal` gives each
factor something to act on from the first generation, equally much for both; it is PEFT's init of
that name but for its rotation of the ranks, which gaussian noise does not see, and its scale.

Left out: inits that change the base (PiSSA, OLoRA), which may be quantised and is shared with
other uses of it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import chz
import numpy as np

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.base import (
    ParameterInfo,
    SearchSpaceBuilder,
    linear_shapes,
    matching,
)
from es_cookbook.evolution.spaces.factors import (
    AdapterFactors,
    LoRA,
    ReadAdapter,
    StoredAdapter,
    factor_names,
    factor_shapes,
)
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch

Init: TypeAlias = Literal["lora", "gaussian", "orthogonal"]


@chz.chz
class Adapter(SearchSpaceBuilder):
    """LoRA factors of the model's linear weights; include, exclude and targets all narrow them."""

    has_adapter: ClassVar[bool] = True
    start_option: ClassVar[str] = "start"

    targets: tuple[str, ...] = chz.field(
        default=(),
        doc="narrow the selected weights to layers of these names, as in PEFT's target_modules: "
        "q_proj,v_proj, full names, or shell patterns of these; all if empty",
    )
    rank: int = chz.field(default=8, doc="rank of a new adapter")
    alpha: float = chz.field(default=16.0, doc="a new adapter is scaled by alpha / rank")
    rslora: bool = chz.field(default=False, doc="scale by alpha / √rank instead")
    init: Init = chz.field(
        default="lora",
        doc="how a new adapter starts, always as the base: A at random and B = 0 (lora, gaussian), "
        "or each at random in half of the ranks (orthogonal)",
    )
    init_seed: int = chz.field(default=0, doc="seed of a new adapter's random factors")
    start: str | None = chz.field(
        default=None, doc="directory of a PEFT LoRA adapter to start from; a new one if unset"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "rank", at_least=1, at_most=2**16, prefix="search_space.")
        check_range(self, "alpha", above=0, prefix="search_space.")
        check_range(self, "init_seed", at_least=0, at_most=MAX_SEED, prefix="search_space.")
        if self.start is None and self.init == "orthogonal" and self.rank < 2:
            raise ConfigError(
                "search_space.init=orthogonal gives A and B ranks of their own, so "
                f"search_space.rank must be at least 2, found {self.rank}"
            )

    def __call__(
        self, parameters: Sequence[ParameterInfo], read_adapter: ReadAdapter | None = None
    ) -> "_AdapterSpace":
        """Build the space over the linear weights among the selected, or those of `start`."""
        weights = self._targeted(parameters)
        lora, start = LoRA(self.rank, self.alpha, self.rslora), None
        if self.start is not None:
            assert read_adapter is not None
            start = read_adapter(Path(self.start), weights)
            weights, lora = start.weights, start.lora
        targets = {name: factor_names(name) for name in weights}
        transposed = frozenset(p.name for p in parameters if p.transposed and p.name in targets)
        shapes = factor_shapes(weights, lora.rank)
        return _AdapterSpace(
            shapes,
            self.noise,
            self.shares(shapes, together=list(targets.values())),
            adapter=AdapterFactors(targets, lora, transposed=transposed),
            init=self.init,
            init_seed=self.init_seed,
            start=start,
        )

    def _targeted(self, parameters: Sequence[ParameterInfo]) -> dict[str, tuple[int, int]]:
        """Return (out, in) of the weights that include, exclude and targets leave."""
        linear_weights = linear_shapes(self, parameters)
        selected = {p.name: p.out_in for p in parameters if p.name in linear_weights}
        if not self.targets:
            return selected
        linear = [(_layer(p.name), p.name) for p in parameters if p.kind == "linear"]
        targeted: set[str] = set()
        for target in self.targets:
            patterns = (target, f"*.{target}")  # in full, or by the last of its names
            named = {
                name
                for layer, name in linear
                if any(matching(layer, pattern) for pattern in patterns)
            }
            if not named:
                last_names = {layer.rpartition(".")[2] for layer, _ in linear}
                raise ConfigError(
                    f"search_space.targets {target!r} names no linear layer of the model: "
                    f"{nearest(target, last_names)}, their full names, and patterns of these"
                )
            if named.isdisjoint(selected):
                raise ConfigError(
                    f"search_space.targets {target!r} names only layers that include "
                    f"{list(self.include)} and exclude {list(self.exclude)} leave out"
                )
            targeted |= named
        return {name: shape for name, shape in selected.items() if name in targeted}


@dataclasses.dataclass(frozen=True)
class _AdapterSpace(FullRankSpace):
    """The factors of some linear weights, A before B, perturbed by dense noise.

    Attributes:
        start: adapter trained before; None for a new adapter, which starts as `init` says.
    """

    adapter: AdapterFactors = dataclasses.field(kw_only=True)
    init: Init = "lora"
    init_seed: int = 0
    start: StoredAdapter | None = None

    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return the start of the factors; the model's parameters do not matter."""
        import torch

        del parameters
        if self.start is not None:
            stored = self.start.read()
            return {name: stored[name] for name in self.shapes}
        rank = self.adapter.lora.rank
        started: dict[str, torch.Tensor] = {}
        for a, b in self.adapter.targets.values():
            std = 1 / (rank if self.init == "gaussian" else math.sqrt(3 * self.shapes[a][1]))
            started[a], started[b] = self._at_random(a, std), torch.zeros(self.shapes[b])
            if self.init == "orthogonal":
                half = rank // 2
                started[a][half:] = 0
                started[b][:, half:] = self._at_random(b, std)[:, half:]
        return started

    def _at_random(self, name: str, std: float) -> "torch.Tensor":
        import torch

        at_random = noise(self.init_seed, f"{name}.init", self.shapes[name], "gaussian")
        return torch.from_numpy(np.multiply(at_random, np.float32(std)))


def _layer(weight: str) -> str:
    """Return PEFT's name of a target: a layer, or the parameter with an expert's weight."""
    return weight.removesuffix(".weight").partition("[")[0]
