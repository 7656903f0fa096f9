"""What commands share: options that name a run, a model or a recipe, and where they write."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

import chz

from es_cookbook.cli import RECIPES
from es_cookbook.common.checks import check_range
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
        doc="number of generations after which to take the centre; 0 is the base, None the latest",
    )
    model_name: str | None = chz.field(
        default=None, doc="base model, if it has moved since the run; None: where it was"
    )

    @chz.validate
    def _generation(self) -> None:
        check_range(self, "generation", at_least=0)


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


def check_not_set(
    paths: Iterable[str], command: str, refused: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse options of runs that a command of many runs sets itself.

    Args:
        paths: the options, by dotted path.
        command: the command, in a word.
        refused: more options that it sets -> why.

    Raises:
        ConfigError: The first such option.
    """
    set_here = {
        "seed": "seeds=... says which",
        "log_path": f"every run has its own directory in the {command}'s log_path",
        "behavior_if_log_dir_exists": f"a {command} always goes on with what is recorded",
        **refused,
    }
    for path in paths:
        if path in set_here:
            raise ConfigError(f"{path} cannot be given: {set_here[path]}")


def by_label(
    fields: Mapping[str, str], labels: Collection[str], names: Collection[str], what: str
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Split options into those of every run and, by label, those of one: `label.field`.

    `names` are all that may be compared, and `what` is one of them in a word.

    Raises:
        ConfigError: An option of one that is not compared.
    """
    of_all: dict[str, str] = {}
    of_one: dict[str, dict[str, str]] = {label: {} for label in labels}
    for path, value in fields.items():
        first, _, rest = path.partition(".")
        if first in of_one and rest:
            of_one[first][rest] = value
        elif first in names:
            raise ConfigError(
                f"{path} is an option of {what} that is not compared; they are {', '.join(labels)}"
            )
        else:
            of_all[path] = value
    return of_all, of_one


def check_comparison(metric: str, lists: Mapping[str, Sequence[object]]) -> None:
    """Refuse lists that are empty or name something twice, and metrics that are not held out.

    Raises:
        ConfigError: Names the option.
    """
    for field, values in lists.items():
        if not values:
            raise ConfigError(f"{field} must name at least one, found none")
        if len(set(values)) < len(values):
            raise ConfigError(f"{field} must be different ones, found {tuple(values)}")
    if not metric.startswith("test/"):
        raise ConfigError(f"metric must be a held-out one, test/..., found {metric!r}")
