"""What gradients gain from the small models that recipes begin with.

    python -m benchmarks.gradients                # all
    python -m benchmarks.gradients logic math     # some

From the model that `es-cookbook <recipe>` begins with, on the batches that it trains on:

- supervised training, a step of right demonstrations for each generation's batch;
- a policy gradient, REINFORCE with the mean of a problem's answers as baseline, with as many
  answers a step as a generation has, drawn at temperature 1, and the recipe's reward.

Both are measured as the recipe is: greedy answers to its held-out problems. `benchmarks.recipes`
says what evolution strategies gain, and `benchmarks.arithmetic` compares both for one recipe. Left
out: learning rates of each recipe's own, several epochs on one batch, and clipping of ratios.
"""

import asyncio
import collections
import dataclasses
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.harness import Row, report, row
from benchmarks.recipes import RECIPES
from es_cookbook import train
from es_cookbook.baselines.learner import Learner
from es_cookbook.baselines.sft import likelihood
from es_cookbook.baselines.small_model import EOS, answer, to_examples
from es_cookbook.recipes.math import warm_start as math_warm_start
from es_cookbook.recipes.math.word_problems import FOLDS, generate_problems
from es_cookbook.recipes.rush_hour import warm_start as rush_hour_warm_start
from es_cookbook.recipes.rush_hour.env import RushHourEnv
from es_cookbook.recipes.rush_hour.generate import Problem
from es_cookbook.recipes.rush_hour.solver import solve
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder

Draw: TypeAlias = Callable[[], tuple[list[str], list[str], list[float]]]
"""Questions, answers, and the weight of each answer's log-probability in what is maximised."""

LEARNING_RATE = 1e-3  # of both gradients; 3e-3 was worse on arithmetic's development set
TOKENS = 65_536  # of answers and their questions in one backward pass


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem as a small model is asked it, a right answer in its own form, and the judge."""

    question: str
    demonstration: str
    env: ProblemEnv


# --- training ------------------------------------------------------------------------------------


def load(path: Path) -> Qwen2ForCausalLM:
    """A small model, to measure or to train."""
    return cast(Qwen2ForCausalLM, AutoModelForCausalLM.from_pretrained(path))


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
    names = [name for name, _ in model.named_parameters()]
    learner = Learner(model.eval(), names, tokens_per_pass=TOKENS)
    began, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        questions, answers, weights = draw()
        examples = [
            dataclasses.replace(example, weight=weight)
            for example, weight in zip(
                to_examples(tokenizer, questions, answers), weights, strict=True
            )
        ]
        learner.step(examples, likelihood, LEARNING_RATE * (1 - progress), share=1.0)
        step += 1
        progress = max(step / steps, (time.process_time() - began) / seconds)
    return time.process_time() - began


def right_demonstrations(batches: Iterator[Sequence[Task]]) -> Draw:
    """Right answers, all of the same weight."""

    def draw() -> tuple[list[str], list[str], list[float]]:
        batch = next(batches)
        answers = [task.demonstration + EOS for task in batch]
        return [task.question for task in batch], answers, [1 / len(batch)] * len(batch)

    return draw


def own_answers(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    batches: Iterator[Sequence[Task]],
    samples: int,
    max_tokens: int,
) -> Draw:
    """The model's own answers at temperature 1, as good as they are beside others to the problem.

    Rewards less the mean of the problem's answers, divided by their standard deviation. Equal
    answers are one, of the sum of their weights.
    """

    def ended(text: str) -> str:
        """An answer of the greatest length was cut off: it did not choose to end."""
        return text if len(tokenizer.encode(text)) >= max_tokens else text + EOS

    def draw() -> tuple[list[str], list[str], list[float]]:
        batch = next(batches)
        questions = [task.question for task in batch]
        texts_P_K = answer(model, tokenizer, questions, max_tokens, samples)
        weights: collections.Counter[tuple[str, str]] = collections.Counter()
        for task, texts_K in zip(batch, texts_P_K, strict=True):
            distinct = list(dict.fromkeys(texts_K))
            pairs = zip(distinct, grades([task] * len(distinct), distinct), strict=True)
            reward_of = {text: grade.reward for text, grade in pairs}
            rewards_K = torch.tensor([reward_of[text] for text in texts_K])
            weights_K = (rewards_K - rewards_K.mean()) / (rewards_K.std() + 1e-6)
            for text, weight in zip(texts_K, weights_K.tolist(), strict=True):
                weights[task.question, ended(text)] += weight / (len(batch) * samples)
        kept = {pair: weight for pair, weight in weights.items() if weight}
        return [asked for asked, _ in kept], [text for _, text in kept], list(kept.values())

    return draw


def grades(tasks: Sequence[Task], texts: Sequence[str]) -> list[Grade]:
    """What the judge says of each answer."""

    async def graded() -> list[Grade]:
        return [await task.env.graded(text) for task, text in zip(tasks, texts, strict=True)]

    return asyncio.run(graded())


def in_batches(tasks: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    """Batch after batch, from the beginning again after the last task."""
    endless = itertools.cycle(tasks)
    while True:
        yield list(itertools.islice(endless, size))


# --- recipes -------------------------------------------------------------------------------------


def crossword_demonstration(builder: ProblemGroupBuilder) -> str:
    """The answer, after its number of letters."""
    gold = builder.gold or ""
    letters = len(gold.removeprefix("<answer>").removesuffix("</answer>"))
    return f"<think>{letters}</think>{gold}"


@functools.cache
def _worked_out() -> Mapping[str, str]:
    """The equations of generated word problems, by the problem's name."""
    stream = generate_problems(0, range(FOLDS)[1:])
    problems = itertools.islice(stream, 10_000)
    return {
        f"generated problem {each.question!r}": math_warm_start.demonstrate(each.steps)
        for each in problems
    }


def math_demonstration(builder: ProblemGroupBuilder) -> str:
    """The equations, and the result in a box."""
    return _worked_out()[builder.name]


def rush_hour_demonstration(builder: ProblemGroupBuilder) -> str:
    """The fewest moves."""
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
    """A recipe's problem."""
    assert isinstance(builder, ProblemGroupBuilder)
    env = builder.make_env()
    assert isinstance(env, ProblemEnv)
    tokens = list(env.observation.tokens_T)
    question = cast(str, tokenizer.decode(tokens))
    assert tokenizer.encode(question) == tokens, "a prompt that is not its own text"
    return Task(question, demonstrate(builder), env)


def compared(recipe: str) -> list[Row]:
    """Both gradients from one recipe's start; the lines of the table."""
    module = importlib.import_module(f"es_cookbook.recipes.{recipe}.train_cli")
    config = cast(train.Config, module.CLIConfig())
    path, length = Path(config.model_name), config.sampling.max_tokens
    steps, samples = config.num_generations, config.optimizer.population_size
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
        for metric in RECIPES[recipe]:
            value = 100 * sum(grade.metrics[metric] for grade in graded) / len(graded)
            rows.append(row(f"{recipe}, {name}: {metric}", [value], "%"))
        rows.append(row(f"{recipe}, {name}: processor time", [seconds], "s"))
        print(*(f"{each.name} {each.value:.1f} {each.unit}" for each in rows[-3:]), flush=True)

    measure("before", load(path), 0)
    torch.manual_seed(0)
    model = load(path)
    took = climb(model, tokenizer, right_demonstrations(iter(batches)), steps=steps)
    measure("supervised", model, took)
    model = load(path)
    draw = own_answers(model, tokenizer, iter(batches), samples, length)
    measure("policy gradient", model, climb(model, tokenizer, draw, steps=steps))
    return rows


def main(chosen: Sequence[str]) -> None:
    """Compare one recipe after the other, and report on each."""
    for recipe in chosen or DEMONSTRATIONS:
        report("gradients", compared(recipe), recipe)


if __name__ == "__main__":
    main(sys.argv[1:])
