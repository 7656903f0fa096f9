"""Short names of options, and presets: settings of papers.

`es-cookbook train preset=copes data=rows.jsonl ...`. Options of the user override those of the
preset, and the command says so, because the run is then no longer what the paper describes.
tests/runs/test_presets.py compares the resulting formulas with those of the papers;
docs/hyper_parameters.md lists the parts of a paper that options do not express.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import chz

from es_cookbook.common.errors import nearest
from es_cookbook.common.options import OptionError
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import say_once
from es_cookbook.common.trust import load
from es_cookbook.rl.types import RLDatasetBuilder

SHORT = {
    "data": "dataset.source",
    "test_data": "dataset.test_source",
    "prompt": "dataset.prompt",
    "reward": "dataset.reward",
    "batch": "dataset.problems_per_generation",
}
"""Short name -> option."""
_PARTS = "dataset.parts"
"""The data sets of a mixture, also given by their names."""
_DATASETS = Registered("datasets")
_ENVIRONMENTS = Registered("environments")
"""Data sets of environments from libraries; the class tells the option for the environment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preset:
    """Options that a name stands for.

    Attributes:
        options: options as a user would type them.
        source: the paper.
    """

    options: Mapping[str, str]
    source: str


def whole_options(given: Mapping[str, str], presets: Mapping[str, Preset]) -> dict[str, str]:
    """Return the options with short names and a preset expanded.

    >>> whole_options({"reward.tolerance": "0.01", "seed": "1"}, {})
    {'dataset.reward.tolerance': '0.01', 'seed': '1'}
    >>> whole_options({"environment": "gsm8k"}, {})
    {'dataset': 'verifiers', 'dataset.taskset': 'gsm8k'}
    >>> whole_options({"program": "sh agent.sh"}, {})
    {'dataset': 'program', 'dataset.program': 'sh agent.sh'}

    Raises:
        OptionError: There is no such preset.
    """
    whole: dict[str, str] = {}
    for path, text in given.items():
        first, dot, rest = path.partition(".")
        if path == "environment":
            whole |= _of_environment(text)
        elif path in _DATASETS and path in chz.chz_fields(load(_DATASETS[path])):
            whole |= {"dataset": path, f"dataset.{path}": text}
        elif path == _PARTS and text:
            for i, name in enumerate(text.split(",")):
                whole |= {f"{path}.{i}.dataset": name, f"{path}.{i}.tag": name}
        else:
            whole[f"{SHORT.get(first, first)}{dot}{rest}"] = text
    name = whole.pop("preset", None) if presets else None
    return whole if name is None else _with_preset(name, whole, presets)


def _of_environment(text: str) -> dict[str, str]:
    kind, _, which = text.rpartition(":")
    value = _ENVIRONMENTS.get(kind or "default")
    if value is None:  # Refused as a data set, with a list of those that there are.
        return {"dataset": kind, "dataset.name": which}
    part = cast("type[RLDatasetBuilder]", load(value))
    name = next(name for name, of in _DATASETS.items() if of == value)
    return {"dataset": name, f"dataset.{part.environment}": which}


def _with_preset(
    name: str, given: Mapping[str, str], presets: Mapping[str, Preset]
) -> dict[str, str]:
    if name not in presets:
        raise OptionError(f"preset={name}: {nearest(name, presets)}")
    options = presets[name].options
    replaced = [path for path, text in options.items() if given.get(path, text) != text]
    if replaced:
        which = ", ".join(f"{path}={given[path]} in place of {options[path]}" for path in replaced)
        say_once(f"preset={name}: {which}; this is no longer what {presets[name].source} describes")
    # A part that is replaced has other options.
    stay = {
        path: text
        for path, text in options.items()
        if not any(path.startswith(f"{part}.") for part in replaced)
    }
    return {**stay, **given}


PLAIN = {
    "optimizer": "es",
    "optimizer.learning_rate_schedule": "none",
    "optimizer.sigma_schedule": "none",
    "sampling.temperature": "0.0",
    "surrogate": "None",
}
"""Plain evolution strategies without schedules, on greedy answers."""
_ES_AT_SCALE = {
    **PLAIN,
    "search_space": "full_rank",
    "fitness": "zscore",
    "optimizer.sigma": "0.001",
    "optimizer.learning_rate": "0.0005",
    "optimizer.antithetic": "False",
    "optimizer.population_size": "30",
    "dataset.problems_per_generation": "200",
}
_BUILT_IN: Mapping[str, Preset] = {
    "es_at_scale": Preset(_ES_AT_SCALE, "arXiv:2509.24372"),
    "eggroll": Preset(
        {
            **PLAIN,
            "search_space": "low_rank",
            "search_space.rank": "1",
            "optimizer.antithetic": "True",
            "fitness": "per_problem_baseline",
        },
        "arXiv:2511.16652",
    ),
    "copes": Preset(
        {
            **_ES_AT_SCALE,
            "search_space.partitions": "4",
            # α is that of each part's own N/K genomes: √K · α of our step, α/N · √K · Σ.
            "optimizer.learning_rate": "0.001",
            "optimizer.population_size": "40",
            "dataset.problems_per_generation": "64",
        },
        "arXiv:2608.02391",
    ),
    "essam": Preset(
        {
            **_ES_AT_SCALE,
            "optimizer.sigma": "0.0015",
            "optimizer.learning_rate": "0.00025",
            "optimizer.sharpness": "0.0001",
            "optimizer.population_size": "40",
        },
        "arXiv:2602.01003",
    ),
    "anchored": Preset(
        {
            **_ES_AT_SCALE,
            # Decay follows the step there: base + (1 - αλ) (centre + step - base), with λ = 10.
            "optimizer.weight_decay": "0.005",
            "optimizer.learning_rate": "0.0004975",
        },
        "arXiv:2605.30148",
    ),
    "randopt": Preset(
        {
            **_ES_AT_SCALE,
            "optimizer.learning_rate": "0.0",
            "optimizer.population_size": "5000",
            "num_generations": "1",
        },
        "arXiv:2603.12228",
    ),
}
_REGISTERED = Registered("presets")
"""Name -> "module:function" that returns a preset."""


class _Presets(Mapping[str, Preset]):
    """The presets here and those of plug-ins, which are imported when they are taken."""

    def __getitem__(self, name: str) -> Preset:
        if name in _BUILT_IN:
            return _BUILT_IN[name]
        return cast(Callable[[], Preset], load(_REGISTERED[name]))()

    def __iter__(self) -> Iterator[str]:
        yield from _BUILT_IN
        yield from (name for name in _REGISTERED if name not in _BUILT_IN)

    def __len__(self) -> int:
        return sum(1 for _ in self)


PRESETS: Mapping[str, Preset] = _Presets()
"""Presets by the name of the method."""
