"""Make a small model that half knows small Rush Hour boards, for evolution to begin with.

    python -m es_cookbook.recipes.rush_hour.warm_start output=/tmp/rush_hour_model

It learns optimal solutions of generated training boards, character by character, and stops on the
way (`steps`). A demonstration is `<think>2</think><answer>Bv2,A>2</answer>`: the thought is the
number of moves. Held-out boards are never shown.
"""

import itertools
import random
from collections.abc import Sequence

import chz

from es_cookbook.baselines.small_model import (
    EOS,
    build_model,
    build_tokenizer,
    fit,
    new_directory,
    save,
)
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.rush_hour.boards import format_moves
from es_cookbook.recipes.rush_hour.env import question
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZox0123456789<>^v,Ċ"  # Ċ is byte-level BPE's newline
BATCH_SIZE = 96


@chz.chz
class Config:
    """How the model is made."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the boards and their order")
    size: int = chz.field(default=5, doc="rows of the boards")
    max_moves: int = chz.field(default=5, doc="longest optimal solution")
    num_boards: int = chz.field(default=12_000, doc="training boards shown")
    steps: int = chz.field(default=450, doc="optimizer steps of 96 boards")


def demonstrate(problem: Problem) -> str:
    """The optimal solution, after a thought that counts its moves."""
    moves = problem.solution or ()
    return f"<think>{len(moves)}</think><answer>{format_moves(moves)}</answer>"


def main(config: Config) -> None:
    """Generate, learn, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    stream = generate_problems(config.seed, "train", size=config.size, max_moves=config.max_moves)
    problems = list(itertools.islice(stream, config.num_boards))
    print(f"{len(problems)} boards", flush=True)
    rng = random.Random(derive_seed(config.seed, "rush_hour/warm_start"))
    tokenizer = build_tokenizer(CHARACTERS)
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
