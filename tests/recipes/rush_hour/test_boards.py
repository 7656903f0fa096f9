"""Boards and moves: read, judged, recognised whatever they are called."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.recipes.rush_hour import boards
from es_cookbook.recipes.rush_hour.generate import random_board

BOARD = """
    ooBBoC
    oxooDC
    AAooDo
    ooEEDo
    FooooG
    FoooxG
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "3 × 3 to 10 × 10 cells, found 0 cells"),
        ("o" * 121, "found 121 cells"),
        ("AA. ... ...", "found '.'"),
        ("ooo BBo ooo", "target piece 'A' must be there"),
        ("Aoo Aoo ooo", "lie horizontally"),
        ("AAo Boo ooo", "'B' is not"),
        ("AAo BoB ooo", "'B' is not"),
        ("AAo ooB Boo", "'B' is not"),
    ],
)
def test_what_is_no_board_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        boards.parse_board(text)


@pytest.mark.parametrize(
    ("text", "canonical_form"),
    [
        ("A>2,Bv3", "A>2,Bv3"),
        (" A>2 ,\nBv3 ", "A>2,Bv3"),
        ("AR2,BD3,CL1,DU10", "A>2,Bv3,C<1,D^10"),
        ("A>1,AR1,A>1", "A>3"),
        ("A>1,A<1", "A>1,A<1"),
        ("A>1,B^1,A>1", "A>1,B^1,A>1"),
    ],
)
def test_moves_have_one_canonical_form(text: str, canonical_form: str) -> None:
    moves = boards.parse_moves(text)
    assert moves is not None
    assert boards.format_moves(moves) == canonical_form


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "A>2,", "A>2,,B^1", "A>2 B^1", "a>2", "A>0", "A>", "A>-1", "A>1.5", "A>100"),
        *("A>२", "A>1;B^1", "moves: A>1", "A" * boards.MAX_TEXT, "A>1," * 1_000_000 + "A>1"),
    ],
)
def test_what_is_no_list_of_moves_is_none(text: str) -> None:
    began = time.process_time()
    assert boards.parse_moves(text) is None
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("moves", "legal"),
    [
        ("D^1,A>4", 1),  # D is still in the way
        ("Dv2,A>4", 0),  # a wall
        ("A>2", 1),
        ("A>3", 0),  # through D
        ("A<1", 0),  # over the edge
        ("Av1", 0),  # across its axis
        ("Z>1", 0),  # no such piece
        ("B<2,C^1", 1),
        ("A>2,A>2", 0),  # one slide of four
    ],
)
def test_moves_are_judged_by_playing_them(moves: str, legal: int) -> None:
    parsed = boards.parse_moves(moves)
    assert parsed is not None
    made, end = boards.play(boards.parse_board(BOARD), parsed)
    assert (made, end.is_solved) == (legal, False)


@given(st.integers(0, 10_000), st.integers(4, 6), st.integers(0, 2))
def test_names_and_mirror_images_mean_nothing(seed: int, size: int, walls: int) -> None:
    rng = random.Random(seed)
    board = random_board(rng, size, walls)
    others = {piece.name: {"B": "Z"}.get(piece.name, piece.name) for piece in board.pieces}
    for same in (
        boards.mirrored(board),
        boards.renamed(board, others),
        boards.mirrored(boards.renamed(board, others)),
    ):
        assert boards.canonical(same) == boards.canonical(board)
        assert boards.arrangement(same) == boards.arrangement(board)
    assert boards.mirrored(boards.mirrored(board)) == board
    assert boards.parse_board(str(board)) == board
