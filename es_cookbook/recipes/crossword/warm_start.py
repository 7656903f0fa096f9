"""Make a small model that half knows how trial clues work, for evolution to begin with.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.crossword.warm_start output=crossword_model

It learns generated clues, character by character; no answer of the recipe's `clues.jsonl` is among
theirs. Part of the demonstrations misread the indicator (`Clue.careless`), by chances that lean on
the answer: so for every kind of clue the model knows two ways, of which one is right, and follows
the wrong one on part of the clues. The form, `<think>5</think><answer>demor</answer>` with the
number of letters as the thought, is always right.
"""

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import chz

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
from es_cookbook.recipes.crossword.clues import LETTERS, Clue, generate_clues
from es_cookbook.recipes.crossword.dataset import CLUES, question
from es_cookbook.rl.rewards.crossword import Crossword

CHARACTERS = f"{LETTERS}0123456789()ĠĊ"  # Ġ, Ċ: byte-level BPE's space and newline
BATCH_SIZE = 64
NUM_MEASURED = 400


@chz.chz
class Config:
    """How the model is made; the defaults made the bundled one."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the clues and the misreadings")
    num_clues: int = chz.field(default=20_000, doc="clues shown, less those kept back")
    steps: int = chz.field(default=1500, doc="optimizer steps of 64 clues")
    width: int = chz.field(default=64, doc="hidden size, a multiple of 16")
    depth: int = chz.field(default=3, doc="layers")


def demonstrate(clue: Clue, rng: random.Random) -> str:
    """The answer, or what comes of misreading: the likelier the later its letters."""
    lateness = sum(map(LETTERS.index, clue.answer)) / len(clue.answer) - 9
    is_careless = happens(lateness / 2, rng)
    given = clue.careless if is_careless else clue.answer
    return f"<think>{len(given)}</think><answer>{given}</answer>"


def main(config: Config) -> None:
    """Learn, measure, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed, config.width, config.depth)
    rng = random.Random(derive_seed(config.seed, "crossword/warm_start"))
    rows = [json.loads(line) for line in Path(CLUES).read_text(encoding="utf-8").splitlines()]
    kept_back = {row["answer"] for row in rows}
    stream = generate_clues(derive_seed(config.seed, "crossword/shown"))
    shown = [clue for clue in islice(stream, config.num_clues) if clue.answer not in kept_back]

    def draw() -> tuple[Sequence[str], Sequence[str]]:
        batch = rng.sample(shown, BATCH_SIZE)
        questions = [question(clue.clue, clue.enumeration, "compact") for clue in batch]
        return questions, [demonstrate(clue, rng) + EOS for clue in batch]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    asked = rows[:NUM_MEASURED]
    questions = [question(row["clue"], row["enumeration"], "compact") for row in asked]
    texts = answer(model, tokenizer, questions, max_tokens=24)
    for kind in ("all", *dict.fromkeys(row["kind"] for row in asked)):
        scores = [
            Crossword()(text, row)[1]
            for (text,), row in zip(texts, asked, strict=True)
            if kind in ("all", row["kind"])
        ]
        means = {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}
        print(kind, ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
