"""Settings and fields of the command line that recipes have in common.

A function that ends in `_field` makes the chz field of that name. Its declared type is the field's
own, as that of `dataclasses.field` is.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import chz
from typing_extensions import override

from es_cookbook.common.configs import Names
from es_cookbook.common.schedules import Cosine
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES, OptimizerBuilder
from es_cookbook.rl.types import SamplingParams

_T = TypeVar("_T")

HALF_KNOWN: Mapping[str, object] = {
    "population_size": 256,
    "antithetic": False,
    "sigma": 0.01,
    "learning_rate": 0.04,
    "learning_rate_schedule": Cosine(),
}
"""Of `es`, for small models that half know their task: no pairs, and steps of four times sigma.

Picked in trials with sums of digits: more rollouts a generation and a learning rate of four sigma,
in place of one or two, helped; a sigma of 0.03 did not.
"""


def model_field(default: object) -> str:
    """`model_name`, of a recipe that brings a model or names one."""
    return chz.field(default=str(default), doc="Hugging Face model directory or Hub name")


def built_field(builder: Callable[..., _T], doc: str) -> _T:
    """A part that `builder` makes, and whose fields are options."""
    return chz.field(default_factory=builder, blueprint_unspecified=builder, doc=doc)


def dataset_field(builder: Callable[..., _T], what: str = "problems") -> _T:
    """`dataset`, made by `builder`."""
    return built_field(builder, f"{what} to train on, and held-out ones")


class OptimizerNames(Names):
    """Optimizers by name; whichever is chosen takes from the recipe's settings of `es` what it can.

    Args:
        settings: fields by an optimizer's name; those of `es` are the recipe's, others win for one.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, object]]) -> None:
        super().__init__(OPTIMIZER_NAMES, default="es", settings=settings)
        self._es = settings["es"]

    @override
    def settings_of(self, part: Callable[..., object], name: str | None) -> Mapping[str, object]:
        own = super().settings_of(part, name)
        if isinstance(part, type) and issubclass(part, OptimizerBuilder):
            return {**part.carried(self._es), **own}
        return own

    @override
    def note(self, part: object, given: Collection[str]) -> str:
        """Which of the recipe's settings of `es` it has otherwise, or not at all."""
        assert isinstance(part, OptimizerBuilder)
        carried = part.carried(self._es)
        own = {name: value for name, value in self._es.items() if name not in given}
        unused = [name for name in own if name not in carried]
        changed = [
            f"{name} is {found:.3g} in place of es's {own[name]}"
            for name in own
            if name in carried and (found := getattr(part, name)) != own[name]
        ]
        if unused:
            changed.append(f"what the recipe sets of es is not used: {', '.join(unused)}")
        return "; ".join(changed)


def optimizer_field(settings: Mapping[str, Mapping[str, object]]) -> OptimizerBuilder:
    """`optimizer`, `es` by default; see `OptimizerNames`."""
    names = OptimizerNames(settings)
    return chz.field(
        meta_factory=names,
        default_factory=names.build_default,
        doc="how the population is made and the centre moves",
    )


def sampling_field(max_tokens: int, temperature: float = 0.0) -> SamplingParams:
    """`sampling`, by default with these values."""
    fields = {"max_tokens": max_tokens, "temperature": temperature}
    return built_field(functools.partial(SamplingParams, **fields), "how tokens are drawn")


def num_generations_field(default: int) -> int:
    """`num_generations`."""
    return chz.field(default=default, doc="generations of the whole run")


def eval_every_field(default: int) -> int:
    """`eval_every`."""
    return chz.field(
        default=default,
        doc="generations between held-out evaluations; 0: before the first and after the last only",
    )


def log_path_field(recipe: str) -> str:
    """`log_path` of a recipe."""
    return chz.field(
        default="", doc=f"run directory; runs/{recipe}-<digest of the options> if empty"
    )
