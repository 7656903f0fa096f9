"""Generated boards: solvable, optimal, balanced, seeded, disjoint."""

from collections import Counter
from collections.abc import Collection
from itertools import islice

import pytest

from es_cookbook.recipes.rush_hour.boards import arrangement, mirrored, play
from es_cookbook.recipes.rush_hour.generate import (
    Problem,
    difficulty,
    generate_problems,
)
from es_cookbook.recipes.rush_hour.solver import solve


def make(
    seed: int, folds: Collection[int] = range(10), count: int = 30, **fields: int
) -> list[Problem]:
    return list(islice(generate_problems(seed, folds, **fields), count))


@pytest.mark.parametrize(("size", "max_walls"), [(4, 0), (4, 1), (5, 2), (6, 1)])
def test_solutions_are_optimal_and_difficulties_balanced(size: int, max_walls: int) -> None:
    problems = make(0, size=size, max_walls=max_walls, max_moves=7)
    lengths: list[int] = []
    for problem in problems:
        assert problem.board.size == size
        assert len(problem.board.walls) <= max_walls
        assert problem.solution is not None
        assert play(problem.board, problem.solution).is_solved
        assert len(problem.solution) == len(solve(problem.board) or ())
        lengths.append(len(problem.solution))
    assert Counter(map(difficulty, lengths)) == {"easy": 10, "medium": 10, "hard": 10}
    assert {1, 2, 3, 4, 5} <= set(lengths) <= {*range(1, 8)}


def test_names_follow_the_rows() -> None:
    for problem in make(0, size=4):
        names = [piece.name for piece in problem.board.pieces if piece.name != "A"]
        assert names == list("BCDEFGHIJ"[: len(names)])


def test_streams_are_seeded_and_distinct() -> None:
    assert make(3, size=4) == make(3, size=4)
    problems = make(3, size=4)
    assert problems != make(4, size=4)
    assert len({problem.key for problem in problems}) == 30


def test_no_board_can_be_reached_from_a_board_of_another_fold() -> None:
    folds = [make(fold, [fold], 3, size=4) for fold in range(10)]  # One of each difficulty.
    assert [{problem.fold for problem in fold} for fold in folds] == [{n} for n in range(10)]
    arrangements = [{arrangement(problem.board) for problem in fold} for fold in folds]
    assert len(set().union(*arrangements)) == sum(map(len, arrangements))


def test_boards_that_moves_or_a_mirror_lead_to_are_of_one_fold() -> None:
    for problem in make(0, size=4):
        solved = play(problem.board, problem.solution or ()).board
        folds = {Problem(board).fold for board in (problem.board, solved, mirrored(solved))}
        assert len(folds) == 1


def test_difficulties_by_length() -> None:
    assert [difficulty(length) for length in (1, 2, 3, 4, 5, 50)] == [
        *("easy", "easy", "medium", "medium", "hard", "hard")
    ]
