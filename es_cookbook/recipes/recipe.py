"""A recipe: a task with settings that train, and the command line that is made of it.

    RECIPE = Recipe("arithmetic", ArithmeticDatasetBuilder, es=HALF_KNOWN, max_tokens=8, ...)


    @chz.chz
    class CLIConfig(RecipeConfig, recipe=RECIPE):
        "Train a model to add numbers with evolution strategies."


    main, cli = program(CLIConfig)

`CLIConfig` is what the command line builds: a `Config` whose defaults are the recipe's.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar, cast

import chz
from typing_extensions import override

from es_cookbook.common.cli import run_cli
from es_cookbook.common.fields.chz_fields import doc_of
from es_cookbook.common.schedules import Cosine
from es_cookbook.common.terminal import BEGAN
from es_cookbook.evolution.optimizers.base import OptimizerNames
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.config import Config
from es_cookbook.runs.program import train_and_tell
from es_cookbook.runs.tracking.jsonl import CORRECT

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
FEWER_GENOMES = {**HALF_KNOWN, "population_size": 128}


def built_field(builder: Callable[..., _T], doc: str) -> _T:
    """A part that `builder` makes, and whose fields are options."""
    return chz.field(default_factory=builder, blueprint_unspecified=builder, doc=doc)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A task with settings that train.

    Attributes:
        name: of its folder, of its command and of its run directories.
        dataset: makes its problems; the fields are options.
        es: settings of `es`, from which every other optimizer takes what it can.
        max_tokens: of an answer, or of a turn.
        num_generations: of the whole run.
        eval_every: generations between held-out evaluations.
        optimizers: settings of others than `es`, by name.
        folder: where its bundled model lies; that of its name beside this module if None.
        model_of: the recipe whose bundled model it trains, if it brings none of its own.
        hub_model: of the Hub, in place of a bundled model.
        problems: what its problems are called.
        temperature: at which genomes sample.
        main_metric: tells what a run brought.
    """

    name: str
    dataset: Callable[..., RLDatasetBuilder]
    es: Mapping[str, object]
    max_tokens: int
    num_generations: int
    eval_every: int
    optimizers: Mapping[str, Mapping[str, object]] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    model_of: str = ""
    hub_model: str = ""
    problems: str = "problems"
    temperature: float = 0.0
    main_metric: str = CORRECT

    @property
    def model(self) -> Path:
        folder = self.folder or Path(__file__).parent / (self.model_of or self.name)
        return folder / "model"

    @property
    def model_name(self) -> str:
        """What it trains, as an option."""
        return self.hub_model or str(self.model)

    @property
    def settings(self) -> Mapping[str, Mapping[str, object]]:
        return {"es": self.es, **self.optimizers}

    def fields(self) -> Mapping[str, object]:
        """The fields of a Config of which it has its own defaults."""
        names = OptimizerNames(self.settings)
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        doc = {name: doc_of(field) for name, field in chz.chz_fields(Config).items()}
        optimizer = chz.field(
            meta_factory=names, default_factory=names.build_default, doc=doc["optimizer"]
        )
        what = f"{self.problems} to train on, and held-out ones"
        sampling = built_field(functools.partial(SamplingParams, **given), doc["sampling"])
        num_generations = chz.field(default=self.num_generations, doc=doc["num_generations"])
        where = f"run directory; runs/{self.name}-<digest of the options> if empty"
        return {
            "model_name": chz.field(default=self.model_name, doc=doc["model_name"]),
            "dataset": built_field(self.dataset, what),
            "optimizer": optimizer,
            "sampling": sampling,
            "num_generations": num_generations,
            "eval_every": chz.field(default=self.eval_every, doc=doc["eval_every"]),
            "log_path": chz.field(default="", doc=where),
        }


@chz.chz
class RecipeConfig(Config):
    """A run of a recipe, which has a default for everything: `class CLIConfig(..., recipe=...)`."""

    recipe: ClassVar[Recipe]
    model_name: str = chz.field(
        default="", doc="model directory, GGUF file, Hub name or run (RUN@GENERATION)"
    )
    dataset: RLDatasetBuilder = chz.field(
        default=cast(RLDatasetBuilder, None), doc="problems to train on, and held-out ones"
    )
    log_path: str = chz.field(default="", doc="run directory")

    def __init_subclass__(cls, recipe: Recipe | None = None) -> None:
        if recipe is not None:
            cls.recipe = recipe
            fields, known = recipe.fields(), chz.chz_fields(Config)
            own = inspect.get_annotations(cls)
            cls.__annotations__ = {name: known[name].x_type for name in fields} | own
            for name, field in fields.items():
                setattr(cls, name, field)

    @property
    @override
    def main_metric(self) -> str:
        return self.recipe.main_metric


def program(
    config_class: type[RecipeConfig],
) -> tuple[Callable[[RecipeConfig], None], Callable[[], None]]:
    """`main`, which trains and says in one line what that brought, and `cli`, which calls it."""

    def main(config: RecipeConfig, began: float | None = None) -> None:
        train_and_tell(config, config_class.recipe.name, began)

    def cli() -> None:
        run_cli(functools.partial(main, began=BEGAN), config_class)

    return main, cli
