"""Rows in the formats of public sets, as thoughts are asked about them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from es_cookbook.baselines.small_model import build_tokenizer
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.recipes.markovian.env import MarkovianProblem
from es_cookbook.recipes.markovian.problems import Problem
from es_cookbook.recipes.markovian.rows import read_problem
from es_cookbook.rl.data.rows import Row

pytestmark = pytest.mark.anyio

TOKENIZER = build_tokenizer(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789ĠĊ.,?+=#-"
)
GSM8K = {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7\n#### 1,007"}
MMLU = {
    "question": "Which is a metal?",
    "subject": "High_school chemistry",
    "choices": ["air", "iron", "wood", "ice"],
    "answer": 1,
}
ARC = {
    "id": "a1",
    "question": "Which is a metal?",
    "choices": {"text": ["air", "iron", "wood"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
SVAMP = {
    "ID": "chal-1",
    "Body": "There are 87 oranges in 10 groups.",
    "Question": "How many in two?",
    "Equation": "( 87.0 / 10.0 )",
    "Answer": "145.0",
    "Type": "Common-Division",
}
WIKIPEDIA = {
    "id": "1",
    "url": "x",
    "title": "Iron",
    "text": "iron is a metal. it rusts in air and more",
}


def read(fields: Mapping[str, object]) -> Problem:
    row = Row("rows.jsonl, line 1", fields)
    return read_problem(row, TOKENIZER, (16, 9))


@pytest.mark.parametrize(
    ("fields", "question", "answer", "thought", "tags"),
    [
        (GSM8K, GSM8K["question"], "1007", "3+4=<<3+4=7>>7", ()),
        (
            MMLU,
            "Which is a metal?\nA. air\nB. iron\nC. wood\nD. ice",
            "B",
            None,
            ("high_school chemistry",),
        ),
        (ARC, "Which is a metal?\nA. air\nB. iron\nC. wood", "B", None, ()),
        (
            SVAMP,
            "There are 87 oranges in 10 groups. How many in two?",
            "145",
            "( 87.0 / 10.0 )",
            ("common-division",),
        ),
        (WIKIPEDIA, "iron is a metal.", "it rusts", None, ()),
        ({"question": "1+1", "answer": 2, "thought": "2"}, "1+1", "2", "2", ()),
        ({"problem": "1+1", "solution": r"it is \boxed{2}"}, "1+1", "2", r"it is \boxed{2}", ()),
        ({**GSM8K, "thought": "seven"}, GSM8K["question"], "1007", "seven", ()),
    ],
)
def test_a_row_is_known_by_its_columns(
    fields: Mapping[str, object],
    question: str,
    answer: str,
    thought: str | None,
    tags: tuple[str, ...],
) -> None:
    found = read(fields)
    assert (found.question, found.answer, found.thought, found.tags) == (
        question,
        answer,
        thought,
        tags,
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"question": "1+1"}, r"a row has question and answer .* found: question"),
        ({}, "found: nothing"),
        ({"question": "1+1", "answer": ""}, "'answer' must be one answer"),
        ({"question": "1+1", "answer": "  "}, "the answer is empty"),
        ({"question": " ", "answer": "1"}, "the question is empty"),
        ({"question": "1+1", "answer": "2 ####"}, "the answer is empty"),
        ({"question": "1+1", "answer": [1, 2]}, "'answer' must be one answer"),
        ({**MMLU, "answer": 4}, "must be one of the choices, 2 to 10, found number 4 of 4"),
        ({**MMLU, "answer": -1}, "found number -1 of 4"),
        ({**MMLU, "answer": True}, "'answer' must be a whole number"),
        ({**MMLU, "choices": ["one"]}, "'choices' must have two or more texts"),
        ({**MMLU, "choices": "air"}, "'choices' must have two or more texts"),
        ({**ARC, "answerKey": "4"}, "answerKey be one of them, found labels 1, 2, 3 and answerKey"),
        ({**ARC, "choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "all different"),
        ({**ARC, "choices": {"text": ["a", "b"]}}, "two or more texts"),
        ({**SVAMP, "Answer": None}, "a row has question and answer"),
        ({"text": "short"}, r"'text' has 5 tokens, and context_tokens=16 and .*=9 need 25"),
        ({"question": "1", "answer": 1, "thought": 7}, "'thought' must be text"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_its_place(
    fields: Mapping[str, object], sentence: str
) -> None:
    with pytest.raises(DataError, match=r"^rows.jsonl, line 1: .*" + sentence):
        read(fields)


async def test_files_of_several_formats_make_a_data_set_with_its_held_out_rows(
    tmp_path: Path,
) -> None:
    import datasets

    source, held_out = tmp_path / "rows.jsonl", tmp_path / "test.parquet"
    source.write_text("".join(json.dumps(row) + "\n" for row in (GSM8K, ARC, SVAMP, WIKIPEDIA)))
    datasets.Dataset.from_list([MMLU]).to_parquet(str(held_out))
    builder = MarkovianDatasetBuilder(
        source=str(source),
        test_source=str(held_out),
        problems_per_generation=4,
        context_tokens=16,
        continuation_tokens=9,
    )
    builder.check()
    built = await builder(TOKENIZER)
    await built.train.validate(256)
    (test,) = built.test_P
    assert isinstance(test, MarkovianProblem)
    assert (len(built.train), test.asked.gold, test.tags) == (4, "B", ("high_school chemistry",))
    assert test.name.endswith("test.parquet, row 1")
    with pytest.raises(DataError, match=r"this problem is also held out"):
        both = MarkovianDatasetBuilder(
            source=str(source),
            test_source=str(source),
            problems_per_generation=1,
            context_tokens=16,
            continuation_tokens=9,
        )
        await both(TOKENIZER)


def test_questions_that_differ_in_blanks_are_in_one_split() -> None:
    splits = {Problem(question, "1").fold for question in ("1 +  1", "1 + 1", " 1 + 1\n")}
    assert len(splits) == 1
