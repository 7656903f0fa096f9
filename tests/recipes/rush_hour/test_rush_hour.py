"""Rush Hour as a data set and as an Env: splits, rows, what answers earn, and demonstrations."""

import itertools
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from es_cookbook.common.errors import ConfigError
from es_cookbook.recipes.rush_hour.boards import canonical, format_moves, parse_board
from es_cookbook.recipes.rush_hour.dataset import (
    RushHourDatasetBuilder,
    RushHourEnv,
    RushHourReward,
    grade_rush_hour,
    question,
)
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems
from es_cookbook.rl.problem_env import Grade, ProblemGroupBuilder
from es_cookbook.rl.types import Action, Metrics, Observation
from tests.recipe_problems import Builders, build, check_second_row_is_named, write_rows
from tools.bundled import rush_hour as warm_start
from tools.bundled.rush_hour import CHARACTERS
from tools.small_model import build_tokenizer

pytestmark = pytest.mark.anyio

BOARD = parse_board("ooBo AABo oooo oooo")  # One piece in the way, and two columns to go.
ROWS: list[dict[str, object]] = [
    {"board": "ooBo AABo oooo oooo", "solution": "Bv2,A>2"},
    {"board": "oooo\nAAoB\noooB\noooo"},
    {"board": "oooo AAoo oooo xooo"},
    {"board": "oooo oAAB oooB CCoo"},
]


async def built(
    tokenizer: PreTrainedTokenizerBase | None = None, **fields: object
) -> tuple[Builders, Builders]:
    """Training and held-out boards."""
    defaults = {"problems_per_generation": 1, "num_train": 30, "num_test": 12}
    builder = RushHourDatasetBuilder(**{**defaults, **fields})  # pyright: ignore
    train, test = await build(builder, tokenizer or build_tokenizer(CHARACTERS))
    return list(train.builders), test


def board_of(builder: ProblemGroupBuilder) -> str:
    env = builder.make_env()
    assert isinstance(env, RushHourEnv)
    return str(env.board)


def keys(builders: Builders) -> set[str]:
    return {canonical(parse_board(board_of(builder))) for builder in builders}


# --- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [0, 1])
async def test_the_fold_says_which_boards_are_held_out_generated_or_from_a_file(
    fold: int, tmp_path: Path
) -> None:
    train, test = await built(fold=fold)
    folds = [{Problem(parse_board(board_of(b))).fold for b in part} for part in (train, test)]
    assert folds[1] == {fold} and fold not in folds[0]
    assert {builder.tags for builder in train} == {("easy",), ("medium",), ("hard",)}
    boards = [{"board": board_of(builder)} for builder in (*train, *test)]
    read, held_out = await built(fold=fold, source=write_rows(tmp_path / "boards.jsonl", boards))
    assert (keys(read), keys(held_out)) == (keys(train), keys(test))


async def test_rows_are_solved_where_they_bring_no_solution(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "boards.jsonl", ROWS)
    train, test = await built(source=source, num_test=0)
    assert test == []
    golds = [builder.gold for builder in train]
    assert golds[0] == "<think>2</think>\n<answer>Bv2,A>2</answer>"
    assert golds[2] == "<think>1</think>\n<answer>A>2</answer>"
    assert [builder.tags for builder in train] == [("easy",)] * 4


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({}, "field 'board' is missing"),
        ({"board": "AAo"}, "field 'board': a board has 3 × 3 to 10 × 10 cells, found 3 cells"),
        ({"board": "oAA ooo ooo"}, "the target piece is in the last column already"),
        ({"board": "ooB AAB ooo"}, "no moves solve the board ooBAABooo"),
        (ROWS[0] | {"solution": "B down 2"}, "field 'solution' must be moves such as 'A>2,Bv3'"),
        (ROWS[0] | {"solution": "Bv1,A>2"}, "its own solution earns 0."),
    ],
)
async def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    given = RushHourDatasetBuilder, build_tokenizer(CHARACTERS), tmp_path / "train.jsonl"
    await check_second_row_is_named(*given, [ROWS[0], row], sentence)


@pytest.mark.parametrize(
    ("field", "value", "range_"),
    [("size", 3, "[4, 7]"), ("max_walls", 6, "[0, 5]"), ("max_moves", 4, "at least 5")],
)
def test_boards_that_cannot_be_generated_are_refused(field: str, value: int, range_: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RushHourDatasetBuilder(**{field: value})  # pyright: ignore[reportArgumentType]
    assert field in str(caught.value) and range_ in str(caught.value)


def test_prompts() -> None:
    assert question(BOARD, "compact") == "ooBoAABooooooooo\n"
    assert "\n\nooBo\nAABo\noooo\noooo\n\n" in question(BOARD, "words")


async def test_a_prompt_that_ends_in_think_changes_what_is_expected() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    train, _ = await built(tokenizer, prompt="words", num_train=3, num_test=0)
    env, gold = train[0].make_env(), train[0].gold
    assert isinstance(env, RushHourEnv) and isinstance(gold, str)
    assert not gold.startswith("<think>")
    assert env.grade(gold).reward == pytest.approx(1.0)


# --- rewards -------------------------------------------------------------------------------------


def graded(answer: str, **reward: object) -> Grade:
    text = f"<think></think><answer>{answer}</answer>"
    return grade_rush_hour(
        text, BOARD, 2, RushHourReward(format_weight=0, answer_weight=1, **reward)
    )


@pytest.mark.parametrize(
    ("answer", "solved", "optimal", "stops", "legal", "shaped"),
    [
        ("Bv2,A>2", 1, 1, 0, 1.0, 1.0),
        ("Bv1,Bv1,A>2", 1, 1, 0, 1.0, 1.0),
        ("Bv1,B^1,Bv2,A>2", 1, 0, 0, 1.0, 0.8 + 0.2 / 3),
        ("Bv2,A>1,B^1", 0, 0, 0, 2 / 3, 0.1 * 2 / 3 + 0.05 * 2 / 3),
        ("Bv2,A>1", 0, 0, 1, 1.0, 0.1 + 0.05 * 2 / 3),
        ("Bv2", 0, 0, 1, 1.0, 0.1 + 0.05 / 3),
        ("Bv1", 0, 0, 1, 1.0, 0.1),
        ("Bv2,A>2,A>1", 0, 0, 0, 0.5, 0.05 + 0.05 / 3),  # one slide of three cells
        ("A>2", 0, 0, 0, 0.0, 0.0),
        ("Bv2,A>2,A<2", 0, 0, 1, 1.0, 0.1 + 0.05 / 3),
        ("Bv2,A>2,B>1", 0, 0, 0, 2 / 3, 0.1 * 2 / 3 + 0.05),  # solved, and then an illegal move
        ("no idea", 0, 0, 0, 0.0, 0.0),
        ("", 0, 0, 0, 0.0, 0.0),
    ],
)
def test_parts_of_the_shaped_reward(
    answer: str, solved: float, optimal: float, stops: float, legal: float, shaped: float
) -> None:
    grade = graded(answer)
    names = ("correct", "optimal", "stops_early", "legal")
    assert [grade.metrics[name] for name in names] == pytest.approx([solved, optimal, stops, legal])
    assert grade.reward == pytest.approx(shaped)
    assert grade.metrics["well_formed"] == (">" in answer or "v" in answer)


def test_moves_that_lead_away_are_not_fined() -> None:
    text, board = "<think></think><answer>A<1</answer>", parse_board("oooo oAAo oooo oooo")
    reward = RushHourReward(format_weight=0, answer_weight=1)
    assert grade_rush_hour(text, board, 1, reward).reward == pytest.approx(0.1)


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
async def test_reward_by_choice_and_format_apart(
    text: str, moves: str, reward: float, form: float
) -> None:
    paid = RushHourReward(moves=moves)  # pyright: ignore[reportArgumentType]
    env = pickle.loads(pickle.dumps(RushHourEnv(Observation((1,)), BOARD, 2, paid)))
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    assert result.metrics["format"] == form == result.metrics["well_formed"]
    assert result.metrics["correct_well_formed"] == (result.metrics["correct"] and form)


def test_weights_are_the_users_and_not_negative() -> None:
    reward = RushHourReward(answer_weight=2.0, format_weight=0.0)
    assert grade_rush_hour(RIGHT, BOARD, 2, reward).reward == reward.full == 2.0
    with pytest.raises(ConfigError, match="answer_weight must be 0 or more, found -1"):
        RushHourReward(answer_weight=-1)


@given(st.text(alphabet="AB><^v123,", max_size=40) | st.text())
def test_whatever_is_answered_earns_between_nothing_and_all(answer: str) -> None:
    grade = graded(answer)
    assert 0 <= grade.reward <= 1
    assert grade.metrics["correct"] == (grade.reward > 0.2)
    assert grade.metrics["optimal"] == (grade.reward > 0.99)


# --- demonstrations ------------------------------------------------------------------------------


def problems(count: int, **fields: int) -> list[Problem]:
    return list(itertools.islice(generate_problems(0, range(10), size=5, **fields), count))


def metrics_of(problem: Problem, text: str) -> Metrics:
    moves = len(problem.solution or ())
    return grade_rush_hour(text, problem.board, moves, RushHourReward()).metrics


def test_demonstrations_earn_everything_within_the_token_budget() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    for problem in problems(60, max_walls=1):
        text = warm_start.demonstrate(problem)
        assert format_moves(problem.solution or ()) in text
        metrics = metrics_of(problem, text)
        assert metrics["optimal"] == metrics["well_formed"] == 1
    for problem in problems(30, max_moves=8):
        text = warm_start.demonstrate(problem)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) < 48


def test_careless_demonstrations_stop_early_the_more_often_the_lower_the_target() -> None:
    rng = random.Random(0)
    shares: dict[int, list[bool]] = {}
    for problem in problems(150, max_moves=8):
        leaves_out = [warm_start.leaves_out_the_last(problem, rng) for _ in range(40)]
        if len(problem.solution or ()) == 1:
            assert not any(leaves_out)
            continue
        shares.setdefault(problem.board.target.start // 5, []).extend(leaves_out)
        metrics = metrics_of(problem, warm_start.demonstrate(problem, without_last=True))
        assert metrics["stops_early"] == metrics["well_formed"] == 1
    by_row = [sum(shares[row]) / len(shares[row]) for row in range(5)]
    assert by_row == sorted(by_row)
    assert 0.4 < by_row[0] < 0.55 < by_row[2] < 0.7 < by_row[4] < 0.8
