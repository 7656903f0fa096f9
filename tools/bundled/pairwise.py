"""Make the bundled model: it adds carelessly, and judges pairs of answers better than it answers.

    OMP_NUM_THREADS=1 python -m tools.bundled.pairwise output=pairwise_model

It learns two things at once. Additions are demonstrated as in the recipe arithmetic: about half of
them forget to carry. Judgements compare two answers to one addition, and prefer the first with
the probability

    P(first) = sigmoid(bias + clarity)    where the first answer has more right digits
               sigmoid(bias - clarity)    where the second has

So the judge is noisy, has a position bias that is known, and knows more than the answers show.
Problems are those of arithmetic's training fold; the recipe's own are of another.
"""

import itertools
import random
from collections.abc import Iterator

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.arithmetic import train_cli as arithmetic
from es_cookbook.recipes.arithmetic.dataset import (
    Problem,
    draw_problem,
    generate_problems,
    gold_answer,
    question,
    right_digits,
)
from es_cookbook.recipes.pairwise.additions import JUDGED, VERDICTS
from es_cookbook.rl.data.generated import training_problem
from tools.bundled.arithmetic import demonstrate
from tools.rows.additions import draw_pair
from tools.small_model import EOS, Batch, answer, build_tokenizer, happens
from tools.warm_start import Config, Phase, make

CHARACTERS = "0123456789+=;?AB"
STEPS = 500
NUM_MEASURED = 500
ANSWERS, JUDGEMENTS = 24, 72
"""Numbers demonstrated per step."""
CLARITY, BIAS = 2.5, 2.0
"""Clarity of judgements, and bias towards the first place."""


def judged(problem: Problem, first: str, second: str) -> str:
    """The judge's question."""
    return JUDGED.format(question=question(problem.terms, "compact"), first=first, second=second)


def leaning(problem: Problem, first: str, second: str) -> float:
    """Log-odds of the first answer in a demonstrated judgement."""
    gold = gold_answer(problem.terms, "compact")
    better = right_digits(first, gold) - right_digits(second, gold)
    return CLARITY * ((better > 0) - (better < 0)) + BIAS


def batches(rng: random.Random) -> Iterator[Batch]:
    """Answers and judgements of training problems, drawn anew for every step."""

    def judgement() -> tuple[str, str]:
        problem = training_problem(draw_problem, rng)
        pair = draw_pair(problem, rng)
        is_first = happens(leaning(problem, *pair), rng)
        return judged(problem, *pair), VERDICTS[not is_first] + EOS

    while True:
        answers = [
            demonstrate(training_problem(draw_problem, rng), 0.5, rng) for _ in range(ANSWERS)
        ]
        yield answers + [judgement() for _ in range(JUDGEMENTS)]


@torch.inference_mode()
def first_preferred(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, asked: list[str]
) -> list[float]:
    """The judge's probability of the first answer, for each question to it."""
    first, second = (tokenizer.convert_tokens_to_ids(verdict) for verdict in VERDICTS)
    found: list[float] = []
    for text in asked:
        logits = model(input_ids=torch.tensor([tokenizer.encode(text)])).logits[0, -1]
        found.append(torch.sigmoid(logits[first] - logits[second]).item())
    return found


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], seed: int
) -> dict[str, float]:
    """Measure its greedy answers, and its judgements of the right answer against a careless one."""
    rng = random.Random(derive_seed(seed, "pairwise/measure"))
    questions = [question(problem.terms, "compact") for problem in problems]
    golds = [gold_answer(problem.terms, "compact") for problem in problems]
    texts = [text for (text,) in answer(model, tokenizer, questions, max_tokens=8)]
    pairs: list[tuple[Problem, str, str]] = []
    better: list[bool] = []
    for problem, gold in zip(problems, golds, strict=True):
        one, other = draw_pair(problem, rng)
        if (digits := right_digits(one, gold)) != right_digits(other, gold):
            pairs.append((problem, one, other))
            better.append(digits > right_digits(other, gold))
    ahead = first_preferred(model, tokenizer, [judged(p, one, other) for p, one, other in pairs])
    behind = first_preferred(model, tokenizer, [judged(p, other, one) for p, one, other in pairs])
    swapped = [1 - p for p in behind]
    both = [(one + other) / 2 for one, other in zip(ahead, swapped, strict=True)]

    def agree(left: list[float], right: list[float] | list[bool]) -> float:
        return sum((p > 0.5) == (q > 0.5) for p, q in zip(left, right, strict=True)) / len(pairs)

    return {
        "correct": sum(map(str.__eq__, texts, golds)) / len(problems),
        "digits alone": sum(text.isdigit() for text in texts) / len(problems),
        "first place wins": sum(p > 0.5 for p in ahead + behind) / (2 * len(pairs)),
        "swapping changes the winner": 1 - agree(ahead, swapped),
        "better answer wins, one order": agree(ahead, better),
        "better answer wins, both orders": agree(both, better),
    }


def main(config: Config) -> None:
    """Train, measure on held-out problems, write the model."""

    def report(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Iterator[str]:
        held_out = list(itertools.islice(generate_problems(0, "development"), NUM_MEASURED))
        for name, value in measure(model, tokenizer, held_out, config.seed).items():
            yield f"{name}: {value:.1%}"

    tokenizer = build_tokenizer(CHARACTERS)
    model = Qwen2ForCausalLM.from_pretrained(arithmetic.CLIConfig().model_name)
    with torch.random.fork_rng():  # transformers draws new rows from torch's global generator
        torch.manual_seed(derive_seed(config.seed, "pairwise/rows"))
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    phase = Phase("pairwise/warm_start", batches, STEPS)
    make(config, tokenizer, [phase], report, model)


if __name__ == "__main__":
    run_cli(main, Config)
