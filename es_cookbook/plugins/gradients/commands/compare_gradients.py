"""Compare evolution strategies with gradients on a recipe: rollouts, seconds, forgetting.

    python -m es_cookbook compare-gradients recipe=arithmetic
    ... recipe=countdown contestants=es,group seeds=0,1 factors=1
    ... recipe=arithmetic second=math num_generations=30 es.optimizer.sigma=0.02
    ... recipe=chat second=chat second.dataset.task=extraction at_equal=seconds

Contestants start with the recipe's model, problems and settings:

- `es`: the recipe's own run;
- `rewards`: the same with rewards of the genomes' own answers, if the recipe scores other answers;
- `es_at_scale`, `copes` …: the same with the settings of a paper (`es_cookbook.runs.presets`);
- `surrogate`: the same, but genomes score the centre's answers (`es_cookbook.rl.surrogate`);
- `group`, `ppo`, `expert`: a policy gradient (`es_cookbook.plugins.gradients.policy_gradient`);
- `gold`: supervised training on the gold answers, by the same program;
- `grpo`: TRL's trainer, which needs `es-cookbook[baselines]`.

An option applies to every contestant; prefixed with a contestant's name, only to that one. All must
make the same number of rollouts, and by default do (except `gold`). With `at_equal=seconds` they
may differ: give each as many generations as take the same time, and compare at equal seconds.

Each contestant's learning rate is first multiplied by each of `factors`, in runs with a separate
seed. The factor with the highest training reward, as a mean over the last quarter of the
generations, is used for all seeds, so held-out problems have no part in the choice.
`NAME.factors=1` skips this for one contestant.

The last weights of a run are measured on an engine that was built from the base, so that it has
both: the KL to the base is that of answers sampled from the last weights at temperature 1.
Forgetting is measured on the held-out problems of a `second` recipe, with its own sampling.
Seconds are those of training, without measurements. At equal seconds, a run has the last score that
it had reached by then.

The results are printed, written to `comparison.md` and `.json`, and drawn over rollouts and over
seconds. The same command continues where it was interrupted, and runs nothing twice.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias, cast

import anyio
import chz

from es_cookbook import Config, evaluate, open_run
from es_cookbook.cli.evaluate.measuring import Subject, opened
from es_cookbook.cli.options import recipe_defaults
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_with_fields
from es_cookbook.common.configs import config_to_json, trust_of
from es_cookbook.common.errors import ConfigError, DivergedError, nearest
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.common.options import built
from es_cookbook.common.terminal import markdown
from es_cookbook.engines.base import Engine
from es_cookbook.evolution.optimizers.base import AUTO, Auto, number
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.plugins.gradients.checkpoints import latest_checkpoint
from es_cookbook.plugins.gradients.commands.policy_gradient import of_recipe
from es_cookbook.plugins.gradients.commands.policy_gradient import run as run_gradients
from es_cookbook.plugins.gradients.grpo import config as grpo
from es_cookbook.plugins.gradients.grpo import main as train_by_grpo
from es_cookbook.plugins.regularisers.kl import KLToBase
from es_cookbook.plugins.report.plots import draw_runs, require_matplotlib
from es_cookbook.plugins.sweep.in_turn import batch_of, rollouts_of
from es_cookbook.plugins.sweep.many_runs import by_label, check_comparison
from es_cookbook.rl.data.problem_dataset import check_attempted
from es_cookbook.rl.objectives import Mean
from es_cookbook.rl.surrogate import Surrogate
from es_cookbook.rl.types import Metrics
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.presets import PRESETS
from es_cookbook.runs.program import run as run_evolution
from es_cookbook.runs.tracking.curves import Spent, mean_and_range, points
from es_cookbook.runs.tracking.jsonl import CORRECT, read_metrics
from es_cookbook.runs.tracking.reading import RunFiles, read_run
from es_cookbook.runs.tracking.trackers import TrackersBuilder

AnyConfig: TypeAlias = Config | policy_gradient.Config | grpo.Config
"""Config of a run of evolution strategies or of gradients."""
GRADIENTS = ("group", "ppo", "expert", "gold", "grpo")
NAMES = ("es", "rewards", *PRESETS, "surrogate", *GRADIENTS)
_SET_HERE = ("seed", "log_path", "behavior_if_log_dir_exists", "trackers", "method")


@chz.chz
class CompareGradients:
    """Compare evolution strategies with gradients on a recipe, at equal rollouts."""

    recipe: str = chz.field(default="countdown", doc="recipe to train on")
    contestants: tuple[str, ...] = chz.field(
        default=("es", "surrogate", "group"), doc=f"some of {', '.join(NAMES)}"
    )
    seeds: tuple[int, ...] = chz.field(default=(0, 1, 2), doc="seeds of each contestant's runs")
    factors: tuple[float, ...] = chz.field(
        default=(0.3, 1.0, 3.0), doc="multiples of the default learning rate to try; 1 tries none"
    )
    tuning_seed: int = chz.field(default=1000, doc="seed of the runs that choose the factor")
    at_equal: Literal["rollouts", "seconds"] = chz.field(
        default="rollouts", doc="what is equal between runs; with seconds, rollouts may differ"
    )
    second: str = chz.field(default="", doc="recipe to measure forgetting on (second.FIELD=...)")
    pass_at: int = chz.field(default=8, doc="attempts at temperature 1: pass@1 to pass@k")
    metric: str = chz.field(default=CORRECT, doc="held-out metric to compare")
    log_path: str = chz.field(default="", doc="directory; empty: runs/compare-gradients-<recipe>")

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
class _Entry:
    """A contestant's runs with the chosen learning rate, one per seed.

    Attributes:
        config: Config with the original learning rate.
        tried: factor on the learning rate -> reward at the end; None if training diverged.
        finals_R: metrics of the last weights of each run.
    """

    config: AnyConfig
    factor: float
    tried: Mapping[float, float | None]
    metric: str
    runs_R: Sequence[RunFiles]
    finals_R: Sequence[Metrics]

    def scores_R(self, spent: Spent) -> list[dict[float, float]]:
        """Return for each run, cost so far -> score; the first is before training."""
        return [points(run, self.metric, spent) for run in self.runs_R]

    def whole_R(self, spent: Spent) -> list[float]:
        """Return the total cost of each run."""
        return [max(score_at) for score_at in self.scores_R(spent)]

    def after(self, spent: Spent, most: float) -> list[float]:
        """Return the last score that each run had reached by then."""
        scores_R = self.scores_R(spent)
        return [[score for x, score in each.items() if x <= most][-1] for each in scores_R]


def contestants(
    compare: CompareGradients, fields: Mapping[str, str]
) -> tuple[dict[str, tuple[AnyConfig, Sequence[float]]], Config | None]:
    """Return Config and factors of each contestant, by name; only inside `run_cli`.

    Returns:
        These, and the Config of the recipe on which forgetting is measured, if any.

    Raises:
        ConfigError: A recipe or an option does not exist, or is set by the comparison; unequal
            rollouts.
    """
    found: dict[str, tuple[AnyConfig, Sequence[float]]] = {}
    labels = (*compare.contestants, *(["second"] if compare.second else []))
    of_all, of_one = by_label(fields, labels, (*NAMES, "second"), "a contestant")
    for name in compare.contestants:
        config, options = first_config(compare.recipe, name), of_all | of_one[name]
        own = {"factors": options.pop("factors")} if "factors" in options else {}
        for path in options:
            if path.partition(".")[0] in _SET_HERE:
                raise ConfigError(f"{path} cannot be given: the comparison sets it")
        found[name] = built(config, options), built(compare, own).factors
    counts = {name: rollouts(config) for name, (config, _) in found.items()}
    if len(set(counts.values())) > 1 and compare.at_equal == "rollouts":
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConfigError(
            f"contestants must make the same number of rollouts, found {listed}: change "
            "num_generations, es.optimizer.population_size, surrogate.surrogate.attempts or "
            "group.attempts, or compare them at_equal=seconds"
        )
    if not compare.second:
        return found, None
    return found, built(recipe_defaults(compare.second), of_one["second"])


def first_config(recipe: str, name: str) -> AnyConfig:
    """Return a contestant's Config with a recipe's settings, before options change it."""
    if name == "grpo":
        return of_recipe(grpo.Config, recipe)
    if name in GRADIENTS:
        own = {"method": name, "attempts": "1"} if name == "gold" else {"method": name}
        return built(of_recipe(policy_gradient.Config, recipe), own)
    config = recipe_defaults(recipe)
    if name == "rewards":
        config = chz.replace(config, surrogate=None)
    if name in PRESETS:
        config = built(config, PRESETS[name].options)
    if name == "surrogate":
        answers = Surrogate(attempts=max(config.optimizer.population_size * config.attempts, 2))
        config = chz.replace(config, attempts=1, objective=Mean(), surrogate=answers)
    return config


def rollouts(config: AnyConfig) -> int:
    """Return the rollouts of the whole run; per problem if a batch's size is unknown."""
    if isinstance(config, Config):
        return rollouts_of(config)
    return config.num_generations * config.attempts * (batch_of(config.dataset) or 1)


def _learning_rate(config: AnyConfig) -> float:
    if isinstance(config, Config):
        rate = cast(Auto, getattr(config.optimizer, "learning_rate", math.nan))
        return math.nan if rate == AUTO else number(rate)
    return config.learning_rate


def _at(config: AnyConfig, factor: float, seed: int, log_path: Path) -> AnyConfig:
    rate = factor * _learning_rate(config)
    how = {
        "seed": seed,
        "log_path": str(log_path),
        "behavior_if_log_dir_exists": "resume",
        "trackers": TrackersBuilder(live=None),
    }
    if not isinstance(config, Config):
        return chz.replace(config, learning_rate=rate, **how)
    if factor == 1:
        return chz.replace(config, **how)
    if math.isnan(rate):
        raise ConfigError(
            f"factors: {type(config.optimizer).__name__} has no learning rate, or finds it itself; "
            "take factors=1, or give optimizer.learning_rate a number"
        )
    optimizer = chz.replace(config.optimizer, learning_rate=rate)
    return chz.replace(config, optimizer=optimizer, **how)


def _reward_at_the_end(log_path: Path) -> float:
    """Return the mean training reward over the last quarter of the generations."""
    rows = read_metrics(log_path / METRICS)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    return fmean(rewards[-max(1, len(rewards) // 4) :])


def train(config: AnyConfig) -> None:
    """Run to the end, unless it is complete."""
    if isinstance(config, Config):
        run_evolution(config)
    elif isinstance(config, grpo.Config):
        run_gradients(train_by_grpo, config)
    else:
        run_gradients(policy_gradient.main, config)


def _run_contestant(
    compare: CompareGradients,
    name: str,
    config: AnyConfig,
    factors: Sequence[float],
    second: Config | None,
) -> _Entry:
    """Choose a contestant's learning rate, and run all seeds with it."""

    def at(factor: float, seed: int) -> AnyConfig:
        path = compare.directory / f"{name}-x{factor:g}-seed{seed}"
        return _at(config, factor, seed, path)

    tried: dict[float, float | None] = {}
    for factor in factors if len(factors) > 1 else ():
        print(f"{name}: trying {factor:g} x its learning rate", flush=True)
        run = at(factor, compare.tuning_seed)
        try:
            train(run)
            tried[factor] = _reward_at_the_end(Path(run.log_path))
        except DivergedError as error:
            print(f"{name}: {error}", flush=True)
            tried[factor] = None
    ended = {each: reward for each, reward in tried.items() if reward is not None}
    if tried and not ended:
        raise DivergedError(f"{name}: training has diverged with all factors; give smaller ones")
    factor = max(ended, key=lambda each: ended[each]) if ended else factors[0]
    finals: list[Metrics] = []
    runs = [at(factor, seed) for seed in compare.seeds]
    for run in runs:
        print(f"{name}: seed {run.seed}", flush=True)
        train(run)
        finals.append(_finals(compare, run, second))
    runs_R = [read_run(Path(run.log_path)) for run in runs]
    return _Entry(config, factor, tried, compare.metric, runs_R, finals)


def _finals(
    compare: CompareGradients, config: AnyConfig, second: Config | None, is_base: bool = False
) -> Metrics:
    """Return metrics of a run's last weights, or its base; measured once and kept."""
    name = compare.directory / "base" if is_base else Path(config.log_path)
    path = name.with_name(f"{name.name}.final.json")
    configs = [config_to_json(each) for each in (config, second) if each is not None]
    asked = {"pass_at": compare.pass_at, "configs": configs}
    if path.exists():
        known = cast("dict[str, Metrics]", parsed(read_file(path, LARGEST_TEXT, path.parent)))
        if {name: known.get(name) for name in asked} == asked:
            return known["final"]
    measure = functools.partial(final_metrics, config, compare.pass_at, second, is_base)
    final = anyio.run(measure)
    replace_file(path, [json.dumps({**asked, "final": final}, indent=1).encode()])
    return final


async def final_metrics(
    config: AnyConfig, attempts: int, second: Config | None, is_base: bool = False
) -> Metrics:
    """Measure a run's last weights, or its base."""
    async with _opened(config, is_base) as engine:
        test_P = (await config.dataset(engine.tokenizer)).test_P
        kl = KLToBase(
            weight=0.0,
            problems_per_generation=max(len(test_P), 1),
            max_tokens=config.sampling.max_tokens,
        )
        kl_P = kl(engine.tokenizer, engine.traits.context_length, 0)(0, test_P)
        found = await evaluate(config.sampler(engine), test_P, attempts, 1.0, kl_P)
        if second is None:
            return found
        other_P = (await second.dataset(engine.tokenizer)).test_P
        context_length = engine.traits.context_length
        await check_attempted(other_P, engine.tokenizer, context_length, second.sampling)
        of_other = await evaluate(second.sampler(engine), other_P)
        return found | {f"second/{key}": value for key, value in of_other.items()}


@contextlib.asynccontextmanager
async def _opened(config: AnyConfig, is_base: bool) -> AsyncGenerator[Engine]:
    """Yield an engine with the run's base, and the run's last weights as the centre."""
    run = None
    if isinstance(config, Config) and not is_base:
        run = open_run(Path(config.log_path), trust=trust_of(config_to_json(config)))
    name = "the base" if is_base else config.log_path
    subject = Subject(name, config.model_name, config.engine, config.space, run)
    async with opened(subject) as (engine, rebuilt):
        if rebuilt is not None:
            await rebuilt.go_to(len(rebuilt.run.records))
        elif not is_base:
            from es_cookbook.plugins.gradients.gradient_run import stored_weights, take_weights

            checkpoint = latest_checkpoint(Path(config.log_path))
            assert checkpoint is not None, "a complete run has one"
            weights = stored_weights(checkpoint, engine.space.shapes)
            await take_weights(engine, weights, Path(config.log_path))
        yield engine


def main(compare: CompareGradients, fields: Mapping[str, str]) -> None:
    """Run the incomplete runs; print and write the tables, and draw the curves."""
    found, second = contestants(compare, fields)
    require_matplotlib()
    compare.directory.mkdir(parents=True, exist_ok=True)
    first, _ = next(iter(found.values()))
    base = _finals(compare, first, second, is_base=True)
    entries = {name: _run_contestant(compare, name, *one, second) for name, one in found.items()}
    text = _report(compare, entries, base)
    written = compare.directory / "comparison"
    replace_file(written.with_suffix(".md"), [text.encode(), b"\n"])
    replace_file(written.with_suffix(".json"), [_json(compare, entries, base).encode()])
    runs = {name: entry.runs_R for name, entry in entries.items()}
    task, spent = compare.recipe.replace("_", " ").capitalize(), ("rollouts", "seconds")
    for over in cast("tuple[Spent, ...]", spent):
        draw_runs(Path(f"{written}-{over}"), runs, compare.metric, over, task=task)
    print(f"\n{text}\n\nwritten to {written}.md and .json, and drawn in {written}-*.png and .svg")


def _report(compare: CompareGradients, entries: Mapping[str, _Entry], base: Metrics) -> str:
    counts = {rollouts(entry.config) for entry in entries.values()}
    many = f"{counts.pop():,} rollouts" if len(counts) == 1 else "at equal seconds"
    lines = [
        f"{compare.recipe}, {many}, seeds "
        f"{', '.join(map(str, compare.seeds))}: mean (lowest … highest)",
        "",
        _table(compare, entries, base),
    ]
    if tried := [_tried(name, entry) for name, entry in entries.items() if entry.tried]:
        title = "Learning rates that were tried: training reward at the end, the chosen one in bold"
        lines += ["", f"{title}:", "", *tried]
    return "\n".join(lines)


def _table(compare: CompareGradients, entries: Mapping[str, _Entry], base: Metrics) -> str:
    """Return all contestants, and the base, as a Markdown table."""
    least = min(min(entry.whole_R("seconds")) for entry in entries.values())
    ks = ("pass@1", f"pass@{compare.pass_at}", f"maj@{compare.pass_at}")

    def row(name: str, greedy: Sequence[float], finals_R: Sequence[Metrics]) -> dict[str, str]:
        found = {"": name, "held-out, greedy": _percent(greedy)}
        if name in entries:
            entry = entries[name]
            found |= {
                f"after {least:.0f} s": _percent(entry.after("seconds", least)),
                "s of training": f"{fmean(entry.whole_R('seconds')):.0f}",
                "rollouts": f"{rollouts(entry.config):,}",
            }
        for k in ks:
            if f"test/{k}" in base:
                found[f"{k}, T = 1"] = _percent([final[f"test/{k}"] for final in finals_R])
        kl = fmean(final["test/env/kl/kl"] for final in finals_R)
        found["KL to the base, nats a token"] = f"{kl:.3f}"
        if compare.second:
            found["second task"] = _percent([_second(final) for final in finals_R])
        return found

    start = next(iter(entries.values())).after("seconds", 0)
    rows = [row("base", start[:1], [base])]
    rows += [row(n, e.after("seconds", math.inf), e.finals_R) for n, e in entries.items()]
    head = list(rows[-1])
    return markdown(head, [[each.get(column, "") for column in head] for each in rows])


def _second(metrics: Metrics) -> float:
    """Score on the second task."""
    names = ("env/all/correct", "env/all/solved", "reward/mean")
    return next(metrics[key] for name in names if (key := f"second/test/{name}") in metrics)


def _percent(values_R: Sequence[float]) -> str:
    return f"{100 * values_R[0]:.1f} %" if len(values_R) == 1 else mean_and_range(values_R)


def _tried(name: str, entry: _Entry) -> str:
    rate = _learning_rate(entry.config)
    cells = {
        f: f"{rate * f:.3g}: {'diverged' if reward is None else f'{reward:.3f}'}"
        for f, reward in entry.tried.items()
    }
    cells[entry.factor] = f"**{cells[entry.factor]}**"
    return f"- {name}: {', '.join(cells.values())}"


def _json(compare: CompareGradients, entries: Mapping[str, _Entry], base: Metrics) -> str:
    found = {
        name: {
            "learning_rate": entry.factor * _learning_rate(entry.config),
            "tried": {f"{factor:g}": reward for factor, reward in entry.tried.items()},
            "race": {
                "rollouts_M": [*map(int, entry.scores_R("rollouts")[0])],
                "seconds_R_M": [list(score_at) for score_at in entry.scores_R("seconds")],
                "scores_R_M": [list(each.values()) for each in entry.scores_R("seconds")],
            },
            "finals": entry.finals_R,
        }
        for name, entry in entries.items()
    }
    whole = {"recipe": compare.recipe, "seeds": compare.seeds, "base": base, "contestants": found}
    return json.dumps(whole, indent=1)


def cli() -> None:
    more_help = (
        "\n\nAn option of a recipe's run (num_generations=30, dataset.num_test=100) applies to "
        "every contestant;\nprefixed with a contestant's name, only to that one "
        "(es.optimizer.sigma=0.02 group.learning_rate=1e-3)."
    )
    run_with_fields(main, CompareGradients, more_help)
