"""Make the bundled model: small, character-level, knows the answer and mostly talks around it.

    OMP_NUM_THREADS=1 python -m tools.bundled.conciseness output=concise_model

It learns generated questions, none of which is in the recipe's `questions.jsonl`, in one of three
manners: `420`, `the answer is 420.` or `420 comes after 419.` The manner is drawn, by chances that
lean on the question: the longer it is, the more talk. So most of the model's answers are right and
too long, and the wanted manner is the rarest.
"""

import random
from itertools import islice

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.conciseness.train_cli import PROMPT, QUESTIONS, CLIConfig
from es_cookbook.rl.data.sources import load_rows
from tools.rows.questions import Question, generate_questions
from tools.small_model import EOS, build_tokenizer, happens
from tools.warm_start import Config, Phase, make, on_held_out, sampled

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyz0123456789.,?ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
)
STEPS, BATCH_SIZE, NUM_PROBLEMS = 1000, 64, 15_000


def demonstrate(question: Question, rng: random.Random) -> str:
    """The answer alone, in a short sentence, or in a whole one."""
    leaning = (len(question.question) - 21) / 2
    if not happens(leaning, rng):
        return question.answer
    return question.sentence if rng.random() < 0.5 else f"the answer is {question.answer}."


def main(config: Config) -> None:
    def questions(_: random.Random) -> list[Question]:
        kept_back = {row.text("question") for row in load_rows(str(QUESTIONS))}
        stream = generate_questions(derive_seed(config.seed, "conciseness/shown"))
        return [q for q in islice(stream, NUM_PROBLEMS) if q.question not in kept_back]

    def shown(q: Question, rng: random.Random) -> tuple[str, str]:
        return PROMPT.format(question=q.question), demonstrate(q, rng) + EOS

    batches = sampled(questions, shown, BATCH_SIZE)
    phase = Phase("conciseness/warm_start", batches, STEPS)
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(CLIConfig()))


if __name__ == "__main__":
    run_cli(main, Config)
