"""Generated boards: solvable, optimal, balanced, seeded, disjoint."""

from collections import Counter
from itertools import islice

import pytest

from es_cookbook.recipes.rush_hour.boards import arrangement, play
from es_cookbook.recipes.rush_hour.generate import (
    Problem,
    Split,
    difficulty,
    generate_problems,
)
from es_cookbook.recipes.rush_hour.solver import solve


def make(seed: int, split: Split = "train", count: int = 30, **fields: int) -> list[Problem]:
    return list(islice(generate_problems(seed, split, **fields), count))


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


def test_no_test_board_can_be_reached_from_a_training_board() -> None:
    train = make(1, "train", 120, size=4)
    test = make(2, "test", 15, size=4)
    assert {problem.split for problem in train} == {"train"}
    assert {problem.split for problem in test} == {"test"}
    held_out = {arrangement(problem.board) for problem in test}
    assert held_out.isdisjoint(arrangement(problem.board) for problem in train)


def test_difficulties_by_length() -> None:
    assert [difficulty(length) for length in (1, 2, 3, 4, 5, 50)] == [
        *("easy", "easy", "medium", "medium", "hard", "hard")
    ]
