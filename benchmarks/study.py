"""Speed of learning on a real chat model: evolution strategies beside gradients.

    OMP_NUM_THREADS=2 python -m benchmarks.study                  # all tasks
    OMP_NUM_THREADS=2 python -m benchmarks.study sums extraction  # some

For each task it is one `es-cookbook compare-gradients`, whose command is printed; the model is that
of `make chat-model`. All tables lie in
`build/study/<task>`, and the same command goes on where it was interrupted. Contestants have as
many generations as take about three minutes on two cores, the search for σ included; plain ES has
more, so that it makes about as many rollouts as `es` has genomes read gold answers. TRL has the
rate of `group`. A rate with `factors=1` was chosen from three, by rewards in training with another
seed. What comes out is in docs/es_vs_grpo.md.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness import CHAT_MODEL, Row, call, report, row

STUDY = CHAT_MODEL.parents[1] / "study"
CONTESTANTS = ("es", "rewards", "es_at_scale", "group", "grpo", "gold")
_OF_ALL: Mapping[str, object] = {
    "recipe": "chat",
    "model_name": CHAT_MODEL,
    "at_equal": "seconds",
    "contestants": ",".join(CONTESTANTS),
    "dataset.num_test": 200,
    "es.factors": 1,
    "rewards.factors": 1,
    "rewards.optimizer.population_size": 32,
    "rewards.dataset.problems_per_generation": 16,
    "es_at_scale.factors": 1,
    "es_at_scale.optimizer.sigma": "auto",
    "es_at_scale.optimizer.learning_rate": "auto",
    "es_at_scale.dataset.problems_per_generation": 16,
    "group.attempts": 16,
    "group.factors": 1,
    "group.learning_rate": 9e-5,
    "grpo.attempts": 16,
    "grpo.learning_rate": 9e-5,
    "grpo.factors": 1,
    "gold.dataset.problems_per_generation": 32,
    "gold.learning_rate": 1e-5,
}


def _task(name: str, other: str, num_generations: Sequence[int]) -> dict[str, object]:
    """Options of a task; generations are those of each of `CONTESTANTS`."""
    options: dict[str, object] = {"dataset.task": name, "second": "chat"}
    options |= {"second.dataset.task": other, "second.dataset.num_test": 200}
    for who, count in zip(CONTESTANTS, num_generations, strict=True):
        options |= {f"{who}.num_generations": count, f"{who}.eval_every": max(1, count // 4)}
    return options


TASKS: Mapping[str, Mapping[str, object]] = {
    "sums": _task("sums", "extraction", (13, 15, 15, 28, 5, 24)),
    "extraction": _task("extraction", "sums", (9, 6, 10, 12, 4, 20)),
    "constraints": _task("constraints", "sums", (9, 6, 5, 12, 4, 20)),
    "long": _task("constraints", "sums", (9, 6, 5, 12, 4, 20))
    | {"dataset.answer_tokens": 120, "sampling.max_tokens": 120},
}


def options_of(task: str) -> list[str]:
    """Options of the command."""
    options = {**_OF_ALL, "log_path": STUDY / task, **TASKS[task]}
    return [f"{name}={value}" for name, value in options.items()]


def rows_of(task: str) -> list[Row]:
    """Compare; the lines of the benchmark's table: ends of runs. `comparison.md` says more."""
    options = options_of(task)
    print(shlex.join(["es-cookbook", "compare-gradients", *options]), flush=True)
    call("compare-gradients", *options)
    found = json.loads((STUDY / task / "comparison.json").read_text(encoding="utf-8"))
    contestants: Mapping[str, Any] = found["contestants"]
    rows: list[Row] = []
    for name, each in contestants.items():
        race = each["race"]
        whole_R = [100 * scores[-1] for scores in race["scores_R_M"]]
        took_R = [run[-1] for run in race["seconds_R_M"]]
        rows.append(row(f"{name}: held out, after {fmean(took_R):.0f} s", whole_R, "%"))
    return rows


def main(chosen: Sequence[str]) -> None:
    """One task after the other; each is a part of the benchmark."""
    for task in chosen or TASKS:
        report("study", rows_of(task), task)


if __name__ == "__main__":
    main(sys.argv[1:])
