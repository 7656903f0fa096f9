"""The rules, perfect play, the folds of openings, and how moves are read."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.recipes.tic_tac_toe.game import (
    CELLS,
    EMPTY,
    best_moves,
    careful_move,
    careless_move,
    fold,
    legal_moves,
    mover,
    openings,
    perfect_move,
    played,
    question,
    random_move,
    read_move,
    symmetry_class,
    value,
    winner,
)


def test_a_game_ends_with_three_in_a_line_or_a_full_board() -> None:
    assert winner("X..X..XOO") == "X"
    assert legal_moves("X..X..XOO") == ()
    assert legal_moves("XOXXOOOXX") == ()
    assert winner("XOXXOOOXX") is None
    assert (mover(EMPTY), legal_moves(EMPTY)) == ("X", tuple(CELLS))


def test_there_are_as_many_positions_as_is_known() -> None:
    reached = {EMPTY}
    for position in (todo := [EMPTY]):
        for cell in legal_moves(position):
            if (after := played(position, cell)) not in reached:
                reached.add(after)
                todo.append(after)
    assert len(reached) == 5478


@pytest.mark.parametrize("mark", ["X", "O"])
def test_the_perfect_player_never_loses(mark: str) -> None:
    """Whatever it chooses among its best moves, and whatever the other side does."""

    def explore(position: str) -> None:
        assert winner(position) in (None, mark)
        own = mover(position) == mark
        for cell in (
            best_moves(position) if own and legal_moves(position) else legal_moves(position)
        ):
            explore(played(position, cell))

    explore(EMPTY)


def test_a_perfect_player_wins_at_once() -> None:
    assert best_moves("XX.OO....") == (3,)
    assert perfect_move("XX.OO....", random.Random(0)) == 3


def test_the_careful_player_wins_then_blocks_and_the_careless_one_does_neither() -> None:
    assert (careful_move("XX.OO...."), careless_move("XX.OO....")) == (3, 7)
    assert (careful_move("OO.X....X"), careless_move("OO.X....X")) == (3, 5)
    assert (careful_move("X........"), careless_move("X........")) == (2, 2)
    assert careless_move("XOXXOOO.X") == 8, "the only free cell"


def test_openings_are_drawn_and_no_class_is_in_two_splits() -> None:
    by_fold = {name: openings(4, name) for name in ("train", "development", "test")}
    found = [opening for part in by_fold.values() for opening in part]
    assert sorted(found) == list(openings(4)) and len(found) == len(set(found)) == 136
    assert {value(opening) for opening in found} == {0}
    assert {9 - opening.count(".") for opening in found} == {4}
    classes = [{symmetry_class(opening) for opening in part} for part in by_fold.values()]
    assert all(not one & other for one, other in itertools.combinations(classes, 2))
    assert all(len(part) >= 20 for part in by_fold.values())


@given(st.permutations(list(CELLS)), st.integers(0, 9))
def test_rotations_and_reflections_are_of_one_class_and_fold(order: list[int], n: int) -> None:
    position = EMPTY
    for cell in order[:n]:
        position = played(position, cell)
    rows = [position[i : i + 3] for i in (0, 3, 6)]
    mirrored = "".join(row[::-1] for row in rows)
    turned = "".join("".join(column) for column in zip(*rows[::-1], strict=True))
    for image in (mirrored, turned):
        assert symmetry_class(image) == symmetry_class(position)
        assert fold(image) == fold(position)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        *[("5", 5), ("I take cell 7.", 7), ("1, no, 3", 3), ("", None), ("ten", None)],
        *[("0", None), ("10", None), ("-3", None), ("2.5", None), ("4.0", 4), ("cell", None)],
    ],
)
def test_a_move_is_the_last_number_of_an_answer(text: str, move: int | None) -> None:
    assert read_move(text) == move


@given(st.text())
def test_reading_a_move_never_raises(text: str) -> None:
    assert read_move(text) in (None, *CELLS)


def test_a_position_in_words_shows_the_marks_and_the_free_cells_numbers() -> None:
    text = question("XO.......", "words")
    assert "You play X" in text and "X | O | 3\n4 | 5 | 6\n7 | 8 | 9" in text
    assert question("X........", "compact") == "@23456789="


def test_the_random_player_makes_every_legal_move_and_no_other() -> None:
    rng = random.Random(0)
    assert {random_move("XOXOX....", rng) for _ in range(99)} == {6, 7, 8, 9}
