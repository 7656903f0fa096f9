"""Train on a task that is a prompt and a score: rows, a template and a function.

    python -m es_cookbook train model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl
        prompt="{question}" reward=my_rewards:score

`my_rewards.py` in this directory has

    def score(text, row):
        return float(text.strip() == row["answer"])

`data`, `test_data`, `prompt`, `reward` and `batch` are short for options of `dataset`, and
`reward.tolerance` for one of its reward. Instead of rows it may be an environment of a library:

    python -m es_cookbook train environment=my_taskset model_name=Qwen/Qwen2.5-0.5B-Instruct

where `my_taskset` is an installed package with a taskset of the verifiers library. Or a program
works on the rows, with the model behind OpenAI's API:

    python -m es_cookbook train program="node agent.mjs" data=rows.jsonl reward=number
        model_name=Qwen/Qwen2.5-0.5B-Instruct

Sizes that are not given (`population_size`, generations, tokens) are chosen: as much as fits into
ten minutes here, or into `minutes=60`, by what the model's first answers take. `size=none` leaves
them as they are.

Or the model calls tools of an MCP server before it answers: tools="mcp:python server.py" in place
of the program.
"""

import functools
from collections.abc import Mapping, Sequence

import chz

from es_cookbook.cli.options import recipe_config
from es_cookbook.common.cli import arguments, mistakes_exit, run_cli
from es_cookbook.common.options import built
from es_cookbook.common.terminal import BEGAN
from es_cookbook.rl.data.problem_dataset import DATASETS
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.config import SIZES, Config
from es_cookbook.runs.presets import SHORT
from es_cookbook.runs.program import train_and_tell

_SAMPLING = functools.partial(SamplingParams, stop=None)
"""Answers end with their line where a plain prompt has examples of such."""


@chz.chz
class TrainConfig(Config):
    """Train on rows of data: a prompt template and a reward function."""

    dataset: RLDatasetBuilder = chz.field(meta_factory=DATASETS, doc="training and test problems")
    sampling: SamplingParams = chz.field(
        default_factory=_SAMPLING, blueprint_unspecified=_SAMPLING, doc="how tokens are drawn"
    )


def main(config: TrainConfig) -> None:
    """Train, and print the result in one line."""
    train_and_tell(config, config.dataset.label, BEGAN)


def cli() -> None:
    short = ", ".join(f"{name} ({option})" for name, option in SHORT.items())
    more_help = f"\nShort: {short}.\nSettings of papers: preset={'|'.join(TrainConfig.presets)}."
    with mistakes_exit():
        options = with_sizes(arguments())
    run_cli(main, TrainConfig, options, more_help)


def with_sizes(options: Sequence[str]) -> list[str]:
    """Replace `size=auto` (the default) by the names of the sizes that the user left open.

    If `num_generations` is given without `minutes`, the length of the run is not chosen either.
    With `size=none`, `minutes` is left out: a command may be repeated with the sizes that it chose.

    >>> with_sizes(["eval_every=3", "size=none", "minutes=5"])
    ['eval_every=3', 'size=']
    >>> with_sizes(["preset=es_at_scale", "num_generations=5"])[2]
    'size=sampling.max_tokens,sampling.stop'
    >>> with_sizes(["preset=es_at_scale", "eval_every=3"])[2]
    'size=dataset.num_test,sampling.max_tokens,sampling.stop,num_generations'
    """
    pairs = (each.lstrip("-").partition("=") for each in options)
    taken = TrainConfig.whole_options({"size": "auto"} | {name: v for name, _, v in pairs})
    size = taken["size"]
    if size not in ("auto", "none"):
        return list(options)
    if "num_generations" in taken and "minutes" not in taken:
        taken |= {path: "" for path in SIZES if not path.startswith("sampling.")}
    free = [path for path in SIZES if size == "auto" and path not in taken]
    replaced = ("size", "minutes") if size == "none" else ("size",)
    others = [each for each in options if each.lstrip("-").partition("=")[0] not in replaced]
    return [*others, f"size={','.join(free)}"]


def built_for(recipe: str, options: Mapping[str, str]) -> Config:
    """Build the config of a recipe, or of `train`, from options as typed, inside `run_cli`.

    Raises:
        ConfigError: There is no such recipe, or it lacks an option.
    """
    return built(TrainConfig if recipe == "train" else recipe_config(recipe), options)
