"""The solver against boards with known answers, and against a search that is slow and plain."""

import itertools
import random

import pytest

from es_cookbook.recipes.rush_hour.boards import Board, Move, format_moves, parse_board, play
from es_cookbook.recipes.rush_hour.generate import random_board
from es_cookbook.recipes.rush_hour.solver import Distances, TooManyPositionsError, solve


@pytest.mark.parametrize(
    ("text", "solution"),
    [
        ("oooo AAoo oooo oooo", "A>2"),
        ("ooBo AABo oooo oooo", "Bv2,A>2"),
        ("oooo ooAA oooo oooo", ""),
        ("ooBo AABo oooo ooCC", "C<2,Bv2,A>2"),
    ],
)
def test_literal_boards(text: str, solution: str) -> None:
    found = solve(parse_board(text))
    assert found is not None
    assert format_moves(found) == solution


@pytest.mark.parametrize("text", ["ooB AAB ooo", "oooo AAxo oooo oooo", "oooo AABB oooo oooo"])
def test_a_board_that_nothing_solves(text: str) -> None:
    assert solve(parse_board(text)) is None
    assert Distances(parse_board(text)).layers == []


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("GBBoLo GHIoLM GHIAAM CCCKoM ooJKDD EEJFFo", 51),
        ("IBBxoo IooLDD JAALoo JoKEEM FFKooM GGHHHM", 60),
    ],
)
def test_the_hardest_boards_without_and_with_a_wall(text: str, length: int) -> None:
    """As Michael Fogleman's exhaustive search of 6 × 6 boards found them."""
    board = parse_board(text)
    found = solve(board)
    assert found is not None
    assert len(found) == length
    assert play(board, found).is_solved


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
                played = play(each, [Move(piece.name, direction, steps)])
                if played.legal and str(played.board) not in seen:
                    seen.add(str(played.board))
                    reached.append(played.board)
        frontier = reached
    return None


def test_optimal_lengths_are_those_of_a_plain_search() -> None:
    rng = random.Random(0)
    lengths: list[int | None] = []
    for _ in range(60):
        board = random_board(rng, 4, rng.randint(0, 1))
        found = solve(board)
        assert (None if found is None else len(found)) == plain_optimum(board)
        assert found is None or play(board, found).is_solved
        lengths.append(None if found is None else len(found))
    assert {None, 1, 2, 3} <= set(lengths)


def test_distances_are_the_optimal_lengths_of_all_positions() -> None:
    board = next(
        board
        for board in (random_board(random.Random(seed), 5, 0) for seed in itertools.count())
        if len(Distances(board).layers) > 7
    )
    distances = Distances(board)
    for length, layer in enumerate(distances.layers):
        for code in layer[:5]:
            position, moves = distances.solution(code)
            assert len(moves) == length
            assert play(position, moves).is_solved
            found = solve(position)
            assert found is not None
            assert len(found) == length


def test_a_search_that_takes_too_long_is_given_up() -> None:
    board = parse_board("GBBoLo GHIoLM GHIAAM CCCKoM ooJKDD EEJFFo")
    with pytest.raises(TooManyPositionsError):
        solve(board, max_positions=100)
    with pytest.raises(TooManyPositionsError):
        Distances(board, max_positions=100)
