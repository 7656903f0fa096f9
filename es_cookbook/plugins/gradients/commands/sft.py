"""Fine-tune on rows of prompts and answers, and measure it on a recipe meanwhile.

    python -m es_cookbook sft recipe=countdown data=demonstrations.jsonl output=sft
    ... evaluation.every=100 evaluation.dataset.num_test=100 rank=0 learning_rate=1e-3

A recipe gives the model and the held-out problems of `evaluation`. Options are those of
`python -m es_cookbook.plugins.gradients.sft --help`; without a recipe nothing is measured but the
loss.
"""

from collections.abc import Mapping

import chz

from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.cli import built, changed, run_with_fields
from es_cookbook.plugins.gradients import sft
from es_cookbook.plugins.gradients.supervised import Evaluation, SFTConfig

_PREFIX = "evaluation."


@chz.chz
class SFTCommand:
    """Fine-tune on rows of prompts and completions, or chats, and measure it on a recipe."""

    recipe: str = chz.field(
        default="", doc="recipe whose model is trained and whose held-out problems are attempted"
    )


def configured(recipe: str, fields: Mapping[str, str]) -> SFTConfig:
    """The whole config, of options as a user types them; only inside `run_cli`.

    Raises:
        ConfigError: There is no such recipe.
    """
    if not recipe:
        return built(SFTConfig, fields)
    like = recipe_defaults(recipe)
    how = {k.removeprefix(_PREFIX): v for k, v in fields.items() if k.startswith(_PREFIX)}
    rest = {path: text for path, text in fields.items() if not path.startswith(_PREFIX)}
    evaluation = Evaluation(
        dataset=like.dataset,
        sampling=like.sampling,
        engine=like.engine,
        attempts=like.eval_attempts,
        temperature=like.eval_temperature,
    )
    config = built(SFTConfig, {"model_name": like.model_name, **rest})
    return chz.replace(config, evaluation=changed(evaluation, how))


def main(command: SFTCommand, fields: Mapping[str, str]) -> None:
    """Train, and write the adapter or the model."""
    sft.main(configured(command.recipe, fields))


def cli() -> None:
    more_help = (
        "\n\nOther options: python -m es_cookbook.plugins.gradients.sft --help. With a recipe, "
        "evaluation.* are those of its held-out\nproblems: evaluation.every=100 "
        "evaluation.dataset.num_test=100.\nShort: data (dataset.source)."
    )
    run_with_fields(main, SFTCommand, more_help)
