"""What answers earn: parts that add up, and nothing for text that is no answer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.rush_hour.boards import format_moves, parse_board
from es_cookbook.recipes.rush_hour.env import (
    RushHourReward,
    grade_moves,
    grade_rush_hour,
)
from es_cookbook.recipes.rush_hour.generate import generate_problems

BOARD = parse_board("ooBo AABo oooo oooo")  # h = one piece in the way + two columns to go


@pytest.mark.parametrize(
    ("answer", "solved", "optimal", "legal", "shaped"),
    [
        ("Bv2,A>2", True, True, 1.0, 1.0),
        ("Bv1,Bv1,A>2", True, True, 1.0, 1.0),
        ("Bv1,B^1,Bv2,A>2", True, False, 1.0, 0.8 + 0.2 / 3),
        ("Bv2,A>1,B^1", False, False, 2 / 3, 0.1 * 2 / 3 + 0.05 * 2 / 3),
        ("Bv2", False, False, 1.0, 0.1 + 0.05 / 3),
        ("Bv1", False, False, 1.0, 0.1),
        ("Bv2,A>2,A>1", False, False, 0.5, 0.05 + 0.05 / 3),  # one slide of three cells
        ("A>2", False, False, 0.0, 0.0),
        ("Bv2,A>2,A<2", False, False, 1.0, 0.1 + 0.05 / 3),
        ("no idea", False, False, 0.0, 0.0),
        ("", False, False, 0.0, 0.0),
        (None, False, False, 0.0, 0.0),
    ],
)
def test_parts_of_the_shaped_reward(
    answer: str | None, solved: bool, optimal: bool, legal: float, shaped: float
) -> None:
    grade = grade_moves(answer, BOARD, optimal=2)
    assert (grade.solved, grade.optimal) == (solved, optimal)
    assert grade.legal == pytest.approx(legal)
    assert grade.shaped == pytest.approx(shaped)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Bv2", True), ("Bv2,A>1", True), ("Bv2,A>2", False), ("A>2", False), ("no idea", False)],
)
def test_legal_moves_that_do_not_solve_the_board_stop_early(answer: str, expected: bool) -> None:
    assert grade_moves(answer, BOARD, optimal=2).stops_early is expected


RIGHT = "<think>2</think><answer>Bv2,A>2</answer>"
LONG = "<think>3</think><answer>Bv1,B^1,Bv2,A>2</answer>"


@pytest.mark.parametrize(
    ("text", "moves", "reward", "form"),
    [
        (RIGHT, "shaped", 1.0, 1.0),
        (RIGHT, "solved", 1.0, 1.0),
        (RIGHT, "optimal", 1.0, 1.0),
        (LONG, "solved", 1.0, 1.0),
        (LONG, "optimal", 0.1, 1.0),
        ("<answer>A>2</answer> no: <answer>Bv2,A>2</answer>", "solved", 0.9, 0.0),
        ("Bv2,A>2", "shaped", 0.0, 0.0),
        ("", "shaped", 0.0, 0.0),
    ],
)
def test_reward_by_choice_and_format_apart(
    text: str, moves: str, reward: float, form: float
) -> None:
    grade = grade_rush_hour(text, BOARD, 2, RushHourReward(moves=moves))
    assert grade.reward == pytest.approx(reward)
    assert grade.metrics["format"] == form
    assert grade.metrics["well_formed"] == (form == 1.0)


def test_what_are_no_moves_is_not_well_formed_in_the_best_of_forms() -> None:
    text = "<think></think><answer>forward</answer>"
    metrics = grade_rush_hour(text, BOARD, 2, RushHourReward()).metrics
    assert (metrics["format"], metrics["well_formed"]) == (1.0, 0.0)


def test_weights_are_the_users_and_not_negative() -> None:
    reward = RushHourReward(answer_weight=2.0, format_weight=0.0)
    assert grade_rush_hour(RIGHT, BOARD, 2, reward).reward == reward.full == 2.0
    with pytest.raises(ConfigError, match="answer_weight must be 0 or more, found -1"):
        RushHourReward(answer_weight=-1)


@given(st.text(alphabet="AB><^v123,", max_size=40) | st.text())
def test_whatever_is_answered_earns_between_nothing_and_all(answer: str) -> None:
    grade = grade_moves(answer, BOARD, optimal=2)
    assert 0 <= grade.shaped <= 1
    assert grade.solved == (grade.shaped > 0.2)
    assert grade.optimal == (grade.shaped > 0.99)


def test_every_generated_solution_earns_the_full_reward() -> None:
    for problem in itertools.islice(generate_problems(0, range(10), size=5, max_walls=1), 60):
        assert problem.solution is not None
        optimal = len(problem.solution)
        grade = grade_moves(format_moves(problem.solution), problem.board, optimal)
        assert grade.shaped == pytest.approx(1)
        assert grade.optimal
