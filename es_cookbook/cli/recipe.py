"""A recipe: a task with settings that train, as a Config that has a default for everything.

    @chz.chz
    class CLIConfig(RecipeConfig):
        "Train a model to add numbers with evolution strategies."

        model_name: str = str(Path(__file__).parent / "model")
        dataset: RLDatasetBuilder = built_field(ArithmeticDatasetBuilder)
        optimizer: OptimizerBuilder = OptimizerNames({"es": HALF_KNOWN}).field()
        sampling: SamplingParams = built_field(SamplingParams, max_tokens=8)
        num_generations: int = 12


    main, cli = program("arithmetic", CLIConfig)

Registered in the group `es_cookbook.recipes`, it is the command `es-cookbook NAME`, `recipe=NAME`
of other commands, and `dataset=NAME` of a run with another model. The settings of `es` are stated
once; every other optimizer takes from them what it can.
"""

import functools
from collections.abc import Callable, Mapping

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.schedules import Cosine
from es_cookbook.common.terminal import BEGAN
from es_cookbook.runs.config import Config
from es_cookbook.runs.program import train_and_tell

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


@chz.chz
class RecipeConfig(Config):
    """A run of a recipe, whose subclass gives every field that has no default here one.

    A field that is given another default keeps its description.
    """

    log_path: str = chz.field(
        default="", doc="run directory; runs/<recipe>-<digest of the options> if empty"
    )


def program(
    name: str, config_class: type[Config]
) -> tuple[Callable[[Config], None], Callable[[], None]]:
    """The program of a recipe.

    Args:
        name: of the recipe, with which the names of its run directories begin.
        config_class: its Config.

    Returns:
        `main`, which trains and says in one line what that brought, and `cli`, which calls it with
        the options of the command line.
    """

    def main(config: Config, began: float | None = None) -> None:
        train_and_tell(config, name, began)

    def cli() -> None:
        more_help = f"\nSettings of papers: preset={'|'.join(config_class.presets)}."
        run_cli(functools.partial(main, began=BEGAN), config_class, more_help=more_help)

    return main, cli
