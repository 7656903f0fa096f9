"""Boards solved, against known answers and a plain search; and boards generated, in folds."""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice

import pytest

from es_cookbook.recipes.rush_hour import generate
from es_cookbook.recipes.rush_hour.boards import Board, Move, arrangement, parse_board, play
from es_cookbook.recipes.rush_hour.solver import TooManyPositionsError, solve

HARDEST = "GBBoLo GHIoLM GHIAAM CCCKoM ooJKDD EEJFFo"


def solves(moves: Sequence[Move], board: Board) -> bool:
    legal, end = play(board, moves)
    return legal == len(moves) and end.is_solved


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("oooo ooAA oooo oooo", 0),
        ("oooo AAxo oooo oooo", None),
        # The hardest, as Michael Fogleman's exhaustive search of 6 × 6 boards found them.
        (HARDEST, 51),
        ("IBBxoo IooLDD JAALoo JoKEEM FFKooM GGHHHM", 60),
    ],
)
def test_known_boards(text: str, length: int | None) -> None:
    board = parse_board(text)
    found = solve(board)
    assert (None if found is None else len(found)) == length
    assert found is None or solves(found, board)


def plain_optimum(board: Board) -> int | None:
    """Breadth-first search with the simulator for its only rule."""
    seen = {str(board)}
    frontier = [board]
    for length in itertools.count():
        if not frontier or any(each.is_solved for each in frontier):
            return length if frontier else None
        reached: list[Board] = []
        for each in frontier:
            for piece, direction, steps in itertools.product(each.pieces, "<>^v", (1, 2, 3)):
                legal, after = play(each, [Move(piece.name, direction, steps)])
                if legal and str(after) not in seen:
                    seen.add(str(after))
                    reached.append(after)
        frontier = reached
    return None


def test_optimal_lengths_are_those_of_a_plain_search() -> None:
    rng = random.Random(0)
    lengths: list[int | None] = []
    for _ in range(60):
        board = generate.random_board(rng, 4, rng.randint(0, 1))
        found = solve(board)
        assert (None if found is None else len(found)) == plain_optimum(board)
        assert found is None or solves(found, board)
        lengths.append(None if found is None else len(found))
    assert {None, 1, 2, 3} <= set(lengths)


def test_a_search_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TooManyPositionsError):
        solve(parse_board(HARDEST), max_positions=100)


def make(
    seed: int, folds: Collection[int] = range(10), count: int = 30, **fields: int
) -> list[generate.Problem]:
    return list(islice(generate.generate_problems(seed, folds, **fields), count))


@pytest.mark.parametrize(("size", "max_walls"), [(4, 1), (6, 1)])
@pytest.mark.slow
def test_solutions_are_optimal_and_difficulties_balanced(size: int, max_walls: int) -> None:
    problems = make(0, size=size, max_walls=max_walls, max_moves=7)
    lengths: list[int] = []
    for problem in problems:
        assert problem.board.size == size
        assert len(problem.board.walls) <= max_walls
        assert problem.solution is not None
        assert solves(problem.solution, problem.board)
        assert len(problem.solution) == len(solve(problem.board) or ())
        lengths.append(len(problem.solution))
    assert Counter(map(generate.difficulty, lengths)) == {"easy": 10, "medium": 10, "hard": 10}
    assert {1, 2, 3, 4, 5} <= set(lengths) <= {*range(1, 8)}
    assert len({problem.key for problem in problems}) == 30


def test_no_board_can_be_reached_from_a_board_of_another_fold() -> None:
    folds = [make(fold, [fold], 3, size=4) for fold in range(4)]  # One of each difficulty.
    assert [{problem.fold for problem in fold} for fold in folds] == [{n} for n in range(4)]
    arrangements = [{arrangement(problem.board) for problem in fold} for fold in folds]
    assert len(set().union(*arrangements)) == sum(map(len, arrangements))
