"""The recipe alignment: its pairs, its command line, and what a preference weight does in a run."""

import json
from pathlib import Path

from es_cookbook.recipes.alignment.train_cli import PAIRS
from es_cookbook.recipes.conciseness.train_cli import PROMPT, QUESTIONS
from tests.recipe_problems import APART, short_run


def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


def test_no_pair_is_about_a_question_of_the_task() -> None:
    asked = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    task = {PROMPT.format(**row) for row in asked}
    assert len(rows()) == 1000
    assert task.isdisjoint(row["prompt"] for row in rows())


def steps(tmp_path: Path, weight: float) -> tuple[bytes, list[dict[str, float]]]:
    run = tmp_path / f"{weight}"
    pairs = f"preference.weight={weight}", "preference.problems_per_generation=3"
    metrics = short_run("alignment", run, *APART, *pairs)
    return (run / "history.jsonl").read_bytes(), metrics


def test_a_run_of_two_generations_is_moved_by_the_pairs_and_by_weight_0_is_not(
    tmp_path: Path,
) -> None:
    moved, metrics = steps(tmp_path, 50)
    assert {"env/preference/margin", "env/preference/preferred"} <= metrics[0].keys()
    assert {"test/env/all/excess", "test/env/all/correct"} <= metrics[-1].keys()
    plain, measured = steps(tmp_path, 0)
    assert plain != moved
    assert measured[0]["env/preference/margin"] == metrics[0]["env/preference/margin"]
