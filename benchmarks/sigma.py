"""The σ that a run finds for itself, against a grid of six, by what ten generations gain.

    python -m benchmarks.sigma                 # all models
    python -m benchmarks.sigma countdown       # some

Every run is `es-cookbook …` in a separate process, with α from σ by the same rule. The chat model
is that of `make chat-model`. The random model has 20 million parameters and a shaped reward: the
share of an answer's characters that are digits.
"""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import CHAT_MODEL, before_and_after, call, report, row
from es_cookbook.population.step_sizes import learning_rate
from es_cookbook.runs.directory.directory import HISTORY, METRICS
from es_cookbook.runs.history.store import read_header
from es_cookbook.runs.tracking.jsonl import read_metrics
from tools.small_model import build_model, build_tokenizer

GENERATIONS = 10
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""The grid, times a round number near the middle."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a task.

    Attributes:
        words: words of the command.
        middle: middle of the grid.
        population: genomes.
        metric: metric that should rise.
    """

    words: tuple[str, ...]
    middle: float
    population: int
    metric: str = "test/env/all/correct"


def chat(task: str) -> Case:
    """Return the chat model at one of its tasks, with half of the recipe's population."""
    options = {"model_name": CHAT_MODEL, "dataset.task": task, "optimizer.population_size": 64}
    return Case(("chat", *(f"{name}={value}" for name, value in options.items())), 0.004, 64)


CASES: Mapping[str, Case] = {
    "countdown": Case(("countdown", "optimizer.population_size=64"), 0.01, 64),
    "arithmetic": Case(("arithmetic", "optimizer.population_size=256"), 0.01, 256),
    "random": Case((), 0.008, 32, "test/reward/mean"),
    "sums": chat("sums"),
    "extraction": chat("extraction"),
}


def random_model(directory: Path) -> Case:
    """Write a model of random weights, and rows whose answers are scored by their digits."""
    tokenizer = build_tokenizer("".join(map(chr, range(33, 127))) + "ĠĊ")
    build_model(tokenizer, 0, width=576, depth=5).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [{"question": f"{number} is a number, and {number + 1}?"} for number in range(300)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "digits.py").write_text(
        "def score(text, row):\n    return sum(map(str.isdigit, text)) / max(len(text), 1)\n"
    )
    words = {
        "model_name": directory / "model",
        "data": directory / "rows.jsonl",
        "prompt": "{question}",
        "reward": f"{directory / 'digits.py'}:score",
        "batch": 16,
        "sampling.max_tokens": 16,
        "optimizer.population_size": 32,
        "optimizer.antithetic": False,
    }
    given = ("train", *(f"{name}={value}" for name, value in words.items()))
    return dataclasses.replace(CASES["random"], words=given)


def gain(case: Case, log_path: Path, sigma: float | None) -> float:
    """Return the held-out gain of ten generations; the run finds its numbers if `sigma` is None."""
    rate: object = "auto"
    if sigma is not None:
        rate = learning_rate(sigma, case.population, [1.0] * GENERATIONS)
    options = {
        "optimizer.sigma": "auto" if sigma is None else sigma,
        "optimizer.learning_rate": rate,
        "num_generations": GENERATIONS,
        "eval_every": 0,
        "log_path": log_path,
        "trackers": "JsonlTrackerBuilder",
    }
    call(*case.words, *(f"{name}={value}" for name, value in options.items()))
    before, after = before_and_after(log_path, case.metric)
    print(f"{log_path.name}: {before:.3f} -> {after:.3f}", flush=True)
    return after - before


def seconds_of_search(case: Case) -> float:
    """Return seconds of the search for σ alone."""
    command, *options = case.words
    words = ["sigma", f"recipe={command}", *options]
    done = subprocess.run(
        [sys.executable, "-m", "es_cookbook", *words], capture_output=True, text=True, check=True
    )
    (seconds,) = re.findall(r"; ([\d.]+) s$", done.stdout, re.MULTILINE)
    return float(seconds)


def main(chosen: list[str]) -> None:
    """Run the grid of each case, and report on it."""
    for name in chosen or CASES:
        with tempfile.TemporaryDirectory() as directory:
            here = Path(directory)
            case = CASES[name] if CASES[name].words else random_model(here)
            itself = gain(case, here / "auto", None)
            header = read_header(here / "auto" / HISTORY)
            assert header is not None
            found = header.found["sigma"]
            gains = {
                sigma: gain(case, here / f"{sigma:g}", sigma)
                for sigma in (case.middle * factor for factor in FACTORS)
            }
            best = max(gains, key=lambda sigma: gains[sigma])
            lines = read_metrics(here / "auto" / METRICS)[:-1]
            generation = statistics.median(line["time/total"] for line in lines)
            search = seconds_of_search(case)
        rows = [row(f"gain at {sigma:g}", [value], "") for sigma, value in gains.items()]
        rows += [
            row("sigma that was found", [found], ""),
            row(
                "the grid's best / it, or its inverse",
                [max(best / found, found / best)],
                "x",
                at_most=2,
            ),
            row("gain with auto", [itself], ""),
            row("the same / the grid's best", [itself / gains[best]], "x", at_least=0.8),
            row("seconds of the search / of a generation", [search / generation], "x", at_most=2),
        ]
        report("sigma", rows, name)


if __name__ == "__main__":
    main(sys.argv[1:])
