"""Make a small model that half knows how trial clues work, for evolution to begin with.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.crossword.warm_start output=crossword_model

It learns generated clues, character by character; no answer of the recipe's `clues.jsonl` is among
theirs. Part of the demonstrations misread the indicator (`Clue.careless`), by chances that lean on
the answer: so for every kind of clue the model knows two ways, of which one is right, and follows
the wrong one on part of the clues. The form, `<think>5</think><answer>demor</answer>` with the
number of letters as the thought, is always right.
"""

import random
from collections.abc import Iterator
from itertools import islice

import chz

from es_cookbook.baselines.small_model import EOS, build_model, build_tokenizer, happens
from es_cookbook.common.cli import run_cli
from es_cookbook.common.fields.chz_fields import formerly
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes import warm_start
from es_cookbook.recipes.crossword.clues import LETTERS, Clue, generate_clues
from es_cookbook.recipes.crossword.dataset import CLUES, question
from es_cookbook.recipes.crossword.train_cli import RECIPE
from es_cookbook.recipes.warm_start import Batch, Phase, make, on_held_out
from es_cookbook.rl.data.rows import load_rows

CHARACTERS = f"{LETTERS}0123456789()ĠĊ"  # Ġ, Ċ: byte-level BPE's space and newline


@chz.chz
class Config(warm_start.Config):
    """How the model is made; the defaults made the bundled one."""

    batch_size: int = chz.field(default=64, doc="demonstrations a step")
    num_problems: int = chz.field(
        default=20_000, doc="clues shown, less those kept back", metadata=formerly("num_clues")
    )


def demonstrate(clue: Clue, rng: random.Random) -> str:
    """The answer, or what comes of misreading: the likelier the later its letters."""
    lateness = sum(map(LETTERS.index, clue.answer)) / len(clue.answer) - 9
    is_careless = happens(lateness / 2, rng)
    given = clue.careless if is_careless else clue.answer
    return f"<think>{len(given)}</think><answer>{given}</answer>"


def main(config: Config) -> None:
    def batches(rng: random.Random) -> Iterator[Batch]:
        kept_back = {row.text("answer") for row in load_rows(str(CLUES))}
        stream = generate_clues(derive_seed(config.seed, "crossword/shown"))
        shown = [c for c in islice(stream, config.num_problems) if c.answer not in kept_back]
        while True:
            batch = rng.sample(shown, config.batch_size)
            questions = [question(clue.clue, clue.enumeration, "compact") for clue in batch]
            said = [demonstrate(clue, rng) + EOS for clue in batch]
            yield list(zip(questions, said, strict=True))

    tokenizer = build_tokenizer(CHARACTERS)
    phase = Phase("crossword/warm_start", batches, config.steps)
    model = build_model(tokenizer, config.seed, width=64, depth=3)
    make(config, tokenizer, [phase], on_held_out(RECIPE), model)


def cli() -> None:
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
