r"""Preference pairs: a right answer is preferred to a hasty one.

    python -m tools.rows.pairs output=pairs.jsonl

    {"prompt": "which is more, 514 or 180?\n", "chosen": "514", "rejected": "180"}

The questions are of the same kinds as those of the recipe conciseness and none of them, so nothing
held out is shown. Both answers are brief: a pair shows correctness, and little about length. The
wrong one is a likely mistake (`hasty_answer`). `pairs.jsonl` of the recipe alignment was made by
the command above.
"""

import random
import re

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.conciseness.train_cli import PROMPT, QUESTIONS
from es_cookbook.rl.data.sources import load_rows
from tools.rows.generated import RowsConfig as Config
from tools.rows.generated import with_a_wrong_character, write
from tools.rows.questions import Question, generate_questions


def hasty_answer(question: Question, rng: random.Random) -> str:
    """One of the wrong answers of a hasty reader.

    The number or word of the question itself, the lesser number, a step too many, a letter left
    out, or a character that is wrong.
    """
    words = re.findall(r"\w+", question.question)
    wrong = with_a_wrong_character(question.answer, rng)
    match question.kind:
        case "after":
            hasty = [words[-1], str(int(words[-1]) + 2), str(int(words[-1]) + 11), wrong]
        case "more":
            hasty = [min(words[-3], words[-1], key=int)]
        case _:
            hasty = [words[2], question.answer[:-1], question.answer[1:], wrong]
    return rng.choice([answer for answer in hasty if answer != question.answer])


def main(config: Config) -> None:
    asked = {row.text("question") for row in load_rows(str(QUESTIONS))}
    rng = random.Random(derive_seed(config.seed, "alignment/wrong"))
    rows = (
        {
            "prompt": PROMPT.format(question=question.question),
            "chosen": question.answer,
            "rejected": hasty_answer(question, rng),
        }
        for question in generate_questions(derive_seed(config.seed, "alignment/pairs"))
        if question.question not in asked
    )
    write(config, rows, "pair", 1000)


if __name__ == "__main__":
    run_cli(main, Config)
