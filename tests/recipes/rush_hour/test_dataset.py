"""Rush Hour as a dataset and as an Env."""

import json
import pickle
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.rush_hour.boards import canonical, parse_board
from es_cookbook.recipes.rush_hour.dataset import RushHourDatasetBuilder
from es_cookbook.recipes.rush_hour.env import RushHourEnv, RushHourReward, question
from es_cookbook.recipes.rush_hour.generate import Problem
from es_cookbook.recipes.rush_hour.warm_start import CHARACTERS
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Action, Observation

pytestmark = pytest.mark.anyio

Builders = list[ProblemGroupBuilder]


async def _build(
    tokenizer: PreTrainedTokenizerBase | None = None, **fields: object
) -> tuple[Builders, Builders]:
    defaults: dict[str, object] = {
        "problems_per_generation": 1,
        "num_train": 30,
        "num_test": 12,
    }
    built = await RushHourDatasetBuilder(**{**defaults, **fields})(
        tokenizer or build_tokenizer(CHARACTERS)
    )
    assert isinstance(built.train, ProblemDataset)
    await built.train.validate(512)
    test = [builder for builder in built.test_P if isinstance(builder, ProblemGroupBuilder)]
    return list(built.train.builders), test


def _keys(builders: Builders) -> set[str]:
    return {canonical(parse_board(_board(builder))) for builder in builders}


def _board(builder: ProblemGroupBuilder) -> str:
    env = builder.make_env()
    assert isinstance(env, RushHourEnv)
    return str(env.board)


def _fold(builder: ProblemGroupBuilder) -> int:
    return Problem(parse_board(_board(builder))).fold


def _write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS: list[dict[str, object]] = [
    {"board": "ooBo AABo oooo oooo", "solution": "Bv2,A>2"},
    {"board": "oooo\nAAoB\noooB\noooo"},
    {"board": "oooo AAoo oooo xooo"},
    {"board": "oooo oAAB oooB CCoo"},
]


async def test_generated_boards_are_disjoint_and_held_out_ones_the_same_for_every_seed() -> None:
    train, test = await _build(seed=1)
    other_train, other_test = await _build(seed=2)
    assert (len(train), len(test)) == (30, 12)
    assert _keys(test) == _keys(other_test)
    assert _keys(train) != _keys(other_train)
    assert _keys(train).isdisjoint(_keys(test))
    assert {builder.tags for builder in train} == {("easy",), ("medium",), ("hard",)}


@pytest.mark.parametrize("fold", [0, 1])
async def test_the_fold_says_which_boards_are_held_out_generated_or_from_a_file(
    fold: int, tmp_path: Path
) -> None:
    train, test = await _build(fold=fold)
    assert {_fold(builder) for builder in test} == {fold}
    assert fold not in {_fold(builder) for builder in train}
    boards = [{"board": _board(builder)} for builder in (*train, *test)]
    read, held_out = await _build(fold=fold, source=_write(tmp_path / "boards.jsonl", boards))
    assert (_keys(read), _keys(held_out)) == (_keys(train), _keys(test))


async def test_rows_are_solved_where_they_bring_no_solution(tmp_path: Path) -> None:
    source = _write(tmp_path / "boards.jsonl", ROWS)
    train, test = await _build(source=source, num_test=0)
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
    source = _write(tmp_path / "train.jsonl", [ROWS[0], row])
    with pytest.raises(DataError) as caught:
        await _build(source=source, num_test=0)
    assert str(caught.value).startswith(f"{source}, line 2: ")
    assert sentence in str(caught.value)


async def test_a_held_out_board_is_refused_upside_down_and_renamed_too(tmp_path: Path) -> None:
    source = _write(tmp_path / "train.jsonl", [{"board": "oooo oooo AAZo ooZo"}])
    test_source = _write(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(DataError) as caught:
        await _build(source=source, test_source=test_source)
    assert str(caught.value) == (
        f"{source}, line 1: this problem is also held out, in {test_source}, line 1; training and "
        "test must be disjoint"
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_train": 0}, "num_train"),
        ({"num_test": -1}, "num_test"),
        ({"fold": 10}, "fold must be in [0, 9], found 10"),
        ({"size": 3}, "size must be in [4, 7], found 3"),
        ({"max_walls": 6}, "max_walls must be in [0, 5], found 6"),
        ({"max_moves": 4}, "max_moves must be at least 5, found 4"),
        ({"test_source": "a.jsonl"}, "test_source needs source=... beside it"),
    ],
)
def test_fields_that_cannot_work_are_named(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RushHourDatasetBuilder(**fields)
    assert name in str(caught.value)


def test_prompts() -> None:
    board = parse_board("ooBo AABo oooo oooo")
    assert question(board, "compact") == "ooBoAABooooooooo\n"
    assert "\n\nooBo\nAABo\noooo\noooo\n\n" in question(board, "words")


async def test_a_prompt_that_ends_in_think_changes_what_is_expected() -> None:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    train, _ = await _build(tokenizer, prompt="words", num_train=3, num_test=0)
    env = train[0].make_env()
    assert train[0].gold is not None
    assert not train[0].gold.startswith("<think>")
    assert env.grade(train[0].gold).reward == pytest.approx(1.0)


async def test_the_env_reports_moves_and_form_apart_and_pickles() -> None:
    board = parse_board("ooBo AABo oooo oooo")
    env = RushHourEnv(Observation((1,)), board, 2, RushHourReward())
    text = "<answer>Bv1,B^1,Bv2,A>2</answer>"
    result = await pickle.loads(pickle.dumps(env)).step(Action((1,), text, "stop"))
    assert result.reward == pytest.approx(0.9 * (0.8 + 0.2 / 3))
    assert result.metrics == {
        "correct": 1.0,
        "optimal": 0.0,
        "stops_early": 0.0,
        "legal": 1.0,
        "format": 0.0,
        "well_formed": 0.0,
        "correct_well_formed": 0.0,
    }
