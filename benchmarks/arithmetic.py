"""Gains of the recipe arithmetic on two warm starts, and of gradients from the same ones.

    python -m benchmarks.arithmetic              # on the test
    python -m benchmarks.arithmetic development  # where settings are chosen

Warm start 0 is the bundled model, warm start 1 is made here by the same command with another seed.
From each of them: three runs as a newcomer starts them, `es-cookbook arithmetic seed=<seed>`; then,
once each, supervised training on right demonstrations, of as many problems as the run has and for
as many seconds of the processor; and `es-cookbook policy_gradient recipe=arithmetic`, with as many
problems and answers a step as a generation has. All are measured alike: greedy answers to 1,000
held-out problems, sorted into right ones, wrong ones in which only carries are missing, and others.
"Never" are the problems that the warm start never solves in 16 samples at temperature 1: a
right answer there is not merely one that was picked out.
"""

import dataclasses
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.gradients import Task, in_batches, load, policy_gradient, supervise
from benchmarks.harness import Row, call, report, row
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.arithmetic.dataset import (
    ArithmeticEnv,
    Problem,
    generate_problems,
    gold_answer,
    question,
)
from es_cookbook.recipes.arithmetic.train_cli import CLIConfig
from es_cookbook.rl.types import Observation
from tools.bundled import arithmetic as warm_start
from tools.small_model import answer

HeldOut: TypeAlias = Literal["test", "development"]
SEEDS = (0, 1, 2)
NUM_TEST = 1000
GENERATIONS, PROBLEMS, GENOMES = 12, 32, 256  # the recipe's defaults


@dataclasses.dataclass(frozen=True)
class Answers:
    """A model's greedy answers to the held-out problems: one entry per problem each."""

    correct: list[bool]
    forgot_carry: list[bool]
    well_formed: list[bool]


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, held_out: list[Problem]) -> Answers:
    """Grade its greedy answers."""
    texts = answer(model, tokenizer, questions_of(held_out), CLIConfig().sampling.max_tokens)
    metrics = [
        ArithmeticEnv(Observation(()), problem.terms).grade(text).metrics
        for problem, (text,) in zip(held_out, texts, strict=True)
    ]
    names = ("correct", "forgot_carry", "well_formed")
    return Answers(*([each[name] == 1 for each in metrics] for name in names))


def never_solved(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, held_out: list[Problem]
) -> list[bool]:
    """Return the problems that it solves in none of 16 samples."""
    torch.manual_seed(0)
    length, samples = CLIConfig().sampling.max_tokens, warm_start.SAMPLES
    texts_P = answer(model, tokenizer, questions_of(held_out), length, samples)
    golds_P = [gold_answer(problem.terms, "compact") for problem in held_out]
    return [gold not in texts for gold, texts in zip(golds_P, texts_P, strict=True)]


def questions_of(problems: Sequence[Problem]) -> list[str]:
    """Return the prompts of the small model."""
    return [question(problem.terms, "compact") for problem in problems]


# --- evolution strategies ------------------------------------------------------------------------


def evolve(model: Path, seed: int, held_out: HeldOut, directory: Path) -> tuple[Path, float, float]:
    """Run the recipe and export its centre; the centre, and the run's seconds: clock, processor."""
    run, centre = directory / "run", directory / "centre"
    name = [f"model_name={model}", f"seed={seed}", f"dataset.fold={int(held_out == 'development')}"]
    seconds = call("arithmetic", *name, f"log_path={run}")
    call("export", f"log_path={run}", f"output={centre}")
    return centre, *seconds


# --- the comparison ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """A warm start, and its answers."""

    path: Path
    tokenizer: Qwen2Tokenizer
    held_out: list[Problem]
    answers: Answers
    never: list[bool]


def begin(path: Path, held_out: HeldOut) -> Start:
    """Measure a warm start."""
    tokenizer = cast(Qwen2Tokenizer, Qwen2Tokenizer.from_pretrained(path))
    problems = list(itertools.islice(generate_problems(0, held_out), NUM_TEST))
    model = load(path)
    answers = measure(model, tokenizer, problems)
    return Start(path, tokenizer, problems, answers, never_solved(model, tokenizer, problems))


def line(name: str, start: Start, after: Answers, seconds: float) -> str:
    """Return a line of the table, in percent of the held-out problems unless it says otherwise."""
    before = start.answers

    def percent(values: Sequence[bool], among: Sequence[bool] | None = None) -> str:
        chosen = list(itertools.compress(values, among)) if among else list(values)
        return f"{100 * sum(chosen) / len(chosen):.1f}" if chosen else "none"

    wrong = [not correct for correct in after.correct]
    other = [w and not forgot for w, forgot in zip(wrong, after.forgot_carry, strict=True)]
    cells = [
        *(name, f"{seconds:.0f}", percent(after.correct), percent(after.well_formed)),
        *(percent(after.forgot_carry), percent(other)),
        *(percent(after.correct, before.forgot_carry), percent(after.correct, start.never)),
        percent(wrong, before.correct),
    ]
    return f"| {' | '.join(cells)} |"


def compare(warm: int, start: Start, held_out: HeldOut, directory: Path) -> list[Row]:
    """Run everything from one warm start, print the table, and return the lines with goals."""
    rows: list[Row] = []
    print(f"\nwarm start {warm}: {sum(start.never)} problems never solved in 16 samples\n")
    print("| | processor s | right | form | only carries missing | otherwise wrong ", end="")
    print("| of missing carries, now right | of never, now right | of right, now wrong |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(line("warm start", start, start.answers, 0), flush=True)
    before, all_seconds = sum(start.answers.correct), list[float]()
    for seed in SEEDS:
        centre, clock, seconds = evolve(start.path, seed, held_out, directory / f"{warm}-{seed}")
        after = measure(load(centre), start.tokenizer, start.held_out)
        print(line(f"ES, seed {seed}", start, after, seconds), flush=True)
        all_seconds.append(seconds)
        gain = 100 * (sum(after.correct) - before) / len(start.held_out)
        formed = 100 * sum(start.answers.well_formed) / len(start.held_out)
        name = f"warm start {warm}, seed {seed}:"
        rows += [
            row(f"{name} well-formed before", [formed], "%", at_least=98),
            row(f"{name} gain in right answers", [gain], "points", at_least=25),
            row(f"{name} minutes, start included", [clock / 60], "min", at_most=2),
            row(f"{name} minutes of one processor", [seconds / 60], "min"),
        ]
    compared = [
        *supervised(start, sum(all_seconds) / len(all_seconds)),
        by_policy_gradient(start, held_out, directory / f"{warm}-policy_gradient"),
    ]
    for name, after, seconds in compared:
        print(line(name, start, after, seconds), flush=True)
        gain = 100 * (sum(after.correct) - before) / len(start.held_out)
        rows.append(row(f"warm start {warm}, {name}: gain", [gain], "points"))
    return rows


def supervised(start: Start, seconds: float) -> list[tuple[str, Answers, float]]:
    """Train on as many demonstrations as the run has problems, and for as long a time."""
    count = GENERATIONS * PROBLEMS
    problems = list(itertools.islice(generate_problems(0, "train"), count))
    many = list(itertools.islice(generate_problems(0, "train"), 100 * count))
    random.Random(derive_seed(0, "benchmarks/arithmetic")).shuffle(many)
    torch.manual_seed(0)
    done: list[tuple[str, Answers, float]] = []
    for name, given, most in (
        ("supervised, as many problems", problems, {"steps": GENERATIONS}),
        ("supervised, as many seconds", many, {"seconds": seconds}),
    ):
        model = load(start.path)
        took = supervise(model, start.tokenizer, batches_of(given), **most)
        done.append((name, measure(model, start.tokenizer, start.held_out), took))
    return done


def by_policy_gradient(
    start: Start, held_out: HeldOut, log_path: Path
) -> tuple[str, Answers, float]:
    """Train on the same numbers of problems and answers as the run: name, answers, seconds."""
    sizes = [f"num_generations={GENERATIONS}", f"attempts={GENOMES}"]
    where = [f"model_name={start.path}", f"dataset.fold={int(held_out == 'development')}"]
    model, seconds = policy_gradient("arithmetic", log_path, *sizes, *where)
    answers = measure(load(model), start.tokenizer, start.held_out)
    return "policy gradient, as many answers", answers, seconds


def batches_of(problems: Sequence[Problem]) -> Iterator[Sequence[Task]]:
    """Return batches with a generation's number of problems, starting over after the last."""
    tasks = [
        Task(asked, gold_answer(p.terms, "compact"), ArithmeticEnv(Observation(()), p.terms))
        for asked, p in zip(questions_of(problems), problems, strict=True)
    ]
    return in_batches(tasks, PROBLEMS)


def main(arguments: Sequence[str]) -> None:
    """Run both warm starts, on the test or on the development set."""
    held_out: HeldOut = "development" if "development" in arguments else "test"
    with tempfile.TemporaryDirectory() as name:
        second = Path(name) / "warm_start"
        warm_start.main(warm_start.Config(output=str(second), seed=1))
        rows = [
            each
            for warm, path in enumerate((CLIConfig().model_name, second))
            for each in compare(warm, begin(path, held_out), held_out, Path(name))
        ]
    if held_out == "test":
        report("arithmetic", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
