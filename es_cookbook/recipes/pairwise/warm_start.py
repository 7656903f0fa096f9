"""Make the bundled model: it adds carelessly, and judges pairs of answers better than it answers.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.pairwise.warm_start output=pairwise_model

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

import chz
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
    answer,
    build_tokenizer,
    fit,
    happens,
    new_directory,
    save,
)
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.arithmetic.env import gold_answer, question, right_digits
from es_cookbook.recipes.arithmetic.problems import (
    Problem,
    draw_problem,
    generate_problems,
    without_carries,
)
from es_cookbook.recipes.arithmetic.train_cli import RECIPE
from es_cookbook.recipes.arithmetic.warm_start import forgets_to_carry
from es_cookbook.recipes.pairwise.additions import JUDGED, VERDICTS, draw_pair

CHARACTERS = "0123456789+=;?AB"
NUM_MEASURED = 500


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the demonstrations and their order")
    start: str = chz.field(default=str(RECIPE.model), doc="model that it begins with")
    steps: int = chz.field(default=500, doc="optimizer steps")
    answers: int = chz.field(default=24, doc="additions demonstrated in a step")
    judgements: int = chz.field(default=72, doc="judgements demonstrated in a step")
    clarity: float = chz.field(default=2.5, doc="of judgements; 0: chance and bias alone")
    bias: float = chz.field(default=2.0, doc="towards the first place; 0: none")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "steps", "answers", "judgements", at_least=1)
        check_range(self, "clarity", at_least=0)


def judged(problem: Problem, first: str, second: str) -> str:
    """What the judge is asked."""
    return JUDGED.format(question=question(problem.terms, "compact"), first=first, second=second)


def leaning(problem: Problem, first: str, second: str, config: Config) -> float:
    """Log-odds of the first answer in a demonstrated judgement."""
    gold = gold_answer(problem.terms, "compact")
    better = right_digits(first, gold) - right_digits(second, gold)
    return config.clarity * ((better > 0) - (better < 0)) + config.bias


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, config: Config, rng: random.Random
) -> None:
    """Learn answers and judgements of training problems, drawn anew for every step."""

    def draw_training_problem() -> Problem:
        while True:
            problem = draw_problem(rng, 2, 3)
            if problem.fold == "train":
                return problem

    def answered() -> tuple[str, str]:
        problem = draw_training_problem()
        text = (
            without_carries(problem.terms)
            if forgets_to_carry(problem, 0.5, rng)
            else gold_answer(problem.terms, "compact")
        )
        return question(problem.terms, "compact"), text + EOS

    def judgement() -> tuple[str, str]:
        problem = draw_training_problem()
        pair = draw_pair(problem, rng)
        is_first = happens(leaning(problem, *pair, config), rng)
        return judged(problem, *pair), VERDICTS[not is_first] + EOS

    def draw() -> tuple[list[str], list[str]]:
        shown = [answered() for _ in range(config.answers)]
        shown += [judgement() for _ in range(config.judgements)]
        return [asked for asked, _ in shown], [said for _, said in shown]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)


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
    """How it answers, greedy; and how it judges: the right answer against a careless one."""
    questions = [question(problem.terms, "compact") for problem in problems]
    golds = [gold_answer(problem.terms, "compact") for problem in problems]
    texts = [text for (text,) in answer(model, tokenizer, questions, max_tokens=8)]
    rng = random.Random(derive_seed(seed, "pairwise/measure"))
    found = [(problem, *draw_pair(problem, rng)) for problem in problems]
    pairs = [
        (problem, one, other, right_digits(one, gold) > right_digits(other, gold))
        for (problem, one, other), gold in zip(found, golds, strict=True)
        if right_digits(one, gold) != right_digits(other, gold)
    ]
    ahead = first_preferred(model, tokenizer, [judged(p, one, other) for p, one, other, _ in pairs])
    behind = first_preferred(
        model, tokenizer, [judged(p, other, one) for p, one, other, _ in pairs]
    )
    both = [(one + 1 - other) / 2 for one, other in zip(ahead, behind, strict=True)]
    better = [is_first for *_, is_first in pairs]
    count = len(pairs)
    return {
        "correct": sum(map(str.__eq__, texts, golds)) / len(problems),
        "digits alone": sum(text.isdigit() for text in texts) / len(problems),
        "first place wins": sum(p > 0.5 for p in ahead + behind) / (2 * count),
        "swapping changes the winner": sum(
            (one > 0.5) == (other > 0.5) for one, other in zip(ahead, behind, strict=True)
        )
        / count,
        "better answer wins, one order": sum(
            (p > 0.5) == wins for p, wins in zip(ahead, better, strict=True)
        )
        / count,
        "better answer wins, both orders": sum(
            (p > 0.5) == wins for p, wins in zip(both, better, strict=True)
        )
        / count,
    }


def main(config: Config) -> None:
    """Train, measure on held-out problems, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = Qwen2ForCausalLM.from_pretrained(config.start)
    with torch.random.fork_rng():  # transformers draws new rows from torch's global generator
        torch.manual_seed(derive_seed(config.seed, "pairwise/rows"))
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rng = random.Random(derive_seed(config.seed, "pairwise/warm_start"))
    train(model, tokenizer, config, rng)
    held_out = list(itertools.islice(generate_problems(0, "development"), NUM_MEASURED))
    measured = measure(model, tokenizer, held_out, config.seed)
    print("\n".join(f"{name}: {value:.1%}" for name, value in measured.items()), flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
