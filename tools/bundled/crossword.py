"""Make a small model that half knows how trial clues work, for evolution to begin with.

    OMP_NUM_THREADS=1 python -m tools.bundled.crossword output=crossword_model

It learns generated clues, character by character; no answer of the recipe's `clues.jsonl` is among
theirs. Part of the demonstrations misread the indicator (`Clue.careless`), by chances that lean on
the answer: so for every kind of clue the model knows two ways, one of them right, and follows
the wrong one on part of the clues. The form, `<think>5</think><answer>demor</answer>` with the
number of letters as the thought, is always right.
"""

import random
from itertools import islice

from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.crossword.dataset import CLUES, question
from es_cookbook.recipes.crossword.train_cli import CLIConfig
from es_cookbook.rl.data.sources import load_rows
from tools.rows.clues import LETTERS, Clue, generate_clues
from tools.small_model import EOS, build_tokenizer, happens
from tools.warm_start import Config, Phase, make, on_held_out, sampled

CHARACTERS = f"{LETTERS}0123456789()ĠĊ"  # Ġ, Ċ: byte-level BPE's space and newline
STEPS, BATCH_SIZE, NUM_PROBLEMS = 1500, 64, 20_000


def demonstrate(clue: Clue, rng: random.Random) -> str:
    """The answer, or a misreading: the likelier the later its letters."""
    lateness = sum(map(LETTERS.index, clue.answer)) / len(clue.answer) - 9
    is_careless = happens(lateness / 2, rng)
    given = clue.careless if is_careless else clue.answer
    return f"<think>{len(given)}</think><answer>{given}</answer>"


def main(config: Config) -> None:
    def clues(_: random.Random) -> list[Clue]:
        kept_back = {row.text("answer") for row in load_rows(str(CLUES))}
        stream = generate_clues(derive_seed(config.seed, "crossword/shown"))
        return [c for c in islice(stream, NUM_PROBLEMS) if c.answer not in kept_back]

    def shown(clue: Clue, rng: random.Random) -> tuple[str, str]:
        return question(clue.clue, clue.enumeration, "compact"), demonstrate(clue, rng) + EOS

    batches = sampled(clues, shown, BATCH_SIZE)
    phase = Phase("crossword/warm_start", batches, STEPS)
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(CLIConfig()), depth=3)


if __name__ == "__main__":
    run_cli(main, Config)
