"""What commands share: options that name a run, a model or a recipe, and where they write."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import chz

from es_cookbook.cli import RECIPES
from es_cookbook.common.checks import in_range
from es_cookbook.common.cli import UNNAMED
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.names import Names
from es_cookbook.common.trust import load
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder

if TYPE_CHECKING:
    from es_cookbook.runs.config import Config


@chz.chz
class Recorded:
    """A recorded run, given by its directory."""

    log_path: str = chz.field(doc="run directory", metadata=UNNAMED)
    trust: tuple[str, ...] = chz.field(
        default=(), doc="packages other than es_cookbook that config.json may import"
    )


@chz.chz
class RecordedAt(Recorded):
    """A run at one of its generations; it is only read."""

    generation: int | None = chz.field(
        default=None,
        doc="number of generations after which to take the centre; 0 is the start, None the latest",
    )
    model_name: str | None = chz.field(
        default=None, doc="base model, if it has moved since the run; None: where it was"
    )

    _generation = in_range("generation", at_least=0)


@chz.chz
class RunOrModel(RecordedAt):
    """A run at one of its generations, or a model."""

    log_path: str = chz.field(default="", doc="run directory (read only)", metadata=UNNAMED)
    model_name: str | None = chz.field(
        default=None,
        doc="a model instead of a run: directory, GGUF file, Hub name; with log_path, the run's "
        "base model if it has moved",
    )

    @chz.validate
    def _of_a_run(self) -> None:
        if self.generation is not None and not self.log_path:
            raise ConfigError(
                f"generation={self.generation} is of a run: give log_path=RUN, or leave it out"
            )


@chz.chz
class Answering:
    """Which genome of a run answers, and on which engine; used with `RecordedAt`."""

    genome: int | Literal["centre", "base"] = chz.field(
        default="centre", doc="what answers: centre, base, or the index of a genome"
    )
    engine: EngineBuilder | None = Names(ENGINE_NAMES, default=None).field(
        "engine; None: the run's own, or torch for a model"
    )


def new_output(name: str, log_path: str = "") -> Path:
    """Return the output path of a command; it must not exist, nor lie in the run that is read.

    Raises:
        ConfigError: It is there already, its parent is not, or it is in the run directory.
    """
    output = Path(name)
    if output.exists() or output.is_symlink():
        raise ConfigError(f"output {name!r} is there already; give another one")
    if log_path:
        if not output.parent.is_dir():
            raise ConfigError(f"output {name!r}: there is no directory {str(output.parent)!r}")
        if Path(log_path).resolve() in output.resolve().parents:
            raise ConfigError(
                f"output {name!r} is in the run directory, which is only read; give a place "
                "outside of it"
            )
    return output


def recipe_config(recipe: str) -> "type[Config]":
    """Return the config class of a recipe's command.

    Raises:
        ConfigError: There is no such recipe.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}: {nearest(recipe, RECIPES)}")
    return cast("type[Config]", load(RECIPES[recipe]))


def recipe_defaults(recipe: str) -> "Config":
    """Return the Config of a recipe's command without options.

    Raises:
        ConfigError: There is no such recipe.
    """
    return cast("Callable[[], Config]", recipe_config(recipe))()
