"""The recipe crossword: its clues, rows of public sets, a run, and the model to begin with."""

from pathlib import Path

import datasets

from es_cookbook.recipes.crossword.dataset import CrosswordDatasetBuilder
from es_cookbook.rl.problem_env import ProblemEnv
from tests.recipe_problems import build
from tools.bundled import crossword as warm_start
from tools.small_model import build_tokenizer

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
