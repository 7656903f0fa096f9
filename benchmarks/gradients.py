"""Gains of gradients from the small models that recipes begin with.

    python -m benchmarks.gradients                # all
    python -m benchmarks.gradients logic math     # some

From the model that `es-cookbook <recipe>` begins with, on the batches that it trains on:

- supervised training, a step of right demonstrations for each generation's batch;
- `es-cookbook policy_gradient recipe=<recipe>`, with as many answers to a problem as the recipe has
  genomes, and otherwise as it stands.

Both are measured as the recipe is: greedy answers to its held-out problems. `benchmarks.recipes`
says what evolution strategies gain, and `benchmarks.arithmetic` compares both for one recipe. Left
out: learning rates of each recipe's own (`es-cookbook compare-gradients` tries some).
"""

import asyncio
import dataclasses
import functools
import importlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.harness import Row, call, report, row
from benchmarks.recipes import JOBS
from es_cookbook.cli import RECIPES
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.plugins.gradients.sft import likelihood
from es_cookbook.recipes.math.word_problems import generate_problems
from es_cookbook.recipes.rush_hour.dataset import RushHourEnv
from es_cookbook.recipes.rush_hour.generate import Problem
from es_cookbook.recipes.rush_hour.solver import solve
from es_cookbook.rl.data.generated import FOLDS
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder
from es_cookbook.runs.config import Config
from tools.bundled import math as math_warm_start
from tools.bundled import rush_hour as rush_hour_warm_start
from tools.small_model import EOS, answer, to_examples

LEARNING_RATE = 1e-3  # of supervised training; 3e-3 was worse on arithmetic's development set
TOKENS = 65_536  # of demonstrations and their questions in one backward pass


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem as a small model is asked it, a right answer in its own form, and the judge."""

    question: str
    demonstration: str
    env: ProblemEnv


# --- training ------------------------------------------------------------------------------------


def load(path: Path) -> Qwen2ForCausalLM:
    """Load a small model, to measure or to train."""
    return cast(Qwen2ForCausalLM, AutoModelForCausalLM.from_pretrained(path))


def supervise(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    batches: Iterator[Sequence[Task]],
    *,
    steps: float = float("inf"),
    seconds: float = float("inf"),
) -> float:
    """Imitate right answers with AdamW, and return processor seconds.

    The learning rate falls linearly to nothing at the last step or second.
    """
    names = [name for name, _ in model.named_parameters()]
    learner = Learner(model.eval(), names, tokens_per_pass=TOKENS)
    began, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        batch = next(batches)
        shown = [(task.question, task.demonstration + EOS) for task in batch]
        examples = to_examples(tokenizer, shown)
        learner.step(examples, likelihood, LEARNING_RATE * (1 - progress), share=1 / len(batch))
        step += 1
        progress = max(step / steps, (time.process_time() - began) / seconds)
    return time.process_time() - began


def policy_gradient(recipe: str, log_path: Path, *options: str) -> tuple[Path, float]:
    """Run the command; the trained model, and the processor's seconds, all included."""
    words = [f"recipe={recipe}", f"log_path={log_path}", "eval_every=0", *options]
    _, seconds = call("policy_gradient", *words)
    (model,) = log_path.glob("checkpoints/*/model")
    return model, seconds


def grades(tasks: Sequence[Task], texts: Sequence[str]) -> list[Grade]:
    """Return the judge's grade of each answer."""

    async def graded() -> list[Grade]:
        return [await task.env.graded(text) for task, text in zip(tasks, texts, strict=True)]

    return asyncio.run(graded())


def in_batches(tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    """Yield endless batches, starting over after the last task."""
    endless = itertools.cycle(tasks)
    while True:
        yield list(itertools.islice(endless, size))


# --- recipes -------------------------------------------------------------------------------------


def crossword_demonstration(builder: ProblemGroupBuilder) -> str:
    """Return the answer, after its number of letters."""
    gold = builder.gold or ""
    letters = len(gold.removeprefix("<answer>").removesuffix("</answer>"))
    return f"<think>{letters}</think>{gold}"


@functools.cache
def _worked_out() -> Mapping[str, str]:
    """Return the equations of generated word problems, by the problem's name."""
    stream = generate_problems(0, range(FOLDS)[1:])
    problems = itertools.islice(stream, 10_000)
    return {
        f"generated problem {each.question!r}": math_warm_start.demonstrate(each.steps)
        for each in problems
    }


def math_demonstration(builder: ProblemGroupBuilder) -> str:
    """Return the equations, and the result in a box."""
    return _worked_out()[builder.name]


def rush_hour_demonstration(builder: ProblemGroupBuilder) -> str:
    """Return the fewest moves."""
    env = builder.make_env()
    assert isinstance(env, RushHourEnv)
    return rush_hour_warm_start.demonstrate(Problem(env.board, solve(env.board)))


DEMONSTRATIONS: Mapping[str, Callable[[ProblemGroupBuilder], str]] = {
    "logic": lambda builder: builder.gold or "",
    "crossword": crossword_demonstration,
    "math": math_demonstration,
    "rush_hour": rush_hour_demonstration,
}
"""Recipe -> a right answer in the form in which its bundled model answers."""


def task_of(
    builder: object, tokenizer: Qwen2Tokenizer, demonstrate: Callable[[ProblemGroupBuilder], str]
) -> Task:
    """Return a recipe's problem."""
    assert isinstance(builder, ProblemGroupBuilder)
    env = builder.make_env()
    assert isinstance(env, ProblemEnv)
    tokens = list(env.observation.tokens_T)
    question = cast(str, tokenizer.decode(tokens))
    assert tokenizer.encode(question) == tokens, "a prompt that is not its own text"
    return Task(question, demonstrate(builder), env)


def compared(recipe: str) -> list[Row]:
    """Train with both gradients from one recipe's start, and return the lines of the table."""
    module = importlib.import_module(RECIPES[recipe].partition(":")[0])
    config = cast(Config, module.CLIConfig())
    path, length = Path(config.model_name), config.sampling.max_tokens
    steps = config.num_generations
    tokenizer = cast(Qwen2Tokenizer, Qwen2Tokenizer.from_pretrained(path))
    datasets = asyncio.run(config.dataset(tokenizer))
    demonstrate = DEMONSTRATIONS[recipe]
    batches = [
        [task_of(builder, tokenizer, demonstrate) for builder in datasets.train.get_batch(g)]
        for g in range(steps)
    ]
    held_out = [task_of(builder, tokenizer, lambda _: "") for builder in datasets.test_P]
    rows: list[Row] = []

    def measure(name: str, model: Qwen2ForCausalLM, seconds: float) -> None:
        texts = answer(model, tokenizer, [task.question for task in held_out], length)
        graded = grades(held_out, [text for (text,) in texts])
        for metric in (JOBS[recipe].metric, JOBS[recipe].form):
            value = 100 * sum(grade.metrics[metric] for grade in graded) / len(graded)
            rows.append(row(f"{recipe}, {name}: {metric}", [value], "%"))
        rows.append(row(f"{recipe}, {name}: processor time", [seconds], "s"))
        print(*(f"{each.name} {each.value:.1f} {each.unit}" for each in rows[-3:]), flush=True)

    measure("before", load(path), 0)
    torch.manual_seed(0)
    model = load(path)
    measure("supervised", model, supervise(model, tokenizer, iter(batches), steps=steps))
    with tempfile.TemporaryDirectory() as directory:
        answers = f"attempts={config.optimizer.population_size}"
        trained, seconds = policy_gradient(recipe, Path(directory) / "run", answers)
        measure("policy gradient", load(trained), seconds)
    return rows


def main(chosen: Sequence[str]) -> None:
    """Compare one recipe after the other, and report on each."""
    for recipe in chosen or DEMONSTRATIONS:
        report("gradients", compared(recipe), recipe)


if __name__ == "__main__":
    main(sys.argv[1:])
