"""What the recipe arithmetic gains on two warm starts, and what gradients gain from the same ones.

    python -m benchmarks.arithmetic              # on the test
    python -m benchmarks.arithmetic development  # where settings are chosen

Warm start 0 is the bundled model, warm start 1 is made here by the same command with another seed.
From each of them: three runs as a newcomer starts them, `es-cookbook arithmetic seed=<seed>`; then,
once each, supervised training on right demonstrations, of as many problems as the run has and for
as many seconds of the processor; and a policy gradient, REINFORCE with the mean of a problem's
answers as baseline, with as many problems and answers a step as a generation has. All are measured
alike: greedy answers to 1,000 held-out problems, sorted into right ones, wrong ones in which only
carries are missing, and others. "Never" are the problems of which the warm start solves none in 16
samples at temperature 1: a right answer there is not merely one that was picked out.
"""

import dataclasses
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.harness import Row, report, row
from es_cookbook.baselines.small_model import EOS, IGNORED, answer, encode
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.arithmetic import warm_start
from es_cookbook.recipes.arithmetic.env import ArithmeticEnv, gold_answer, question
from es_cookbook.recipes.arithmetic.problems import Problem, generate_problems
from es_cookbook.recipes.arithmetic.train_cli import BUNDLED_MODEL
from es_cookbook.rl.types import Observation

HeldOut: TypeAlias = Literal["test", "development"]
Draw: TypeAlias = Callable[[], tuple[list[str], list[str], list[float]]]
"""Questions, answers, and how much more likely each answer should become."""

SEEDS = (0, 1, 2)
GENERATIONS, PROBLEMS, GENOMES = 12, 32, 256  # the recipe's defaults
LEARNING_RATE = 1e-3  # of both gradients; 3e-3 was worse on the development set


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model answers to the held-out problems, greedy: one entry per problem each."""

    correct: list[bool]
    forgot_carry: list[bool]
    well_formed: list[bool]


def load(path: Path) -> Qwen2ForCausalLM:
    """A small model, to measure or to train."""
    return cast(Qwen2ForCausalLM, AutoModelForCausalLM.from_pretrained(path))


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, held_out: list[Problem]) -> Answers:
    """Its greedy answers, graded."""
    texts = answer(model, tokenizer, questions_of(held_out), warm_start.MAX_ANSWER_TOKENS)
    metrics = warm_start.grades(held_out, [text for (text,) in texts])
    names = ("correct", "forgot_carry", "well_formed")
    return Answers(*([each[name] == 1 for each in metrics] for name in names))


def never_solved(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, held_out: list[Problem]
) -> list[bool]:
    """Which problems it solves in none of 16 samples."""
    torch.manual_seed(0)
    length, samples = warm_start.MAX_ANSWER_TOKENS, warm_start.SAMPLES
    texts_P = answer(model, tokenizer, questions_of(held_out), length, samples)
    golds_P = [gold_answer(problem.terms, "compact") for problem in held_out]
    return [gold not in texts for gold, texts in zip(golds_P, texts_P, strict=True)]


def questions_of(problems: Sequence[Problem]) -> list[str]:
    """As the small model is asked them."""
    return [question(problem.terms, "compact") for problem in problems]


# --- evolution strategies ------------------------------------------------------------------------


def evolve(model: Path, seed: int, held_out: HeldOut, directory: Path) -> tuple[Path, float, float]:
    """Run the recipe and export its centre; the centre, and the run's seconds: clock, processor."""
    run, centre = directory / "run", directory / "centre"
    name = [f"model_name={model}", f"seed={seed}", f"dataset.held_out={held_out}"]
    seconds = call("arithmetic", *name, f"log_path={run}")
    call("export", f"log_path={run}", f"output={centre}")
    return centre, *seconds


def call(*words: str) -> tuple[float, float]:
    """`es-cookbook …`, in a process of its own; its seconds by the clock and of the processor."""
    command = [sys.executable, "-m", "es_cookbook", *words]
    began = time.perf_counter()
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"failed with status {status}: {' '.join(command)}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


# --- gradients -----------------------------------------------------------------------------------


def climb(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    draw: Draw,
    *,
    steps: float = float("inf"),
    seconds: float = float("inf"),
) -> float:
    """Raise the weighted log-probability of drawn answers with AdamW; the processor's seconds.

    The learning rate falls linearly to nothing at the last step or second.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    began, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        questions, answers, weights = draw()
        tokens, labels = encode(tokenizer, questions, answers)
        logits = model(input_ids=tokens).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
        )
        loss = (losses.sum(dim=1) * torch.tensor(weights)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - progress)
        optimizer.step()
        step += 1
        progress = max(step / steps, (time.process_time() - began) / seconds)
    return time.process_time() - began


def right_demonstrations(problems: Sequence[Problem]) -> Draw:
    """Batches of right answers, problem after problem, from the beginning again after the last."""
    endless = itertools.cycle(problems)

    def draw() -> tuple[list[str], list[str], list[float]]:
        batch = list(itertools.islice(endless, PROBLEMS))
        answers = [gold_answer(problem.terms, "compact") + EOS for problem in batch]
        return questions_of(batch), answers, [1.0] * PROBLEMS

    return draw


def own_answers(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem]
) -> Draw:
    """The model's own answers at temperature 1, as good as they are beside others to the problem.

    Rewards less the mean of the problem's answers, divided by their standard deviation.
    """
    endless, length = itertools.cycle(problems), warm_start.MAX_ANSWER_TOKENS

    def draw() -> tuple[list[str], list[str], list[float]]:
        batch = list(itertools.islice(endless, PROBLEMS))
        texts_P_K = answer(model, tokenizer, questions_of(batch), length, GENOMES)
        envs_P = [ArithmeticEnv(Observation(()), problem.terms) for problem in batch]
        rewards_P_K = torch.tensor(
            [
                [env.grade(text).reward for text in texts_K]
                for env, texts_K in zip(envs_P, texts_P_K, strict=True)
            ]
        )
        centred_P_K = rewards_P_K - rewards_P_K.mean(dim=1, keepdim=True)
        weights_P_K = centred_P_K / (rewards_P_K.std(dim=1, keepdim=True) + 1e-6)
        questions = [asked for asked in questions_of(batch) for _ in range(GENOMES)]
        # An answer of the greatest length was cut off: it did not choose to end.
        answers = [
            text if len(text) == length else text + EOS for texts_K in texts_P_K for text in texts_K
        ]
        return questions, answers, weights_P_K.flatten().tolist()

    return draw


# --- the comparison ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """A warm start, and what it answers."""

    path: Path
    tokenizer: Qwen2Tokenizer
    held_out: list[Problem]
    answers: Answers
    never: list[bool]


def begin(path: Path, held_out: HeldOut) -> Start:
    """Measure a warm start."""
    tokenizer = cast(Qwen2Tokenizer, Qwen2Tokenizer.from_pretrained(path))
    problems = list(itertools.islice(generate_problems(0, held_out), warm_start.NUM_TEST))
    model = load(path)
    answers = measure(model, tokenizer, problems)
    return Start(path, tokenizer, problems, answers, never_solved(model, tokenizer, problems))


def line(name: str, start: Start, after: Answers, seconds: float) -> str:
    """A line of the table, in percent of the held-out problems where it does not say otherwise."""
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
    """All runs from one warm start: prints the table, and gives the lines with goals."""
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
    for name, after, seconds in gradients(start, sum(all_seconds) / len(all_seconds)):
        print(line(name, start, after, seconds), flush=True)
        gain = 100 * (sum(after.correct) - before) / len(start.held_out)
        rows.append(row(f"warm start {warm}, {name}: gain", [gain], "points"))
    return rows


def gradients(start: Start, seconds: float) -> list[tuple[str, Answers, float]]:
    """Supervised training and the policy gradient: name, answers, seconds."""
    count = GENERATIONS * PROBLEMS
    problems = list(itertools.islice(generate_problems(0, "train"), count))
    many = list(itertools.islice(generate_problems(0, "train"), 100 * count))
    random.Random(derive_seed(0, "benchmarks/arithmetic")).shuffle(many)
    torch.manual_seed(0)
    done: list[tuple[str, Answers, float]] = []

    def train(name: str, model: Qwen2ForCausalLM, draw: Draw, **most: float) -> None:
        took = climb(model, start.tokenizer, draw, **most)
        done.append((name, measure(model, start.tokenizer, start.held_out), took))

    for name, given, most in (
        ("supervised, as many problems", problems, {"steps": GENERATIONS}),
        ("supervised, as many seconds", many, {"seconds": seconds}),
    ):
        train(name, load(start.path), right_demonstrations(given), **most)
    model = load(start.path)
    draw = own_answers(model, start.tokenizer, problems)
    train("policy gradient, as many answers", model, draw, steps=GENERATIONS)
    return done


def main(arguments: Sequence[str]) -> None:
    """Both warm starts, on the test or on the development set."""
    held_out: HeldOut = "development" if "development" in arguments else "test"
    with tempfile.TemporaryDirectory() as name:
        second = Path(name) / "warm_start"
        warm_start.main(warm_start.Config(output=str(second), seed=1))
        rows = [
            each
            for warm, path in enumerate((BUNDLED_MODEL, second))
            for each in compare(warm, begin(path, held_out), held_out, Path(name))
        ]
    if held_out == "test":
        report("arithmetic", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
