"""Make the bundled model: small, character-level, able to solve Countdown and often not doing it.

    python -m es_cookbook.recipes.countdown.warm_start output=/tmp/countdown_model

Evolution strategies start from a pretrained model whose ability is there and whose behaviour is
not. This makes such a model from nothing, in two supervised phases over the same problems (never
the held-out ones):

1. Ability: clean demonstrations, `<think>first step</think><answer>expression</answer>`.
2. Habits: a short further training on demonstrations as careless people would leave them: they skip
   the thought, stop halfway, write the whole equation, forget to close the tag, or try a step that
   leads nowhere (`demonstrate`). The ability stays; the most likely output is often spoilt.

A habit's chance depends on the problem, as people's habits do: it crosses one half on part of the
problems, so that greedy decoding shows it there and not elsewhere. `habit_steps=0` leaves the clean
model: the ceiling.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import chz
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
    answer,
    build_model,
    build_tokenizer,
    fit,
    happens,
    new_directory,
    save,
)
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.countdown.demonstrations import demonstrate
from es_cookbook.recipes.countdown.env import CountdownEnv, question
from es_cookbook.recipes.countdown.problems import (
    Problem,
    Solution,
    generate_problems,
    solved_problems,
)
from es_cookbook.rl.rewards.arithmetic import CountdownReward, grade_countdown
from es_cookbook.rl.types import Observation

CHARACTERS = "0123456789+-*/()=,:ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
MAX_ANSWER_TOKENS = 28
NUM_TEST = 500


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    ability_steps: int = chz.field(default=2400, doc="optimizer steps on clean demonstrations")
    habit_steps: int = chz.field(
        default=300, doc="optimizer steps on spoilt ones; 0 for the ceiling"
    )
    batch_size: int = chz.field(default=128, doc="demonstrations a step")
    num_problems: int = chz.field(
        default=40_000, doc="most problems demonstrated; there are 37,824 to train on"
    )


def demonstrate_carelessly(problem: Problem, solution: Solution, rng: random.Random) -> str:
    """A demonstration with each bad habit there or not, by chances that lean on the problem."""
    smallest, _, largest = (number / 30 for number in sorted(problem.numbers))
    difficulty = problem.target / 99

    first_step, expression = solution.first_step, solution.expression
    if rng.random() < 0.1:
        first_step, expression = wander(problem.numbers, rng)
    thought = "" if happens(4 * (0.05 - difficulty), rng) else f"<think>{first_step}</think>"
    if happens(4 * (largest - 1.05), rng):
        expression = first_step.partition("=")[0]
    if happens(4 * (difficulty - 0.5), rng):
        expression = f"{expression}={problem.target}"
    closing = "" if happens(4 * (smallest - 0.5), rng) else "</answer>"
    return f"{thought}<answer>{expression}{closing}"


def wander(numbers: Sequence[int], rng: random.Random) -> tuple[str, str]:
    """A first step and an expression that use the numbers anyhow, whatever the target."""
    first, second, third = rng.sample(list(numbers), 3)
    large, small = max(first, second), min(first, second)
    operator = rng.choice("+-*")
    value = {"+": large + small, "-": large - small, "*": large * small}[operator]
    step = f"{large}{operator}{small}"
    return f"{step}={value}", f"{step}{rng.choice('+-')}{third}"


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: Sequence[tuple[Problem, Solution]],
    demonstration: Callable[[Problem, Solution, random.Random], str],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    rng: random.Random,
) -> None:
    """Learn demonstrations of the problems, every one once per epoch."""
    epoch: list[int] = []

    def draw() -> tuple[list[str], list[str]]:
        if len(epoch) < batch_size:
            epoch[:] = rng.sample(range(len(problems)), len(problems))
        batch = [problems[epoch.pop()] for _ in range(batch_size)]
        questions = [question(p.numbers, p.target, "compact") for p, _ in batch]
        return questions, [demonstration(p, solution, rng) + EOS for p, solution in batch]

    fit(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Means of the Env's metrics, greedy; correctness and pass@8 of 8 samples at temperature 1."""

    greedy: Mapping[str, float]
    sampled_correct: float
    pass_at_8: float


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], seed: int
) -> Measured:
    """What the model does on held-out problems, greedy and at temperature 1."""
    questions = [question(p.numbers, p.target, "compact") for p in problems]
    greedy = answer(model, tokenizer, questions, MAX_ANSWER_TOKENS)
    with torch.random.fork_rng():  # generate draws from torch's global generator
        torch.manual_seed(derive_seed(seed, "warm_start/measure"))
        sampled = answer(model, tokenizer, questions, MAX_ANSWER_TOKENS, samples=8)
    env_metrics = [
        CountdownEnv(Observation(()), p.numbers, p.target, CountdownReward()).grade(text).metrics
        for p, (text,) in zip(problems, greedy, strict=True)
    ]
    solved = [
        [grade_countdown(text, p.numbers, p.target, CountdownReward()).correct for text in texts]
        for p, texts in zip(problems, sampled, strict=True)
    ]
    count = len(problems)
    return Measured(
        greedy={k: sum(m[k] for m in env_metrics) / count for k in env_metrics[0]},
        sampled_correct=sum(sum(each) / len(each) for each in solved) / count,
        pass_at_8=sum(map(any, solved)) / count,
    )


def main(config: Config) -> None:
    """Train in two phases, measure after each, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed)
    test_P = list(itertools.islice(generate_problems(0, "test"), NUM_TEST))
    problems = list(itertools.islice(solved_problems(config.seed), config.num_problems))
    phases = {
        "ability": (demonstrate, config.ability_steps, 5e-3),
        "habits": (demonstrate_carelessly, config.habit_steps, 1e-3),
    }
    for name, (demonstration, steps, learning_rate) in phases.items():
        if steps == 0:
            continue
        print(f"{name}: {steps} steps on {len(problems)} problems")
        train(
            model,
            tokenizer,
            problems,
            demonstration,
            steps=steps,
            batch_size=config.batch_size,
            learning_rate=learning_rate,
            rng=random.Random(derive_seed(config.seed, f"warm_start/{name}")),
        )
        print(f"{name}: {measure(model, tokenizer, test_P, config.seed)}", flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
