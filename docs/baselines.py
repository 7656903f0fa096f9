"""The table of docs/baselines.md, from what benchmarks recorded.

    python -m docs.baselines

Every row is of a file in `benchmarks/results`, or of the recorded metrics of one run. A row of a
recipe has the sizes that its settings say now; the file names the commit that was measured.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.recipes import DATA, JOBS, RECORDED
from es_cookbook.cli.options import recipe_config
from es_cookbook.population.results import wilson_interval
from es_cookbook.runs.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
REWARDS, GOLD = "rewards", "gold answers"
_HEADS = (
    *("task", "model", "method", "learns from", "hardware", "seconds", "rollouts"),
    *("held-out score", "command", "recorded in", "metrics of a run"),
)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A row.

    Attributes:
        seconds: of a seed; "of processors" where the file has no others, "" if it has none.
        rollouts: answers that were sampled and rewarded in a run, the centre's included.
        score: mean and range over seeds; of one run, with its 95 % interval.
        source: the file, relative to the root.
        metrics: the metrics of one run, relative to the root, or "".
    """

    task: str
    model: str
    method: str
    learns: str
    seconds: str
    rollouts: str
    score: str
    command: str
    source: Path
    hardware: str = "not recorded"
    metrics: Path | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A recipe's run: genomes' evaluations, and problems of all generations."""

    genomes: int
    problems: int
    generations: int
    gold: bool
    model: str

    @property
    def evaluations(self) -> int:
        return self.genomes * self.problems * self.generations

    @property
    def learns(self) -> str:
        return GOLD if self.gold else REWARDS

    @property
    def rollouts(self) -> str:
        """With gold answers only the centre is sampled, and genomes score."""
        if not self.gold:
            return f"{self.evaluations:,}"
        return f"{self.problems * self.generations:,}, and {self.evaluations:,} scores"


def table() -> str:
    """Return all rows as a Markdown table."""
    lines = [f"| {' | '.join(_HEADS)} |", "|---" * len(_HEADS) + "|"]
    for each in rows():
        cells = (
            *(each.task, each.model, each.method, each.learns, each.hardware, each.seconds),
            *(each.rollouts, each.score, f"`{each.command}`", _link(each.source)),
            _link(each.metrics) if each.metrics else "not kept",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows() -> list[Baseline]:
    """Return all of them, the chat model's first."""
    return [
        *studied(),
        *_recipes(),
        *_spaces(),
        *_main_job(),
        *_gradients(),
        *_arithmetic(),
        *_others(),
        *_single_runs(),
    ]


@functools.cache
def sizes_of(recipe: str) -> Sizes:
    """Return the sizes in the recipe's settings."""
    make: Any = recipe_config(recipe)
    config = make()
    model = Path(config.model_name)
    weights = model / "model.safetensors"
    return Sizes(
        config.optimizer.population_size * config.attempts,
        config.dataset.problems_per_generation,
        config.num_generations,
        config.surrogate is not None,
        f"bundled, {weights.stat().st_size / 4e6:.2f} M" if weights.exists() else model.name,
    )


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _names() -> list[str]:
    """Return recipes, and tasks of the recipe chat, that have a file with three seeds."""
    return [path.stem.removeprefix("recipes-") for path in RESULTS.glob("recipes-*.json")]


def _kept(recipe: str) -> Path | None:
    """Return the file of metrics of seed 0 with the recipe's own settings, if there is one."""
    path = DATA / f"{recipe}.jsonl"
    return path if path.exists() and "chat" not in recipe else None


def studied(directory: Path = RESULTS / "study") -> Iterator[Baseline]:
    """Yield contestants of `benchmarks.study` on each task that has a file."""
    for path in sorted(directory.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for name, entry in found["contestants"].items():
            ends = [run["points"][-1] for run in entry["runs"]]
            before = entry["runs"][0]["points"][0]["score"]
            evaluations = f"{fmean(end['evaluations'] for end in ends):,.0f}"
            yield Baseline(
                f"chat: {path.stem}, fold 3",
                "SmolLM2-135M-Instruct",
                f"`{name}`, rate tuned",
                entry["told"],
                f"{fmean(end['seconds'] for end in ends):.0f}",
                f"{evaluations} scores" if entry["told"] == GOLD else evaluations,
                f"{100 * before:.1f} → {_spread([100 * end['score'] for end in ends])} %",
                found["command"],
                path,
                _hardware(entry["runs"][0]),
                path,
            )


def _recipes() -> Iterator[Baseline]:
    """Yield three seeds of a recipe."""
    for name in sorted(_names(), key=lambda name: (not name.startswith("chat"), name)):
        found = _read(f"recipes-{name}")
        recipe, _, task = name.partition("_") if name.startswith("chat") else (name, "", "")
        sizes = sizes_of(recipe)
        metric = JOBS[name].metric
        yield Baseline(
            f"{recipe}: {task}" if task else recipe,
            sizes.model,
            "ES, low rank",
            sizes.learns,
            _seconds(_values(found, "minutes, start included")),
            sizes.rollouts,
            _score(_values(found, f"{metric} before"), _values(found, f"{metric} after"), metric),
            found["command"],
            RESULTS / f"recipes-{name}.json",
            _hardware(found),
            _kept(name),
        )


def _spaces() -> Iterator[Baseline]:
    """Yield search spaces on a task of the recipe chat, and merged adapters."""
    for space, method in {
        "low_rank": "ES, low rank",
        "steering": "ES, steering vectors",
        "soft_prompt": "ES, soft prompt",
        "soft_prompt_auto": "ES, soft prompt, σ by `auto`",
        "merge_es": "ES",
        "merge_cma": "CMA-ES",
    }.items():
        found, merges = _read(f"spaces-{space}"), space.startswith("merge")
        yield Baseline(
            "merge" if merges else "chat: sums, fold 1",
            "SmolLM2-135M-Instruct",
            method,
            REWARDS if merges else GOLD,
            f"{fmean(_values(found, 'seconds of processors')):.0f} of processors",
            "768" if merges else "48, and 768 scores",
            _score(_values(found, "correct before"), _values(found, "correct after"), "correct"),
            found["command"],
            RESULTS / f"spaces-{space}.json",
            _hardware(found),
        )


def _main_job() -> Iterator[Baseline]:
    """Yield Countdown, and the same with generations that overlap."""
    sizes, found = sizes_of("countdown"), _read("main_job")
    before = _values(found, "held-out exact answers before")
    yield Baseline(
        "countdown",
        sizes.model,
        "ES, low rank",
        REWARDS,
        _seconds(_values(found, "minutes, start and evaluations included")),
        sizes.rollouts,
        _score(before, _values(found, "held-out exact answers after"), "correct"),
        found["command"],
        RESULTS / "main_job.json",
        _hardware(found),
        _kept("countdown"),
    )
    overlap = _read("overlap-learning")
    yield Baseline(
        "countdown",
        sizes.model,
        "ES, low rank, `max_staleness=1`",
        REWARDS,
        "",
        sizes.rollouts,
        _score(before, _values(overlap, "max_staleness=1: exact answers"), "correct"),
        overlap["command"],
        RESULTS / "overlap-learning.json",
        _hardware(overlap),
    )


def _gradients() -> Iterator[Baseline]:
    """Yield one run each of supervised steps and of a policy gradient, on a recipe's batches."""
    for path in sorted(RESULTS.glob("gradients-*.json")):
        found, recipe = _read(path.stem), path.stem.removeprefix("gradients-")
        sizes, values, kept = sizes_of(recipe), _by_name(found), _kept(recipe)
        assert kept is not None, recipe
        count = next(iter(read_metrics(kept)))["test/problems"]
        before = values[f"{recipe}, before: correct"]
        for way, learns, rollouts in (
            ("supervised", GOLD, f"none; {sizes.problems * sizes.generations:,} gold answers"),
            ("policy gradient", REWARDS, sizes.rollouts),
        ):
            after = values[f"{recipe}, {way}: correct"]
            yield Baseline(
                recipe,
                sizes.model,
                f"{way}, untuned",
                learns,
                f"{values[f'{recipe}, {way}: processor time']:.0f} of processors",
                rollouts,
                f"{before:.1f} → {after:.1f} % {_interval(count, after / 100)}, one run",
                found["command"],
                path,
                _hardware(found),
            )


def _arithmetic() -> Iterator[Baseline]:
    """Yield gains from two warm starts."""
    sizes, found = sizes_of("arithmetic"), _read("arithmetic")
    values = _by_name(found)
    for start in (0, 1):
        told = f"warm start {start}"
        gains = [values[f"{told}, seed {seed}: gain in right answers"] for seed in range(3)]
        minutes = [values[f"{told}, seed {seed}: minutes, start included"] for seed in range(3)]
        shown = f"none; {sizes.problems * sizes.generations:,} gold answers"
        ways: Sequence[tuple[str, str, str, str, Sequence[float]]] = (
            ("ES, low rank", REWARDS, _seconds(minutes), sizes.rollouts, gains),
            ("supervised, as many problems", GOLD, "", shown, ()),
            ("supervised, as many seconds", GOLD, _seconds(minutes), "none", ()),
            ("policy gradient, as many answers", REWARDS, "", sizes.rollouts, ()),
        )
        for method, learns, seconds, rollouts, of_seeds in ways:
            found_R = of_seeds or [values[f"{told}, {method}: gain"]]
            yield Baseline(
                f"arithmetic, {told}",
                sizes.model,
                method,
                learns,
                seconds,
                rollouts,
                f"+ {_spread(found_R)} points{'' if of_seeds else ', one run'}",
                found["command"],
                RESULTS / "arithmetic.json",
                _hardware(found),
                _kept("arithmetic") if of_seeds and not start else None,
            )


def _others() -> Iterator[Baseline]:
    """Yield thoughts, forgetting, and pass@k."""
    sizes = sizes_of("markovian")
    ways = {"es": ("ES, low rank", sizes.rollouts), "gradient": ("policy gradient", "20,480")}
    for way, (method, rollouts) in ways.items():
        found = _read(f"markovian-{way}")
        minutes = _values(found, "processor minutes, markovian")
        yield Baseline(
            "markovian",
            sizes.model,
            method,
            REWARDS,
            f"{_seconds(minutes)} of processors",
            rollouts,
            _score(_values(found, "right before"), _values(found, "right after"), "correct"),
            found["command"],
            RESULTS / f"markovian-{way}.json",
            _hardware(found),
            _kept("markovian") if way == "es" else None,
        )
    sizes = sizes_of("alignment")
    for name, learns in (
        ("none", "rewards of brevity"),
        ("pairs", "rewards of brevity, preference pairs"),
    ):
        found = _read(f"alignment-{name}")
        values = _by_name(found)
        kept, excess = (
            f"{values[f'{name}: {what} before']:.1f} → {values[f'{name}: {what} after']:.1f}"
            for what in ("correct", "excess")
        )
        yield Baseline(
            "alignment",
            sizes.model,
            "ES, low rank",
            learns,
            "",
            sizes.rollouts,
            f"{kept} % right, {excess} characters too many (medians of three seeds)",
            found["command"],
            RESULTS / f"alignment-{name}.json",
            _hardware(found),
            _kept("alignment") if name == "pairs" else None,
        )
    found = _read("pass_at_k")
    for k in (1, 4):
        gain = _by_name(found)[f"points of pass@4 gained where pass@{k} pays"]
        yield Baseline(
            "a hidden operator",
            sizes_of("countdown").model,
            f"ES, norms and biases, objective pass@{k}",
            REWARDS,
            "",
            "",
            f"pass@4 + {gain:.1f} points (median of three seeds)",
            found["command"],
            RESULTS / "pass_at_k.json",
            _hardware(found),
        )


def _single_runs() -> Iterator[Baseline]:
    """Yield seed 0 of recipes that have no other file, by the metrics that were kept."""
    shown = {*("countdown", "arithmetic", "markovian", "alignment"), *_names()}
    for path in sorted(DATA.glob("*.jsonl")):
        if (name := path.stem) in shown - {"chat_sums"}:
            continue
        recipe, _, task = name.partition("_")
        sizes, metric, lines = sizes_of(recipe), JOBS[name].metric, list(read_metrics(path))
        scores = [line[f"test/env/all/{metric}"] for line in (lines[0], lines[-1])]
        count = lines[-1]["test/problems"]
        told = f"{100 * scores[0]:.1f} → {100 * scores[1]:.1f} %{_called(metric)}"
        yield Baseline(
            f"{recipe}: {task}" if task else recipe,
            sizes.model,
            " ".join(["ES, low rank", *(f"`{each}`" for each in RECORDED[name] if "int8" in each)]),
            sizes.learns,
            "",
            sizes.rollouts,
            f"{told} {_interval(count, scores[1])}, seed 0",
            f"python -m benchmarks.recipes record {name}",
            path,
            metrics=path,
        )


def _by_name(found: Mapping[str, Any]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in found["rows"]}


def _values(found: Mapping[str, Any], what: str) -> list[float]:
    """Return a number of each seed, in the order of the file."""
    pattern = re.compile(rf"(.*, )?seed \d+(:|,) {re.escape(what)}")
    values = [row["value"] for row in found["rows"] if pattern.fullmatch(row["name"])]
    assert values, what
    return values


def _score(before_R: Sequence[float], after_R: Sequence[float], metric: str) -> str:
    return f"{before_R[0]:.1f} → {_spread(after_R)} %{_called(metric)}"


def _spread(values: Sequence[float]) -> str:
    """Return the mean, and the range if there are several."""
    several = f" ({min(values):.1f} … {max(values):.1f})" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{several}"


def _seconds(minutes: Sequence[float]) -> str:
    return f"{60 * fmean(minutes):.0f}"


def _interval(count: float, share: float) -> str:
    """Return the 95 % interval of a share of held-out problems."""
    low, high = wilson_interval(count * share, count)
    return f"({100 * low:.0f} to {100 * high:.0f})"


def _called(metric: str) -> str:
    """Return what a share is of, unless it is of right answers."""
    told = {"correct": "", "loses_to_random": " of games lost to random play"}
    return told.get(metric, f" {metric}")


def _hardware(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    threads = machine["threads"]
    return f"{machine['gpu'] or machine['cpu']}, {threads} thread{'s' if threads > 1 else ''}"


def _link(path: Path) -> str:
    return f"[{path.name}](../{path.relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    print(table())
