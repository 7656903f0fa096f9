"""Evolution strategies beside gradients on a recipe: rollouts, seconds, memory and forgetting.

    python -m es_cookbook compare-gradients recipe=arithmetic
    ... recipe=countdown contestants=es,group seeds=0,1 factors=1
    ... recipe=arithmetic second=math num_generations=30 group.attempts=16 es.optimizer.sigma=0.02

Contestants begin with the recipe's model, problems and settings:

- `es`: as the recipe trains;
- `surrogate`: the same, where genomes score the centre's answers (`es_cookbook.rl.surrogate`);
- `group`, `ppo`, `expert`: a policy gradient (`es_cookbook.baselines.policy_gradient`);
- `grpo`: TRL's trainer (`es_cookbook.baselines.grpo`), which needs `es-cookbook[baselines]`.

An option holds for every contestant, with its name before it for that one alone. All must make the
same number of rollouts, and by default do.

Each contestant's learning rate is first multiplied with each of `factors`, in runs with a seed of
their own. The one whose rewards in training were the highest, as a mean over the last quarter of
the generations, is taken for all seeds: nothing held out has a part in the choice.
`NAME.factors=1` tries none of one contestant.

What comes out is printed, and written to `comparison.md` and `.json` and drawn by rollouts and by
seconds. The same command goes on where it was interrupted.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import chz

from es_cookbook import train
from es_cookbook.baselines import policy_gradient
from es_cookbook.baselines.grpo import config as grpo
from es_cookbook.commands.gradients.contest import (
    AnyConfig,
    Finals,
    Measured,
    Race,
    base_metrics,
    race_of,
    run_measured,
    table,
)
from es_cookbook.commands.gradients.program import of_recipe
from es_cookbook.commands.recipe_configs import by_label, check_comparison, recipe_defaults
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import changed, run_with_fields
from es_cookbook.common.errors import ConfigError, did_you_mean, nearest
from es_cookbook.rl.objectives import Mean
from es_cookbook.rl.surrogate import Surrogate
from es_cookbook.rl.types import Metrics
from es_cookbook.runs.directory import METRICS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.reading import RunFiles, read_run
from es_cookbook.runs.report.curves import Spent, lines_of
from es_cookbook.runs.report.plots import draw, require_matplotlib
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics
from es_cookbook.train.sweep import batch_of, rollouts_of

EVOLUTION, GRADIENTS = ("es", "surrogate"), ("group", "ppo", "expert", "grpo")
NAMES = (*EVOLUTION, *GRADIENTS)
METRIC = "test/env/all/correct"
_SET_HERE = ("seed", "log_path", "behavior_if_log_dir_exists", "trackers", "method")


@chz.chz
class CompareGradients:
    """Compare evolution strategies with gradients on a recipe, at equal rollouts."""

    recipe: str = chz.field(default="countdown", doc="what they train on")
    contestants: tuple[str, ...] = chz.field(
        default=("es", "surrogate", "group"),
        doc=f"which, with commas between them: {', '.join(NAMES)}",
    )
    seeds: tuple[int, ...] = chz.field(default=(0, 1, 2), doc="of each contestant's runs")
    factors: tuple[float, ...] = chz.field(
        default=(0.3, 1.0, 3.0), doc="on its learning rate, of which one is chosen; 1: no choice"
    )
    tuning_seed: int = chz.field(default=1000, doc="of the runs by which factors are chosen")
    second: str = chz.field(
        default="", doc="another recipe, on whose held-out problems forgetting is measured"
    )
    pass_at: int = chz.field(
        default=8, doc="attempts at each held-out problem, at temperature 1: pass@1 to pass@k"
    )
    metric: str = chz.field(default=METRIC, doc="a held-out metric of the runs")
    log_path: str = chz.field(
        default="", doc="directory of all runs; runs/compare-gradients-<recipe> if empty"
    )

    @chz.validate
    def _lists(self) -> None:
        for name in self.contestants:
            if name not in NAMES:
                raise ConfigError(f"unknown contestant {name!r}: {nearest(name, NAMES)}")
        check_comparison(
            self.metric,
            {
                "contestants": self.contestants,
                "seeds": self.seeds,
                "factors": self.factors,
                "seeds and tuning_seed": (*self.seeds, self.tuning_seed),
            },
        )
        if not all(math.isfinite(factor) and factor > 0 for factor in self.factors):
            raise ConfigError(f"factors must be positive, found {self.factors}")
        check_range(self, "pass_at", at_least=2)

    @property
    def directory(self) -> Path:
        return Path(self.log_path or f"runs/compare-gradients-{self.recipe}")


@dataclasses.dataclass(frozen=True, slots=True)
class Contestant:
    """A Config before its learning rate is chosen, and the factors among which it is."""

    config: AnyConfig
    factors: Sequence[float]


def contestants(compare: CompareGradients, fields: Mapping[str, str]) -> dict[str, Contestant]:
    """All of them, by name; only inside `run_cli`.

    Raises:
        ConfigError: An option that is not one, or that the comparison sets; unequal rollouts.
    """
    found: dict[str, Contestant] = {}
    of_all, of_one = by_label(fields, compare.contestants, NAMES, "a contestant")
    for name in compare.contestants:
        config, given = first_config(compare.recipe, name), of_all | of_one[name]
        own = {key: value for key, value in given.items() if key == "factors"}
        options = {key: value for key, value in given.items() if key != "factors"}
        _check_options(name, config, options)
        found[name] = Contestant(changed(config, options), changed(compare, own).factors)
    counts = {name: rollouts(each.config) for name, each in found.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(
            f"contestants must make the same number of rollouts, found {listed}: change "
            "num_generations, es.optimizer.population_size, surrogate.surrogate.attempts or "
            "group.attempts"
        )
    return found


def _check_options(name: str, config: AnyConfig, options: Mapping[str, str]) -> None:
    known = chz.chz_fields(type(config))
    for path in options:
        first = path.partition(".")[0]
        if first in _SET_HERE:
            raise ConfigError(f"{path} cannot be given: the comparison sets it")
        if first not in known:
            raise ConfigError(
                f"{path} is no option of {name}{did_you_mean(first, known)}; with a contestant's "
                f"name before it, as in {name}.{path}, an option holds for that one alone"
            )


def first_config(recipe: str, name: str) -> AnyConfig:
    """A contestant's before options change it, with a recipe's settings."""
    if name == "grpo":
        return of_recipe(grpo.Config, recipe)
    if name in GRADIENTS:
        return changed(of_recipe(policy_gradient.Config, recipe), {"method": name})
    config = recipe_defaults(recipe)
    if name == "surrogate":
        answers = Surrogate(attempts=max(config.optimizer.population_size * config.attempts, 2))
        config = chz.replace(config, attempts=1, objective=Mean(), surrogate=answers)
    return config


def rollouts(config: AnyConfig) -> int:
    """Of the whole run; for each problem of a batch where the dataset says not how many."""
    if isinstance(config, train.Config):
        return rollouts_of(config)
    return config.num_generations * config.attempts * (batch_of(config.dataset) or 1)


def _learning_rate(config: AnyConfig) -> float:
    if isinstance(config, train.Config):
        return cast(float, getattr(config.optimizer, "learning_rate", math.nan))
    return config.learning_rate


def _at(config: AnyConfig, factor: float, seed: int, log_path: Path) -> AnyConfig:
    rate = factor * _learning_rate(config)
    how = {
        "seed": seed,
        "log_path": str(log_path),
        "behavior_if_log_dir_exists": "resume",
        "trackers": JsonlTrackerBuilder(),
    }
    if not isinstance(config, train.Config):
        return chz.replace(config, learning_rate=rate, **how)
    if factor == 1:
        return chz.replace(config, **how)
    if math.isnan(rate):
        raise ConfigError(
            f"factors: {type(config.optimizer).__name__} has no learning rate; take factors=1"
        )
    optimizer = chz.replace(config.optimizer, learning_rate=rate)
    return chz.replace(config, optimizer=optimizer, **how)


def reward_at_the_end(log_path: Path) -> float:
    """In training: the mean over the last quarter of the generations."""
    rewards = [
        row["reward/mean"] for row in read_metrics(log_path / METRICS) if "reward/mean" in row
    ]
    last = rewards[-max(1, len(rewards) // 4) :]
    return math.fsum(last) / len(last)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A contestant's runs: at the learning rate that was chosen, one for each seed.

    Attributes:
        tried: factor on the learning rate -> reward at the end.
    """

    config: AnyConfig
    factor: float
    tried: Mapping[float, float]
    runs: Sequence[RunFiles]
    race: Race
    measured: Sequence[Measured]


def entered(compare: CompareGradients, name: str, one: Contestant, finals: Finals) -> Entry:
    """Choose a contestant's learning rate, and run all its seeds."""

    def path(factor: float, seed: int) -> Path:
        return compare.directory / f"{name}-x{factor:g}-seed{seed}"

    tried: dict[float, float] = {}
    for factor in one.factors if len(one.factors) > 1 else ():
        print(f"{name}: trying {factor:g} x its learning rate", flush=True)
        log_path = path(factor, compare.tuning_seed)
        run_measured(_at(one.config, factor, compare.tuning_seed, log_path), None)
        tried[factor] = reward_at_the_end(log_path)
    factor = max(tried, key=lambda each: tried[each]) if tried else one.factors[0]
    measured: list[Measured] = []
    for seed in compare.seeds:
        print(f"{name}: seed {seed}", flush=True)
        measured.append(run_measured(_at(one.config, factor, seed, path(factor, seed)), finals))
    runs = [read_run(path(factor, seed)) for seed in compare.seeds]
    return Entry(one.config, factor, tried, runs, race_of(runs, compare.metric), measured)


def main(compare: CompareGradients, fields: Mapping[str, str]) -> None:
    """Run what is not complete yet; print and write the tables, and draw the curves."""
    found = contestants(compare, fields)
    require_matplotlib()
    second = recipe_defaults(compare.second).dataset if compare.second else None
    finals = Finals(compare.pass_at, second)
    compare.directory.mkdir(parents=True, exist_ok=True)
    base = base_metrics(next(iter(found.values())).config, finals)
    entries = {name: entered(compare, name, one, finals) for name, one in found.items()}
    text = _report(compare, entries, base)
    written = compare.directory / "comparison"
    replace_file(written.with_suffix(".md"), [text.encode(), b"\n"])
    replace_file(written.with_suffix(".json"), [_json(compare, entries, base).encode()])
    _draw(written, compare, {name: entry.runs for name, entry in entries.items()})
    print(f"\n{text}\n\nwritten to {written}.md and .json, and drawn in {written}-*.png and .svg")


def _draw(path: Path, compare: CompareGradients, runs: Mapping[str, Sequence[RunFiles]]) -> None:
    """Two plots beside `path`: over rollouts, and over seconds, the mean of the seeds' seconds."""
    count = len(compare.seeds)
    seeds = f"mean and range of {count} seeds" if count > 1 else "one seed"
    spent: tuple[Spent, ...] = ("rollouts", "seconds")
    for over in spent:
        draw(
            path.with_name(f"{path.name}-{over}"),
            lines_of(runs, compare.metric, over, 100),
            title=f"{compare.recipe.replace('_', ' ').capitalize()}, {seeds}",
            x_label=f"training {over}",
            y_label=f"{compare.metric.removeprefix('test/env/all/')}, held-out (%)",
        )


def _report(compare: CompareGradients, entries: Mapping[str, Entry], base: Metrics) -> str:
    races = {name: entry.race for name, entry in entries.items()}
    measured = {name: entry.measured for name, entry in entries.items()}
    lines = [
        f"{compare.recipe}, {rollouts(next(iter(entries.values())).config):,} rollouts, seeds "
        f"{', '.join(map(str, compare.seeds))}: mean (lowest … highest)",
        "",
        table(races, measured, base, compare.pass_at, second=bool(compare.second)),
    ]
    tried = [_tried(name, entry) for name, entry in entries.items() if entry.tried]
    if tried:
        title = "Learning rates that were tried, and rewards in training at the end; the chosen one"
        lines += ["", f"{title} in bold:", "", *tried]
    return "\n".join(lines)


def _tried(name: str, entry: Entry) -> str:
    rate = _learning_rate(entry.config)
    cells = {f: f"{rate * f:.3g}: {reward:.3f}" for f, reward in entry.tried.items()}
    cells[entry.factor] = f"**{cells[entry.factor]}**"
    return f"- {name}: {', '.join(cells.values())}"


def _json(compare: CompareGradients, entries: Mapping[str, Entry], base: Metrics) -> str:
    found = {
        name: {
            "learning_rate": entry.factor * _learning_rate(entry.config),
            "tried": {f"{factor:g}": reward for factor, reward in entry.tried.items()},
            "race": dataclasses.asdict(entry.race),
            "measured": [dataclasses.asdict(each) for each in entry.measured],
        }
        for name, entry in entries.items()
    }
    whole = {"recipe": compare.recipe, "seeds": compare.seeds, "base": base, "contestants": found}
    return json.dumps(whole, indent=1)


def cli() -> None:
    more_help = (
        "\n\nAn option of a recipe's run (num_generations=30, dataset.num_test=100) holds for "
        "every contestant;\nwith a contestant's name before it, for that one alone "
        "(es.optimizer.sigma=0.02 group.learning_rate=1e-3)."
    )
    run_with_fields(main, CompareGradients, more_help)
