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
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import chz

from es_cookbook.cli.options import recipe_config
from es_cookbook.common.cli import arguments, built, run_cli
from es_cookbook.common.references import load
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import BEGAN
from es_cookbook.rl.data.problem_dataset import DATASETS
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams
from es_cookbook.runs.config import SIZES, Config
from es_cookbook.runs.presets import PRESETS
from es_cookbook.runs.program import train_and_tell

SHORT = {
    "data": "dataset.source",
    "test_data": "dataset.test_source",
    "prompt": "dataset.prompt",
    "reward": "dataset.reward",
    "batch": "dataset.problems_per_generation",
}
"""What may be typed -> the option that it is."""

_ENVIRONMENTS = Registered("environments")
"""Data sets of others' environments, whose classes say by which option they are named."""
_DATASETS = Registered("datasets")

_SAMPLING = functools.partial(SamplingParams, stop=None)
"""Answers end with their line where a plain prompt has examples of such."""


@chz.chz
class TrainConfig(Config):
    """Train on rows of data, asked by a template and scored by a function."""

    dataset: RLDatasetBuilder = chz.field(
        meta_factory=DATASETS, doc="training and held-out problems"
    )
    sampling: SamplingParams = chz.field(
        default_factory=_SAMPLING, blueprint_unspecified=_SAMPLING, doc="how tokens are drawn"
    )


def main(config: TrainConfig) -> None:
    """Train, and say in one line what it brought."""
    train_and_tell(config, config.dataset.label, BEGAN)


def cli() -> None:
    short = ", ".join(f"{name} ({option})" for name, option in SHORT.items())
    run_cli(main, TrainConfig, with_sizes(whole_names(arguments())), f"\n\nShort: {short}.")


def with_sizes(options: Sequence[str]) -> list[str]:
    """Options with the names of the sizes that are free in place of `size=auto`, the default.

    Whoever says for how many generations, and not for how long, has decided on the time as well.

    >>> with_sizes(["eval_every=3", "size=none"])
    ['eval_every=3', 'size=']
    >>> with_sizes(["preset=es_at_scale", "num_generations=5"])[2]
    'size=sampling.max_tokens,sampling.stop'
    >>> with_sizes(["preset=es_at_scale", "eval_every=3"])[2]
    'size=dataset.num_test,sampling.max_tokens,sampling.stop,num_generations'
    """
    given = {
        name.lstrip("-"): value for name, _, value in (each.partition("=") for each in options)
    }
    size = given.get("size", "auto")
    if size not in ("auto", "none"):
        return list(options)
    taken = {*given, *(PRESETS[given["preset"]].options if given.get("preset") in PRESETS else ())}
    if "num_generations" in taken and "minutes" not in taken:
        taken |= {path for path in SIZES if not path.startswith("sampling.")}
    free = [path for path in SIZES if size == "auto" and path not in taken]
    others = [each for each in options if each.lstrip("-").partition("=")[0] != "size"]
    return [*others, f"size={','.join(free)}"]


def config_class_of(recipe: str) -> type[Config]:
    """The config of a recipe's command, or of this one, which is the recipe `train`.

    Raises:
        ConfigError: There is no such recipe.
    """
    return TrainConfig if recipe == "train" else recipe_config(recipe)


def built_for(recipe: str, options: Mapping[str, str]) -> Config:
    """A recipe's config with options as the user typed them; only inside `run_cli`.

    Raises:
        ConfigError: There is no such recipe, or an option is none of its.
    """
    options = whole_options(options) if recipe == "train" else options
    return built(config_class_of(recipe), options)


def whole_options(fields: Mapping[str, str]) -> dict[str, str]:
    """The same of options that are already split into names and values.

    >>> whole_options({"data": "rows.jsonl", "seed": "1"})
    {'dataset.source': 'rows.jsonl', 'seed': '1'}
    """
    whole = whole_names(f"{name}={value}" for name, value in fields.items())
    return {name: value for name, _, value in (option.partition("=") for option in whole)}


def whole_names(arguments: Iterable[str]) -> list[str]:
    """Options with their whole names in place of short ones.

    >>> whole_names(["reward.tolerance=0.01", "seed=1"])
    ['dataset.reward.tolerance=0.01', 'seed=1']
    >>> whole_names(["environment=gsm8k", "environment=verifiers:gsm8k"])
    ['dataset=verifiers', 'dataset.taskset=gsm8k', 'dataset=verifiers', 'dataset.taskset=gsm8k']
    >>> whole_names(["program=sh agent.sh"])
    ['dataset=program', 'dataset.program=sh agent.sh']
    >>> whole_names(["tools=mcp:sh server.sh"])
    ['dataset=tools', 'dataset.tools=mcp:sh server.sh']
    """
    whole: list[str] = []
    for argument in arguments:
        name, equals, value = argument.lstrip("-").partition("=")
        first, dot, rest = name.partition(".")
        if name == "environment" and equals:
            kind, _, which = value.rpartition(":")
            whole += _of_environment(kind or "default", which)
        elif equals and name in _DATASETS and name in chz.chz_fields(load(_DATASETS[name])):
            whole += [f"dataset={name}", f"dataset.{name}={value}"]
        elif equals and first in SHORT:
            whole.append(f"{SHORT[first]}{dot}{rest}={value}")
        else:
            whole.append(argument)
    return whole


def _of_environment(kind: str, which: str) -> list[str]:
    if kind not in _ENVIRONMENTS:  # Refused as a data set, which lists those that there are.
        return [f"dataset={kind}", f"dataset.name={which}"]
    value = _ENVIRONMENTS[kind]
    part = cast("type[RLDatasetBuilder]", load(value))
    name = next(name for name, of in _DATASETS.items() if of == value)
    return [f"dataset={name}", f"dataset.{part.environment}={which}"]
