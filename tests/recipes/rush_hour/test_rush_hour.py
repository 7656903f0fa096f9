"""Rush Hour as a data set and as an Env: splits, rows, what answers earn, and demonstrations."""

import pickle
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from es_cookbook.recipes.rush_hour import dataset
from es_cookbook.recipes.rush_hour.boards import canonical, parse_board
from es_cookbook.recipes.rush_hour.generate import Problem
from es_cookbook.rl.problem_env import Grade, ProblemGroupBuilder
from es_cookbook.rl.types import Action, Observation
from tests.recipe_problems import Builders, build, write_rows
from tools.bundled.rush_hour import CHARACTERS
from tools.small_model import build_tokenizer

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
    builder = dataset.RushHourDatasetBuilder(**{**defaults, **fields})  # pyright: ignore
    train, test = await build(builder, tokenizer or build_tokenizer(CHARACTERS))
    return list(train.builders), test


def board_of(builder: ProblemGroupBuilder) -> str:
    env = builder.make_env()
    assert isinstance(env, dataset.RushHourEnv)
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


# --- rewards -------------------------------------------------------------------------------------


def graded(answer: str, **reward: object) -> Grade:
    text = f"<think></think><answer>{answer}</answer>"
    return dataset.grade_rush_hour(
        text, BOARD, 2, dataset.RushHourReward(format_weight=0, answer_weight=1, **reward)
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
        ("Bv2,A>2,A>1", 0, 0, 0, 0.5, 0.05 + 0.05 / 3),  # one slide of three cells
        ("A>2", 0, 0, 0, 0.0, 0.0),
        ("Bv2,A>2,B>1", 0, 0, 0, 2 / 3, 0.1 * 2 / 3 + 0.05),  # solved, and then an illegal move
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


RIGHT = "<think>2</think><answer>Bv2,A>2</answer>"
LONG = "<think>3</think><answer>Bv1,B^1,Bv2,A>2</answer>"


@pytest.mark.parametrize(
    ("text", "moves", "reward", "form"),
    [
        (RIGHT, "shaped", 1.0, 1.0),
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
    paid = dataset.RushHourReward(moves=moves)  # pyright: ignore[reportArgumentType]
    env = pickle.loads(pickle.dumps(dataset.RushHourEnv(Observation((1,)), BOARD, 2, paid)))
    result = await env.step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(reward)
    assert result.metrics["format"] == form == result.metrics["well_formed"]
    assert result.metrics["correct_well_formed"] == (result.metrics["correct"] and form)
