"""Make the bundled model: small, character-level, knows the answer and mostly talks around it.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.conciseness.warm_start output=concise_model

It learns generated questions, none of which is in the recipe's `questions.jsonl`, in one of three
manners: `420`, `the answer is 420.` or `420 comes after 419.` The manner is drawn, by chances that
lean on the question: the longer it is, the more talk. So most of the model's answers are right and
too long, and what it does least is what is wanted.
"""

import json
import random
from collections.abc import Mapping, Sequence
from itertools import islice

import chz
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
from es_cookbook.recipes.conciseness.questions import Question, generate_questions
from es_cookbook.recipes.conciseness.train_cli import PROMPT, QUESTIONS
from es_cookbook.rl.rewards.length import Conciseness

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyz0123456789.,?ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
)
BATCH_SIZE = 64
NUM_MEASURED = 200


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the questions and the manners")
    num_questions: int = chz.field(default=15_000, doc="questions shown, less those kept back")
    steps: int = chz.field(default=1000, doc="optimizer steps of 64 questions")
    width: int = chz.field(default=64, doc="hidden size, a multiple of 16")
    depth: int = chz.field(default=2, doc="layers")


def demonstrate(question: Question, rng: random.Random) -> str:
    """The answer alone, in a short sentence, or in a whole one."""
    leaning = (len(question.question) - 21) / 2
    if not happens(leaning, rng):
        return question.answer
    return question.sentence if rng.random() < 0.5 else f"the answer is {question.answer}."


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: Sequence[Mapping[str, str]]
) -> Mapping[str, float]:
    """Means of the reward's metrics over the model's greedy answers."""
    texts = answer(model, tokenizer, [PROMPT.format(**row) for row in rows], max_tokens=32)
    scores = [Conciseness()(text, row)[1] for (text,), row in zip(texts, rows, strict=True)]
    return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}


def main(config: Config) -> None:
    """Learn, measure, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed, config.width, config.depth)
    rng = random.Random(derive_seed(config.seed, "conciseness/warm_start"))
    rows: list[dict[str, str]] = [
        json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()
    ]
    kept_back = {row["question"] for row in rows}
    stream = generate_questions(derive_seed(config.seed, "conciseness/shown"))
    shown = [q for q in islice(stream, config.num_questions) if q.question not in kept_back]

    def draw() -> tuple[Sequence[str], Sequence[str]]:
        batch = rng.sample(shown, BATCH_SIZE)
        questions = [PROMPT.format(question=question.question) for question in batch]
        return questions, [demonstrate(question, rng) + EOS for question in batch]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    means = measure(model, tokenizer, rows[:NUM_MEASURED])
    print(", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
