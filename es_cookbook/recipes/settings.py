"""Settings and fields of the command line that recipes have in common.

A function that ends in `_field` makes the chz field of that name. Its declared type is the field's
own, as that of `dataclasses.field` is.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import chz

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


def optimizer_field(settings: Mapping[str, Mapping[str, object]]) -> OptimizerBuilder:
    """`optimizer`, `es` by default; `settings` are fields by an optimizer's name."""
    names = Names(OPTIMIZER_NAMES, default="es", settings=settings)
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
