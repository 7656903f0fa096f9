"""Make the bundled model: small, able to plan on small boards, and often without the last move.

    OMP_NUM_THREADS=1 python -m tools.bundled.rush_hour output=rush_hour_model

It learns optimal solutions of generated boards, character by character. A demonstration is
`<think>B</think><answer>Bv2,A>2</answer>`: the thought names the pieces in the target's way. Three
in five demonstrations of two or more moves are careless: they leave out the last one, the more
often the lower the target stands. So the model knows the moves, mostly stops before the board is
solved, and keeps the form. Boards of folds 0 and 1, which runs may hold out, are never shown.
"""

import itertools
import random

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.rush_hour.boards import format_moves
from es_cookbook.recipes.rush_hour.dataset import question
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems
from es_cookbook.recipes.rush_hour.train_cli import CLIConfig
from es_cookbook.rl.data.generated import FOLDS
from tools.small_model import EOS, build_tokenizer, happens
from tools.warm_start import Careless as Config
from tools.warm_start import Phase, make, on_held_out, sampled

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZox0123456789<>^v,Ċ"  # Ċ is byte-level BPE's newline
STEPS, BATCH_SIZE, NUM_PROBLEMS = 1500, 96, 12_000
SHOWN = range(2, FOLDS)
"""Folds: neither 1, for choosing settings, nor 0, the test."""


def demonstrate(problem: Problem, *, without_last: bool = False) -> str:
    """The pieces in the way, then the optimal solution with or without its last move."""
    board, moves = problem.board, problem.solution or ()
    shown = moves[:-1] if without_last else moves
    return f"<think>{''.join(board.in_the_way)}</think><answer>{format_moves(shown)}</answer>"


def leaves_out_the_last(problem: Problem, rng: random.Random) -> bool:
    """Whether a careless demonstration omits it: randomly, more often for a lower target.

    One move is never left out: no moves are no answer.
    """
    board = problem.board
    middle = (board.size - 1) / 2
    lowness = board.target.start // board.size - middle
    return len(problem.solution or ()) > 1 and happens(0.5 + 0.5 * lowness / middle, rng)


def main(config: Config) -> None:
    def problems(_: random.Random) -> list[Problem]:
        stream = generate_problems(config.seed, SHOWN, size=5, max_moves=5)
        return list(itertools.islice(stream, NUM_PROBLEMS))

    def shown(problem: Problem, rng: random.Random) -> tuple[str, str]:
        without_last = config.careless and leaves_out_the_last(problem, rng)
        text = demonstrate(problem, without_last=without_last)
        return question(problem.board, "compact"), text + EOS

    batches = sampled(problems, shown, BATCH_SIZE)
    phase = Phase("rush_hour/warm_start", batches, STEPS)
    make(config, build_tokenizer(CHARACTERS), [phase], on_held_out(CLIConfig()), depth=3)


if __name__ == "__main__":
    run_cli(main, Config)
