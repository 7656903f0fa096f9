"""Gains of every recipe's small setting on held-out problems, and its time.

    python -m benchmarks.recipes                                            # all
    python -m benchmarks.recipes code logic                                 # some
    OMP_NUM_THREADS=2 python -m benchmarks.recipes chat_sums chat_extraction    # a chat model's
    OMP_NUM_THREADS=2 python -m benchmarks.recipes record              # for a test: see RECORDED
    python -m benchmarks.recipes record logic failing/constant         # some of them

Each run is a separate process, `es-cookbook <recipe> seed=<seed>`, without other options but
where a task of the recipe `chat` is one; its model is that of `make chat-model`. Before and after
are the first and the last evaluation of the centre; `form` is the metric that says whether an
answer has the right form, so what a gain in form could explain is seen.
"""

import dataclasses
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from benchmarks.harness import (
    CHAT_MODEL,
    Row,
    before_and_after,
    call,
    first_and_last,
    report,
    row,
)
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.recipes.knows.d_prime import of_evaluation
from es_cookbook.rl.types import Metrics
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.tracking.jsonl import finite, read_metrics

SEEDS = (0, 1, 2)
ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/runs/tracking/data"
"""The directory of recorded runs."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, and its goals.

    Attributes:
        metric: metric that should rise.
        form: the metric of the form.
        points: points to be gained.
        minutes: most wall-clock minutes.
        options: options of the command, besides the seed.
        others: further numbers of an evaluation, which are no shares.
    """

    metric: str = "correct"
    form: str = "well_formed"
    points: float = 10
    minutes: float = 5
    options: tuple[str, ...] = ()
    others: Mapping[str, Callable[[Metrics], float]] = dataclasses.field(
        default_factory=dict[str, Callable[[Metrics], float]]
    )


def chat(task: str, points: float = 20, minutes: float = 15) -> Job:
    """Return the job of the chat model at one of its tasks."""
    given = f"model_name={CHAT_MODEL}", f"dataset.task={task}"
    return Job(points=points, minutes=minutes, options=given)


def d_prime(tag: str) -> Callable[[Metrics], float]:
    """Return the d′ of an evaluation of the recipe `knows`, for one kind of question."""

    def of(evaluation: Metrics) -> float:
        found = of_evaluation(evaluation, tag)
        return found[0] if found else math.nan

    return of


JOBS: Mapping[str, Job] = {
    "arithmetic": Job(),
    "math": Job(form="format"),
    "logic": Job(),
    "rush_hour": Job(),
    "code": Job("solved", "answered"),
    "crossword": Job(form="format"),
    "conciseness": Job("concise", "correct", others={"excess": itemgetter("test/env/all/excess")}),
    "pairwise": Job(),
    "mixture": Job(),
    "guess_number": Job(),
    "calculator": Job(),
    "search": Job(),
    "markovian": Job(form="logprob"),
    "tic_tac_toe": Job("loses_to_random", "illegal"),
    "knows": Job(
        "agrees",
        "yes",
        minutes=60,
        options=(f"model_name={CHAT_MODEL}",),
        others={f"d′, {tag}": d_prime(tag) for tag in ("all", "facts", "sums")},
    ),
    "chat_sums": chat("sums", 50, 10),
    "chat_differences": chat("differences"),
    "chat_chain_sum": chat("chain_sum"),
    "chat_constraints": chat("constraints"),
    "chat_conciseness": chat("conciseness"),
    "chat_extraction": chat("extraction"),
}
"""Jobs by recipe, and task if any; Countdown has `main_job`."""


def words(name: str) -> tuple[str, ...]:
    """Return the command of a job."""
    return ("chat" if name.startswith("chat_") else name, *JOBS[name].options)


def broken(*options: str) -> tuple[str, ...]:
    """Return the command of Countdown with settings that cannot learn."""
    return ("countdown", "num_generations=6", "eval_every=3", *options)


def scored(reward: str, num_generations: int = 6) -> tuple[str, ...]:
    """Return the command of Countdown's model with a reward of this module, on bundled rows."""
    given = f"reward=benchmarks.recipes:{reward}", f"model_name={BUNDLED_MODEL}"
    data = f"data={ROOT / 'recipes/questions.jsonl'}", "prompt={numbers}={target}\n"
    size = "batch=8", "sampling.max_tokens=32", "optimizer.population_size=32"
    step = "optimizer.sigma=0.01", "optimizer.learning_rate=0.02"
    length = f"num_generations={num_generations}", "eval_every=3"
    return ("train", *data, *given, *size, *step, *length)


RECORDED: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("alignment", "countdown")},
    **{name: words(name) for name, job in JOBS.items() if not job.options},
    "chat_sums": (*words("chat_sums"), "engine.products=int8"),
    "failing/sigma_large": broken("optimizer.sigma=0.3"),
    "failing/sigma_small": broken("optimizer.sigma=1e-6", "optimizer.learning_rate=2e-6"),
    "failing/rate_large": broken("optimizer.learning_rate=2"),
    "failing/cut": broken("sampling.max_tokens=8"),
    "failing/constant": scored("constant"),
    "failing/never": scored("never"),
}
"""Runs of seed 0 whose metrics `tests/runs/tracking/test_findings.py` reads, and their commands.

At least one of every recipe, which all learn, and some that cannot.
"""
_READ = re.compile(
    "progress/generation|test/(?!low|high)|test/(low|high)/reward/mean|reward/|objective/|genomes/"
    "|rollouts/|optimizer/|step/rms|genetic/|env/all/correct$"
)
"""Keys of metrics that findings read."""
FALLS = {"loses_to_random"}
"""Metrics that should fall."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Metrics before and after, two of them in percent; minutes by the clock, of processors."""

    values: list[float]
    forms: list[float]
    others: dict[str, list[float]]
    minutes: float
    processor_minutes: float


def measured(name: str, seed: int, log_path: Path) -> Measured:
    """Run one seed."""
    job = JOBS[name]
    clock, processor = call(*words(name), f"seed={seed}", f"log_path={log_path}")
    values, forms = (
        [100 * value for value in before_and_after(log_path, f"test/env/all/{metric}")]
        for metric in (job.metric, job.form)
    )
    ends = first_and_last(log_path, f"test/env/all/{job.metric}")
    others = {key: [of(end) for end in ends] for key, of in job.others.items()}
    return Measured(values, forms, others, clock / 60, processor / 60)


def rows_of(job_name: str, seed: int) -> list[Row]:
    """Run one seed; its lines of the table."""
    job = JOBS[job_name]
    metric, form = job.metric, job.form
    with tempfile.TemporaryDirectory() as directory:
        run = measured(job_name, seed, Path(directory) / "run")
    name, values, forms = f"{job_name}, seed {seed}:", run.values, run.forms
    gain = (values[0] - values[1]) if metric in FALLS else (values[1] - values[0])
    took = f"{run.minutes:.1f} min ({run.processor_minutes:.1f} of processors)"
    print(f"{name} {values[0]:.1f} -> {values[1]:.1f} in {took}", flush=True)
    return [
        *(each for key, pair in run.others.items() for each in _both(f"{name} {key}", pair, "")),
        *_both(f"{name} {metric}", values, "%"),
        row(f"{name} gain", [gain], "points", at_least=job.points),
        *_both(f"{name} {form}", forms, "%"),
        row(f"{name} minutes, start included", [run.minutes], "min", at_most=job.minutes),
        row(f"{name} minutes of processors", [run.processor_minutes], "min"),
    ]


def _both(name: str, values: Sequence[float], unit: str) -> list[Row]:
    """Return the rows of a metric before and after."""
    return [
        row(f"{name} {when}", [value], unit)
        for when, value in zip(("before", "after"), values, strict=True)
    ]


def constant(text: str, row: Mapping[str, object]) -> float:
    """Return a reward from which nothing can be learned."""
    del text, row
    return 0.5


def never(text: str, row: Mapping[str, object]) -> float:
    """Return a reward that takes no answer as right."""
    del text, row
    return 0.0


def thinned(log_path: Path) -> str:
    """Return the metrics of a run that findings read, a line per generation."""
    rows = [
        {key: float(f"{value:.6g}") for key, value in row.items() if _READ.match(key)}
        for row in read_metrics(log_path / METRICS)
    ]
    return "".join(f"{json.dumps(finite(row))}\n" for row in rows)


def record(name: str) -> None:
    """Run one of RECORDED, and keep its metrics."""
    with tempfile.TemporaryDirectory() as directory:
        log_path = Path(directory) / "run"
        call(*RECORDED[name], "seed=0", f"log_path={log_path}")
        path = DATA / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(thinned(log_path))
    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


def main(chosen: list[str]) -> None:
    """Run recipes and seeds one after the other, and report on each recipe."""
    if chosen[:1] == ["record"]:
        for name in chosen[1:] or RECORDED:
            record(name)
        return
    for name in chosen or JOBS:
        report("recipes", [each for seed in SEEDS for each in rows_of(name, seed)], name)


if __name__ == "__main__":
    main(sys.argv[1:])
