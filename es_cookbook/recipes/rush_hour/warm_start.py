"""Make the bundled model: small, character-level, and half knowing 5 × 5 Rush Hour boards.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.rush_hour.warm_start output=rush_hour_model

It learns from solutions of generated training boards, `<think>2</think><answer>Bv2,A>2</answer>`:
the thought is the number of moves. About half of the demonstrations are careless: they slide the
target piece straight to the edge, whatever stands in its way (`demonstrate`), the more often the
lower its row. So the model knows two ways, one of which is right, and greedy decoding takes the
careless one on part of the boards. Held-out boards are never shown.
"""

import itertools
import math
import random
from collections.abc import Sequence

import chz

from es_cookbook.baselines.small_model import (
    EOS,
    answer,
    build_model,
    build_tokenizer,
    fit,
    new_directory,
    save,
)
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.rush_hour.boards import Board, Move, format_moves
from es_cookbook.recipes.rush_hour.env import question
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems
from es_cookbook.recipes.rush_hour.rewards import RushHourReward, grade_rush_hour

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZox0123456789<>^v,Ċ"  # Ċ is byte-level BPE's newline
BATCH_SIZE = 96
MAX_ANSWER_TOKENS = 40
NUM_TEST = 300


@chz.chz
class Config:
    """How the model is made; the defaults made the bundled one."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the boards and their order")
    size: int = chz.field(default=5, doc="rows of the boards")
    max_moves: int = chz.field(default=5, doc="longest optimal solution")
    num_boards: int = chz.field(default=12_000, doc="training boards shown")
    steps: int = chz.field(default=600, doc="optimizer steps of 96 boards")
    careless: bool = chz.field(default=True, doc="half of the demonstrations slide A at once")


def straight(board: Board) -> tuple[Move, ...]:
    """The target piece to the edge in one move, whatever stands in its way."""
    return (Move(board.target.name, ">", board.distance),)


def demonstrate(problem: Problem, rng: random.Random, careless: bool) -> str:
    """The optimal solution after its number of moves, or the careless one."""
    moves = problem.solution or ()
    board = problem.board
    row = board.target.start // board.size / (board.size - 1)  # 0 is the first, 1 the last
    if careless and rng.random() < 1 / (1 + math.exp(-4 * (row - 0.5))):
        moves = straight(board)
    return f"<think>{len(moves)}</think><answer>{format_moves(moves)}</answer>"


def main(config: Config) -> None:
    """Generate, learn, write the model, and say what it does on held-out boards.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    shape = {"size": config.size, "max_moves": config.max_moves}
    stream = generate_problems(config.seed, "train", **shape)
    problems = list(itertools.islice(stream, config.num_boards))
    print(f"{len(problems)} boards", flush=True)
    rng = random.Random(derive_seed(config.seed, "rush_hour/warm_start"))
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed)

    def draw() -> tuple[Sequence[str], Sequence[str]]:
        batch = rng.sample(problems, min(BATCH_SIZE, len(problems)))
        questions = [question(problem.board, "compact") for problem in batch]
        return questions, [demonstrate(problem, rng, config.careless) + EOS for problem in batch]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    test_P = list(itertools.islice(generate_problems(0, "test", **shape), NUM_TEST))
    questions = [question(problem.board, "compact") for problem in test_P]
    texts = [text for (text,) in answer(model, tokenizer, questions, MAX_ANSWER_TOKENS)]
    grades = [
        grade_rush_hour(text, problem.board, len(problem.solution or ()), RushHourReward())
        for text, problem in zip(texts, test_P, strict=True)
    ]
    solved = sum(grade.moves.solved for grade in grades) / len(grades)
    print(f"held-out: {solved:.1%} solved, {sum(g.well_formed for g in grades)} well-formed")
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
