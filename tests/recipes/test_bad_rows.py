"""A row that a recipe cannot use is named by its file and line, before a model is loaded."""

import functools
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook.cli.options import recipe_config
from tests.recipe_problems import check_second_row_is_named
from tools.small_model import build_tokenizer

BOARD = {"board": "ooBo AABo oooo oooo"}
GOOD: dict[str, dict[str, object]] = {
    "conciseness": {"question": "b?", "answer": ["yes", "certainly"]},
    "countdown": {"numbers": [3, 3, 2], "target": 11},
    "crossword": {"clue": "Sounds like a frozen dessert (3,5)", "answer": "ICE CREAM"},
    "math": {"question": "How many?", "answer": "6 * 6 = 36\n#### 36"},
    "rush_hour": BOARD,
}
LETTERS = "".join(map(chr, range(33, 127))) + "ĠĊ"


@pytest.mark.parametrize(
    ("recipe", "row", "sentence"),
    [
        ("conciseness", {"question": "a?", "answer": ""}, "'answer' must be a text, a number or a"),
        ("countdown", {"target": 3}, "field 'numbers' or 'nums' is missing"),
        ("countdown", {"numbers": [1, 2], "target": "3"}, "'target' must be a whole number, found"),
        ("countdown", {"numbers": [1, 1, 1], "target": 99}, "no expression of [1, 1, 1] equals 99"),
        (
            "countdown",
            {"numbers": [1, 2], "target": 3, "solution": "1-2"},
            "its own solution earns 0.1 of 1",
        ),
        ("countdown", {"numbers": [1] * 6, "target": 6}, "more than 5 numbers needs a 'solution'"),
        ("crossword", {"clue": "x", "anwser": "owl"}, "is missing; did you mean 'anwser'?"),
        ("math", {"prompt": "?", "target": 3}, "found: prompt, target"),
        ("math", {"question": "?", "answer": "42"}, "must end in '#### ' and the answer"),
        ("math", {"question": "?", "answer": "so\n#### "}, "the answer is empty"),
        ("math", {"question": "?", "answer": "#### many"}, "'answer' must be wholly a number"),
        ("math", {"problem": "?", "solution": "It is 3."}, r"must have the answer in \boxed{}"),
        ("math", {"problem": "?", "answer": ["1", "2"]}, "field 'answer' must be one answer"),
        ("rush_hour", {"board": "AAo"}, "a board has 3 × 3 to 10 × 10 cells, found 3 cells"),
        ("rush_hour", {"board": "oAA ooo ooo"}, "the target piece is in the last column already"),
        ("rush_hour", {"board": "ooB AAB ooo"}, "no moves solve the board ooBAABooo"),
        ("rush_hour", BOARD | {"solution": "B down 2"}, "must be moves such as 'A>2,Bv3'"),
        ("rush_hour", BOARD | {"solution": "Bv1,A>2"}, "its own solution earns 0."),
    ],
)
async def test_a_bad_row_is_named_with_file_and_line(
    recipe: str, row: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    dataset = functools.partial(chz.replace, recipe_config(recipe)().dataset)
    given = dataset, build_tokenizer(LETTERS), tmp_path / "rows.jsonl"
    await check_second_row_is_named(*given, [GOOD[recipe], row], sentence)
