"""Make a small model that half knows small Rush Hour boards, for evolution to begin with.

    python -m es_cookbook.recipes.rush_hour.warm_start output=/tmp/rush_hour_model

It learns optimal solutions of generated training boards, character by character, and stops on the
way (`steps`). A demonstration is `<think>2</think><answer>Bv2,A>2</answer>`: the thought is the
number of moves. Held-out boards are never shown.
"""

import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

import chz
from transformers import Qwen2Tokenizer

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.countdown.warm_start import (
    EOS,
    PAD,
    TAGS,
    UNKNOWN,
    build_model,
    fit,
    save,
)
from es_cookbook.recipes.rush_hour.boards import format_moves
from es_cookbook.recipes.rush_hour.env import question
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems

BATCH_SIZE = 96


@chz.chz
class Config:
    """How the model is made."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the boards and their order")
    size: int = chz.field(default=5, doc="rows of the boards")
    max_moves: int = chz.field(default=5, doc="longest optimal solution")
    num_boards: int = chz.field(default=20_000, doc="training boards shown")
    steps: int = chz.field(default=1000, doc="optimizer steps of 96 boards")


def build_tokenizer() -> Qwen2Tokenizer:
    """One token a character, one a tag: a byte-level BPE without merges, in Qwen2's own class."""
    characters = "ABCDEFGHIJKLMNOPQRSTUVWXYZox0123456789<>^v,Ċ"  # Ċ is byte-level BPE's newline
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate([PAD, EOS, UNKNOWN, *TAGS, *characters])},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=512,
    )
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def demonstrate(problem: Problem) -> str:
    """The optimal solution, after a thought that counts its moves."""
    moves = problem.solution or ()
    return f"<think>{len(moves)}</think><answer>{format_moves(moves)}</answer>"


def main(config: Config) -> None:
    """Generate, learn, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = Path(config.output)
    if output.exists() or not os.access(output.absolute().parent, os.W_OK):
        raise ConfigError(
            f"output must be a new directory in one that exists and is writable, found {output}"
        )
    stream = generate_problems(config.seed, "train", size=config.size, max_moves=config.max_moves)
    problems = list(itertools.islice(stream, config.num_boards))
    print(f"{len(problems)} boards", flush=True)
    rng = random.Random(derive_seed(config.seed, "rush_hour/warm_start"))
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, config.seed)

    def draw() -> tuple[Sequence[str], Sequence[str]]:
        batch = rng.sample(problems, min(BATCH_SIZE, len(problems)))
        questions = [question(problem.board, "compact") for problem in batch]
        return questions, [demonstrate(problem) + EOS for problem in batch]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
