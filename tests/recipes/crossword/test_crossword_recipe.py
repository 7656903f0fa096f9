"""The recipe crossword: its clues, rows of public sets, a run, and the model to begin with."""

import random
from itertools import islice
from pathlib import Path

import datasets
import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.crossword.dataset import CrosswordDatasetBuilder, question
from es_cookbook.recipes.crossword.reward import Crossword
from es_cookbook.recipes.crossword.train_cli import CLIConfig
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tests.recipe_problems import build, check_second_row_is_named, write_rows
from tools.bundled import crossword as warm_start
from tools.rows.clues import generate_clues
from tools.small_model import EOS, build_tokenizer

pytestmark = pytest.mark.anyio
TOKENIZER = build_tokenizer(warm_start.CHARACTERS)
ROWS: list[dict[str, object]] = [
    {"clue": "Sounds like a frozen dessert (3,5)", "answer": "ICE CREAM", "definition": "dessert"},
    {"clue": "Burnt custard, oddly", "answer": "crème brûlée", "enumeration": "(5,6)"},
    {"clue": "Bird with bowl, beheaded", "answer": "Owl", "kind": "deletion"},
]


async def test_rows_of_public_sets_are_read_from_files(tmp_path: Path) -> None:
    source = str(tmp_path / "clues.parquet")
    columns = ("clue", "answer", "definition", "enumeration", "kind")
    rows = [{column: row.get(column) for column in columns} for row in ROWS]
    datasets.Dataset.from_list(rows).to_parquet(source)
    train, _ = await build(
        CrosswordDatasetBuilder(source=source, num_test=0, problems_per_generation=1), TOKENIZER
    )
    assert [b.tags for b in train.builders] == [(), (), ("deletion",)]
    env = train.builders[0].make_env()
    assert isinstance(env, ProblemEnv)
    grade = await env.graded("<think>so</think><answer>ice-cream</answer>")
    assert (grade.reward, grade.metrics) == (1, {"correct": 1, "fits": 1, "format": 1})
    grade = await env.graded("<answer>cream</answer>")
    assert (grade.reward, grade.metrics) == (0, {"correct": 0, "fits": 0, "format": 0})


def test_a_prompt_ends_in_the_enumeration_once() -> None:
    assert question("Cold (3,5)", "(3,5)", "words").startswith(
        "Solve this cryptic crossword clue: Cold (3,5)\n"
    )
    shown = [question("Cold", given, "compact") for given in ("(3,5)", None)]
    assert shown == ["Cold (3,5)\n", "Cold\n"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"answer": "owl"}, "field 'clue' is missing; the row has: answer"),
        ({"clue": "x", "anwser": "owl"}, "field 'answer' is missing; did you mean 'anwser'?"),
        ({"clue": "x", "answer": "42"}, "field 'answer' must have letters, found '42'"),
        (
            {"clue": "x (2,4)", "answer": "owl"},
            "its answer has 3 letters, its enumeration (2,4) asks for 6",
        ),
        (
            {"clue": "x", "answer": "owl", "enumeration": "three"},
            "field 'enumeration' must be such as '(3,4)', found 'three'",
        ),
    ],
)
async def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    given = CrosswordDatasetBuilder, TOKENIZER, tmp_path / "clues.jsonl"
    await check_second_row_is_named(*given, [ROWS[0], row], sentence)


async def test_an_answer_in_both_sources_is_refused(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "train.jsonl", ROWS)
    test_source = write_rows(tmp_path / "test.jsonl", [{"clue": "Night bird", "answer": "OWL"}])
    sources = {"source": source, "test_source": test_source}
    with pytest.raises(DataError, match=r"train.jsonl, line 3: this problem is also held out"):
        await CrosswordDatasetBuilder(**sources, problems_per_generation=1)(TOKENIZER)


async def test_a_prompt_that_ends_in_think_changes_what_is_expected() -> None:
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    built = await CrosswordDatasetBuilder(prompt="words", num_train=40, num_test=2)(tokenizer)
    (first, *_) = built.test_P
    assert isinstance(first, ProblemGroupBuilder)
    env = first.make_env()
    assert isinstance(env, ProblemEnv)
    assert (await env.graded(f"so</think>{first.gold}")).metrics["format"] == 1


def test_answers_follow_from_the_clue_and_misreadings_differ() -> None:
    for made in islice(generate_clues(3), 80):
        words = made.clue.split()
        if made.kind == "initials":
            assert made.answer == "".join(word[0] for word in words[2:])
        elif made.kind == "reversal":
            assert made.answer[::-1] == words[1]
        elif made.kind == "hidden":
            outside = (len(words[2]) - len(made.answer)) // 2
            assert made.answer == words[2][outside:-outside]
        else:
            assert made.answer == words[3][::2]
        assert len(made.answer) == len(made.careless) and made.answer != made.careless


def test_demonstrations_have_the_form_fit_the_budget_and_are_often_wrong() -> None:
    rng = random.Random(0)
    correct: list[float] = []
    for made in islice(generate_clues(0), 400):
        text = warm_start.demonstrate(made, rng)
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
        assert len(TOKENIZER.encode(text + EOS)) <= CLIConfig().sampling.max_tokens
        row = {"answer": made.answer, "enumeration": made.enumeration}
        metrics = Crossword()(text, row)[1]
        assert (metrics["format"], metrics["fits"]) == (1, 1)
        correct.append(metrics["correct"])
    assert 0.35 < sum(correct) / len(correct) < 0.65
