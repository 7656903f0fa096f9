"""What every recipe's small setting gains on held-out problems, and how long it takes.

    python -m benchmarks.recipes                                            # all
    python -m benchmarks.recipes code logic                                 # some
    OMP_NUM_THREADS=2 python -m benchmarks.recipes chat_sums chat_extraction    # a chat model's

Each run is a process of its own, `es-cookbook <recipe> seed=<seed>`, without other options but
where a task of the recipe `chat` is one; its model is that of `make chat-model`. Before and after
are the first and the last evaluation of the centre; `form` is the metric that says whether an
answer has the right form, so what a gain in form could explain is seen.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import CHAT_MODEL, Row, before_and_after, call, report, row

SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is run, and what is wanted of it.

    Attributes:
        metric: that is to rise.
        form: the metric of the form.
        points: to be gained.
        minutes: most, by the clock.
        options: of the command, beside the seed.
    """

    metric: str = "correct"
    form: str = "well_formed"
    points: float = 10
    minutes: float = 5
    options: tuple[str, ...] = ()


def chat(task: str, points: float = 20, minutes: float = 15) -> Job:
    """The chat model at one of its tasks."""
    given = f"model_name={CHAT_MODEL}", f"dataset.task={task}"
    return Job(points=points, minutes=minutes, options=given)


JOBS: Mapping[str, Job] = {
    "arithmetic": Job(),
    "math": Job(form="format"),
    "logic": Job(),
    "rush_hour": Job(),
    "code": Job("solved", "answered"),
    "crossword": Job(form="format"),
    "conciseness": Job("concise", "correct"),
    "pairwise": Job(),
    "mixture": Job(),
    "guess_number": Job(),
    "calculator": Job(),
    "search": Job(),
    "markovian": Job(form="logprob"),
    "tic_tac_toe": Job("loses_to_random", "illegal"),
    "chat_sums": chat("sums", 50, 10),
    "chat_differences": chat("differences"),
    "chat_chain_sum": chat("chain_sum"),
    "chat_constraints": chat("constraints"),
    "chat_conciseness": chat("conciseness"),
    "chat_extraction": chat("extraction"),
}
"""By the recipe's name, and perhaps a task's behind it; Countdown has `main_job`."""
FALLS = {"loses_to_random"}
"""Metrics that are to fall."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The metric and the form in percent, before and after; minutes by the clock, of processors."""

    values: list[float]
    forms: list[float]
    minutes: float
    processor_minutes: float


def measured(name: str, seed: int, log_path: Path) -> Measured:
    """Run one seed."""
    job = JOBS[name]
    command = "chat" if name.startswith("chat_") else name
    clock, processor = call(command, *job.options, f"seed={seed}", f"log_path={log_path}")
    values, forms = (
        [100 * value for value in before_and_after(log_path, f"test/env/all/{metric}")]
        for metric in (job.metric, job.form)
    )
    return Measured(values, forms, clock / 60, processor / 60)


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
        row(f"{name} {metric} before", [values[0]], "%"),
        row(f"{name} {metric} after", [values[1]], "%"),
        row(f"{name} gain", [gain], "points", at_least=job.points),
        row(f"{name} {form} before", [forms[0]], "%"),
        row(f"{name} {form} after", [forms[1]], "%"),
        row(f"{name} minutes, start included", [run.minutes], "min", at_most=job.minutes),
        row(f"{name} minutes of processors", [run.processor_minutes], "min"),
    ]


def main(chosen: list[str]) -> None:
    """Run recipes and seeds one after the other, and report on each recipe."""
    for name in chosen or JOBS:
        report("recipes", [each for seed in SEEDS for each in rows_of(name, seed)], name)


if __name__ == "__main__":
    main(sys.argv[1:])
