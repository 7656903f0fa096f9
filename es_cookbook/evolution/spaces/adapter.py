"""LoRA factors as the parameters: the base is frozen, so it may be quantised.

A weight W (out x in) that is adapted answers with W + s · B A, A (rank x in), B (out x rank) and
s = alpha / rank (LoRA, Hu et al. 2021, arXiv:2106.09685), or alpha / √rank (rsLoRA, Kalajdzievski
2023, arXiv:2312.03732). A and B are what the centre keeps, what genomes perturb by dense noise and
what steps move, in the exact arithmetic of `full_rank`; their names are the weight's with `lora_A`
and `lora_B` in it, as PEFT calls them.

A new adapter starts with B = 0, so that the centre is the base, and

    A = float32(1 / √(3 · in)) * ε(init_seed, name of A + ".init")

which has the variance of PEFT's own start. A loaded one starts where it was left.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import chz
import numpy as np

from es_cookbook.errors import ConfigError, ModelError
from es_cookbook.evolution.genome import MAX_SEED
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.base import ParameterInfo, SearchSpaceBuilder, linear_shapes
from es_cookbook.evolution.spaces.full_rank import FullRankSpace

if TYPE_CHECKING:
    import torch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")
"""Fields of PEFT's config that change what an adapter does, in ways that are not done here."""


@chz.chz
class Adapter(SearchSpaceBuilder):
    """LoRA factors of the model's linear weights; include and exclude choose the weights."""

    rank: int = chz.field(default=8, doc="rank of a new adapter")
    alpha: float = chz.field(default=16.0, doc="a new adapter is scaled by alpha / rank")
    rslora: bool = chz.field(default=False, doc="scale by alpha / √rank instead")
    init_seed: int = chz.field(default=0, doc="of a new adapter's A")
    start: str | None = chz.field(
        default=None, doc="directory of a PEFT LoRA adapter to start from; a new one if unset"
    )

    @chz.validate
    def _ranges(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"search_space.rank must be at least 1, found {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"search_space.alpha must be above 0, found {self.alpha}")
        if not 0 <= self.init_seed <= MAX_SEED:
            raise ConfigError(
                f"search_space.init_seed must be from 0 to 2**63 - 1, found {self.init_seed}"
            )

    def __call__(self, parameters: Sequence[ParameterInfo]) -> "AdapterSpace":
        """Build the space over the linear weights among the selected, or those of `start`."""
        if self.start is None:
            shapes = linear_shapes(self, parameters)
            return _space(shapes, self.rank, self.alpha, self.rslora, self)
        return _load(Path(self.start), parameters, self)


@dataclasses.dataclass(frozen=True)
class AdapterSpace(FullRankSpace):
    """The factors of some linear weights, perturbed by dense noise.

    Attributes:
        shapes: name of a factor -> its shape, A before B, in the model's order.
        targets: name of an adapted weight -> names of its A and B.
        rank: of all of them.
        alpha: what B A is scaled by, times the rank or its root.
        rslora: whether its root.
        init_seed: of a new adapter's A.
        start: a PEFT adapter's directory, or None for a new one.
    """

    targets: Mapping[str, tuple[str, str]] = dataclasses.field(
        default_factory=dict[str, tuple[str, str]]
    )
    rank: int = 1
    alpha: float = 1.0
    rslora: bool = False
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
            a_of_start = noise(self.init_seed, f"{a}.init", self.shapes[a], "gaussian")
            std = np.float32(1 / math.sqrt(3 * self.shapes[a][1]))
            started[a] = torch.from_numpy(np.multiply(a_of_start, std))
            started[b] = torch.zeros(self.shapes[b])
        return started

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


def _space(
    shapes: Mapping[str, tuple[int, int]],
    rank: int,
    alpha: float,
    rslora: bool,
    builder: Adapter,
    start: Path | None = None,
) -> AdapterSpace:
    of_factors: dict[str, tuple[int, ...]] = {}
    targets: dict[str, tuple[str, str]] = {}
    for name, (rows, columns) in shapes.items():
        module = name.removesuffix(".weight")
        a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        of_factors[a], of_factors[b] = (rank, columns), (rows, rank)
        targets[name] = (a, b)
    return AdapterSpace(
        shapes=of_factors,
        noise=builder.noise,
        targets=targets,
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        init_seed=builder.init_seed,
        start=start,
    )


def _load(path: Path, parameters: Sequence[ParameterInfo], builder: Adapter) -> AdapterSpace:
    """The space of an adapter as PEFT wrote it; it has to fit the model and the selection."""
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
        for name, shape in linear_shapes(builder, parameters).items()
        if f"{_PREFIX}{name.removesuffix('.weight')}.lora_A.weight" in stored
    }
    space = _space(shapes, rank, alpha, rslora, builder, path)
    needed = {_PREFIX + name: shape for name, shape in space.shapes.items()}
    if needed != stored:
        wrong = sorted(needed.items() ^ stored.items())[0][0]
        raise ModelError(
            f"search_space.start: the adapter in {str(path)!r} does not fit the model's linear "
            f"weights, or what include and exclude select of them: {wrong}"
        )
    return space
