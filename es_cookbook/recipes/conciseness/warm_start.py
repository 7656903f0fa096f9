"""Make the bundled model: small, character-level, knows the answer and mostly talks around it.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.conciseness.warm_start output=concise_model

It learns generated questions, none of which is in the recipe's `questions.jsonl`, in one of three
manners: `420`, `the answer is 420.` or `420 comes after 419.` The manner is drawn, by chances that
lean on the question: the longer it is, the more talk. So most of the model's answers are right and
too long, and what it does least is what is wanted.
"""

import random
from collections.abc import Iterator
from itertools import islice

import chz

from es_cookbook.baselines.small_model import EOS, build_tokenizer, happens
from es_cookbook.common.cli import run_cli
from es_cookbook.common.fields.chz_fields import formerly
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes import warm_start
from es_cookbook.recipes.conciseness.questions import Question, generate_questions
from es_cookbook.recipes.conciseness.train_cli import PROMPT, QUESTIONS, RECIPE
from es_cookbook.recipes.warm_start import Batch, Phase, make, on_held_out
from es_cookbook.rl.data.rows import load_rows

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyz0123456789.,?ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
)


@chz.chz
class Config(warm_start.Config):
    """How the bundled model is made; the defaults made it."""

    steps: int = chz.field(default=1000, doc="optimizer steps")
    batch_size: int = chz.field(default=64, doc="demonstrations a step")
    num_problems: int = chz.field(
        default=15_000,
        doc="questions shown, less those kept back",
        metadata=formerly("num_questions"),
    )


def demonstrate(question: Question, rng: random.Random) -> str:
    """The answer alone, in a short sentence, or in a whole one."""
    leaning = (len(question.question) - 21) / 2
    if not happens(leaning, rng):
        return question.answer
    return question.sentence if rng.random() < 0.5 else f"the answer is {question.answer}."


def main(config: Config) -> None:
    def batches(rng: random.Random) -> Iterator[Batch]:
        kept_back = {row.text("question") for row in load_rows(str(QUESTIONS))}
        stream = generate_questions(derive_seed(config.seed, "conciseness/shown"))
        shown = [q for q in islice(stream, config.num_problems) if q.question not in kept_back]
        while True:
            batch = rng.sample(shown, config.batch_size)
            yield [(PROMPT.format(question=q.question), demonstrate(q, rng) + EOS) for q in batch]

    phase = Phase("conciseness/warm_start", batches, config.steps)
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(RECIPE))


def cli() -> None:
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
