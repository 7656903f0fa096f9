r"""Preference pairs: a right answer is preferred to a wrong one of the same form.

    python -m es_cookbook.recipes.alignment.pairs output=pairs.jsonl

    {"prompt": "what comes after 419?\n", "chosen": "420", "rejected": "430"}

The questions are of the same kinds as those of the recipe conciseness and none of them, so nothing
held out is shown. Both answers are brief, and differ in one character: a pair says what is right,
and nothing about length. The recipe's own `pairs.jsonl` was made by the command above.
"""

import json
import random
from itertools import islice

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural
from es_cookbook.recipes.conciseness.questions import generate_questions
from es_cookbook.recipes.conciseness.train_cli import PROMPT, QUESTIONS
from es_cookbook.recipes.generated import with_a_wrong_character
from es_cookbook.rl.data.rows import write_rows


@chz.chz
class Config:
    """What is generated."""

    output: str = chz.field(doc=".jsonl file to write; it must not be there yet")
    count: int = chz.field(default=1000, doc="pairs")
    seed: int = chz.field(default=0, doc="same seed, same pairs")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "count", at_least=1)


def main(config: Config) -> None:
    """Generate and write.

    Raises:
        ConfigError: The file is there already, or cannot be written.
    """
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    asked = {json.loads(line)["question"] for line in lines}
    rng = random.Random(derive_seed(config.seed, "alignment/wrong"))
    stream = generate_questions(derive_seed(config.seed, "alignment/pairs"))
    fresh = (made for made in stream if made.question not in asked)
    rows = [
        {
            "prompt": PROMPT.format(question=made.question),
            "chosen": made.answer,
            "rejected": with_a_wrong_character(made.answer, rng),
        }
        for made in islice(fresh, config.count)
    ]
    write_rows(config.output, rows)
    print(f"{plural(len(rows), 'pair')} written to {config.output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
