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

`perturb` says which factor terms change: `both`; `b` alone, as LoRA-FA (Zhang et al. 2023,
arXiv:2308.03303), or `a`; or `alternating`: A by even seeds and B by odd ones, a function of the
seed, so that in every generation half of the genomes move A and half B (with twins: half of the
pairs). A weight is then linear in the noise, without the product of two. As long as B = 0 the half
that moves A is lost, so `alternating` goes with `orthogonal` or a loaded adapter. A factor that no
term changes stays where it started, and still counts as a parameter of the space.

Left out: inits that change the base (PiSSA, OLoRA), which may be quantised and is shared with
whatever else runs on it.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import chz
import numpy as np

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, ModelError, nearest
from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.base import ParameterInfo, linear_shapes, matching
from es_cookbook.evolution.spaces.full_rank import DenseBuilder, FullRankSpace
from es_cookbook.evolution.spaces.shares import Shares

if TYPE_CHECKING:
    import torch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Fields of PEFT's config that change what an adapter does, in ways that are not done here."""
_NO_SIGNAL = (
    "search_space.perturb=a needs a B that is not 0, and with {} it is: B A is then 0 whatever A "
    "is, and all genomes answer alike; take init=orthogonal or perturb=both"
)

Init: TypeAlias = Literal["lora", "gaussian", "orthogonal"]
Perturb: TypeAlias = Literal["both", "a", "b", "alternating"]


@chz.chz
class Adapter(DenseBuilder):
    """LoRA factors of the model's linear weights; include, exclude and targets all narrow them."""

    targets: tuple[str, ...] = chz.field(
        default=(),
        doc="of the selected weights only those of layers so called, as in PEFT's target_modules: "
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
    init_seed: int = chz.field(default=0, doc="of a new adapter's random factors")
    perturb: Perturb = chz.field(
        default="both",
        doc="what a seed changes: both factors, one of them, or alternating: A if it is even, B if "
        "it is odd",
    )
    start: str | None = chz.field(
        default=None, doc="directory of a PEFT LoRA adapter to start from; a new one if unset"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "rank", at_least=1, prefix="search_space.")
        check_range(self, "alpha", above=0, prefix="search_space.")
        if not 0 <= self.init_seed <= MAX_SEED:
            raise ConfigError(
                f"search_space.init_seed must be from 0 to 2**63 - 1, found {self.init_seed}"
            )
        for field, value, accepted in (
            ("init", self.init, get_args(Init)),
            ("perturb", self.perturb, get_args(Perturb)),
        ):
            if value not in accepted:
                hint = nearest(value, accepted)
                raise ConfigError(f"unknown search_space.{field} {value!r}: {hint}")

    @chz.validate
    def _signal(self) -> None:
        if self.start is not None:
            return
        if self.init == "orthogonal" and self.rank < 2:
            raise ConfigError(
                "search_space.init=orthogonal gives A and B ranks of their own, so "
                f"search_space.rank must be at least 2, found {self.rank}"
            )
        if self.perturb == "a" and self.init != "orthogonal":
            raise ConfigError(_NO_SIGNAL.format(f"search_space.init={self.init}"))

    def __call__(self, parameters: Sequence[ParameterInfo]) -> "AdapterSpace":
        """Build the space over the linear weights among the selected, or those of `start`."""
        shapes = self._targeted(parameters)
        if self.start is None:
            return _space(shapes, self.rank, self.alpha, self.rslora, self)
        return _load(Path(self.start), shapes, self)

    def _targeted(self, parameters: Sequence[ParameterInfo]) -> dict[str, tuple[int, int]]:
        """(out, in) of the weights that include, exclude and targets leave."""
        selected = linear_shapes(self, parameters)
        if not self.targets:
            return selected
        linear = [p.name for p in parameters if p.kind == "linear"]
        targeted: set[str] = set()
        for target in self.targets:
            named = {name for name in linear if _is_of(name, target)}
            if not named:
                last_names = {_module(name).rpartition(".")[2] for name in linear}
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
class AdapterSpace(FullRankSpace):
    """The factors of some linear weights, perturbed by dense noise.

    Attributes:
        shapes: name of a factor -> its shape, A before B, in the model's order.
        targets: name of an adapted weight -> names of its A and B.
        rank: of all of them.
        alpha: what B A is scaled by, times the rank or its root.
        rslora: whether its root.
        init: how a new adapter starts.
        init_seed: of its random factors.
        start: a PEFT adapter's directory, or None for a new one.
    """

    targets: Mapping[str, tuple[str, str]] = dataclasses.field(
        default_factory=dict[str, tuple[str, str]]
    )
    rank: int = 1
    alpha: float = 1.0
    rslora: bool = False
    init: Init = "lora"
    init_seed: int = 0
    start: Path | None = None

    @property
    def scaling(self) -> float:
        """Factor on B A, rounded to float32."""
        return float(np.float32(self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)))

    def base(self, parameters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """What the factors start from; the model's parameters do not matter."""
        import torch

        del parameters
        if self.start is not None:
            from safetensors.torch import load_file

            stored = load_file(self.start / _WEIGHTS)
            return {name: stored[_PREFIX + name].to(torch.float32) for name in self.shapes}
        started: dict[str, torch.Tensor] = {}
        for a, b in self.targets.values():
            std = 1 / (self.rank if self.init == "gaussian" else math.sqrt(3 * self.shapes[a][1]))
            started[a], started[b] = self._at_random(a, std), torch.zeros(self.shapes[b])
            if self.init == "orthogonal":
                half = self.rank // 2
                started[a][half:] = 0
                started[b][:, half:] = self._at_random(b, std)[:, half:]
        return started

    def _at_random(self, name: str, std: float) -> "torch.Tensor":
        import torch

        at_random = noise(self.init_seed, f"{name}.init", self.shapes[name], "gaussian")
        return torch.from_numpy(np.multiply(at_random, np.float32(std)))

    def factors(
        self, name: str, values_G: Sequence[Callable[[str], "torch.Tensor"]]
    ) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
        """A and B of one adapted weight, for each of several points of the space.

        Args:
            name: the weight's.
            values_G: each gives a point's own value of a parameter, by name; asked for the two that
                `targets` has. The factors come where these are.
        """
        a, b = self.targets[name]
        for value in values_G:
            yield value(a), value(b)

    def merge_(
        self, parameters: Mapping[str, "torch.Tensor"], centre: Mapping[str, "torch.Tensor"]
    ) -> None:
        """Add s · B A to the adapted weights, in place; the sum is rounded to their dtype once.

        Args:
            parameters: the model's, by name.
            centre: the space's, float32, by name.
        """
        for name in self.targets:
            ((a, b),) = self.factors(name, [centre.__getitem__])
            weight = parameters[name]
            weight.data.copy_(self.merged(weight.data, a, b))

    def merged(
        self, weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor"
    ) -> "torch.Tensor":
        """An adapted weight with s · B A added, in float32, on the weight's device."""
        return weight.float() + ((b @ a) * self.scaling).to(weight.device)


def _factors(
    shapes: Mapping[str, tuple[int, int]], rank: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, str]]]:
    """Shapes of all factors, and the names of each weight's two."""
    of_factors: dict[str, tuple[int, ...]] = {}
    targets: dict[str, tuple[str, str]] = {}
    for name, (rows, columns) in shapes.items():
        a, b = f"{_module(name)}.lora_A.weight", f"{_module(name)}.lora_B.weight"
        of_factors[a], of_factors[b] = (rank, columns), (rows, rank)
        targets[name] = (a, b)
    return of_factors, targets


def _space(
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    alpha: float,
    rslora: bool,
    builder: Adapter,
    start: Path | None = None,
) -> AdapterSpace:
    of_factors, targets = _factors(shapes, rank)
    return AdapterSpace(
        shapes=of_factors,
        noise=builder.noise,
        shares=_shares(builder, of_factors, list(targets.values())),
        mask=builder.mask(),
        targets=targets,
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        init=builder.init,
        init_seed=builder.init_seed,
        start=start,
    )


def _shares(
    builder: Adapter, shapes: Mapping[str, tuple[int, ...]], pairs: Sequence[tuple[str, str]]
) -> Shares:
    """`perturb` tells a weight's two factors apart, which blocks do not."""
    if builder.perturb in ("a", "b"):
        moving = [pair[builder.perturb == "b"] for pair in pairs]
        shares = builder.shares({name: shapes[name] for name in moving})
        still = {name: 0.0 for name in shapes if name not in set(moving)}
        return dataclasses.replace(shares, factors={**shares.factors, **still})
    shares = builder.shares(shapes, together=pairs)
    if builder.perturb == "both":
        return shares
    groups = {
        name: 2 * shares.groups.get(name, 0) + side
        for pair in pairs
        for side, name in enumerate(pair)
    }
    return dataclasses.replace(shares, groups=groups, num_groups=2 * shares.num_groups)


def _module(name: str) -> str:
    """The layer that a weight is of."""
    return name.removesuffix(".weight")


def _is_of(name: str, target: str) -> bool:
    """Whether a weight's layer is called so, in full or by the last of its names."""
    module = _module(name)
    return matching(module, target) or matching(module, f"*.{target}")


def _load(path: Path, selected: Mapping[str, tuple[int, int]], builder: Adapter) -> AdapterSpace:
    """The space of an adapter as PEFT wrote it; it has to fit the selected weights."""
    from safetensors import SafetensorError, safe_open

    try:
        config = cast(dict[str, Any], json.loads((path / _CONFIG).read_text()))
        with safe_open(path / _WEIGHTS, "np") as file:  # pyright: ignore[reportUnknownVariableType]
            keys = cast(list[str], file.keys())
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"search_space.start: {str(path)!r} is no PEFT adapter: it needs {_CONFIG} and "
            f"{_WEIGHTS} ({error})"
        ) from error
    for field in _UNSUPPORTED:
        if config.get(field):
            raise ModelError(
                f"search_space.start: the adapter in {str(path)!r} has {field}, and only plain "
                "LoRA and rsLoRA can be perturbed"
            )
    rank = int(config["r"])
    alpha, rslora = float(config["lora_alpha"]), bool(config.get("use_rslora"))
    shapes = {
        name: shape
        for name, shape in selected.items()
        if f"{_PREFIX}{_module(name)}.lora_A.weight" in stored
    }
    needed = {_PREFIX + name: shape for name, shape in _factors(shapes, rank)[0].items()}
    if needed != stored:
        wrong = sorted(needed.items() ^ stored.items())[0][0]
        raise ModelError(
            f"search_space.start: the adapter in {str(path)!r} does not fit the model's linear "
            f"weights, or what include, exclude and targets select of them: {wrong}"
        )
    space = _space(shapes, rank, alpha, rslora, builder, path)
    if builder.perturb == "a":
        start = space.base({})
        if not any(start[b].any() for _, b in space.targets.values()):
            raise ModelError(_NO_SIGNAL.format(f"the adapter in {str(path)!r}"))
    return space
