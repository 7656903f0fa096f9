"""Rows in the formats of public sets; which answers are right; what leaks, and what damage is."""

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.common.errors import DataError
from es_cookbook.plugins.markovian import env
from es_cookbook.plugins.markovian.dataset import MarkovianDatasetBuilder
from es_cookbook.plugins.markovian.measuring import DAMAGES, SHARES, Damage, damaged
from es_cookbook.plugins.markovian.problems import Problem, read_problem
from es_cookbook.rl.data.rows import Row
from tools.small_model import build_tokenizer

THOUGHT = "3+5=8, then 8+9=17, so 19."


@pytest.mark.parametrize(
    ("text", "gold", "extraction", "answer"),
    [
        ("<answer>7</answer> <answer> 8 </answer>", "8", "tag", "8"),
        ("Answer: 5\nso Answer:  7 apples\n8", "7", "anchor", "7 apples"),
        ("3+4=7=7", "7", "anchor", "7"),
        ("x is 1,234 or 5", "1234", "integer", "1234"),
        ("", "7", "integer", None),
        ("7 because 3+4", "7", "auto", "7"),
        ("0 because 3-3", "0", "auto", "0"),
        ("Paris\nFrance", "Paris", "auto", "Paris"),
    ],
)
def test_an_answer_is_found_where_it_stands(
    text: str, gold: str, extraction: env.Extraction, answer: str | None
) -> None:
    assert env.given_answer(text, gold, extraction) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("19", "19", True),
        ("19.0", "19", True),
        ("19 apples", "19", False),
        ("(B) iron", "B", True),
        ("A or B", "B", False),
        (" paris. ", "Paris", True),
        ("9" * 100_000, "9", False),
        ("١٩", "19", False),
    ],
)
def test_right_is_the_same_number_or_text(answer: str | None, gold: str, right: bool) -> None:
    assert env.is_right(answer, gold) is right


@pytest.mark.parametrize(
    ("thought", "gold", "leaked"),
    [
        ("8,17,19", "19", True),
        ("8,17,190", "19", False),
        ("19" * 50_000, "19", False),
        ("it is PARIS!", "Paris", True),
        ("(a|b)*", "(a|b)*", True),
    ],
)
def test_a_thought_leaks_that_has_the_answer_in_it(thought: str, gold: str, leaked: bool) -> None:
    assert env.leaks(thought, gold) is leaked


@pytest.mark.parametrize("extraction", ["auto", "tag", "anchor", "integer"])
def test_long_texts_take_linear_time(extraction: env.Extraction) -> None:
    for text in ("9" * 1_000_000, "=" * 1_000_000, "<answer>" * 100_000, "-,1" * 300_000):
        began = time.process_time()
        env.is_right(env.given_answer(text, "19", extraction), "19")
        assert time.process_time() - began < 5


def test_each_damage_does_what_it_says() -> None:
    assert damaged("abcdefghij", "truncate_front", 0.4, 0) == "efghij"
    assert damaged("abcdefghij", "truncate_back", 0.4, 0) == "abcdef"
    deleted = damaged("abcdefghij", "delete", 0.4, 0)
    assert len(deleted) == 6 and list(deleted) == sorted(deleted), "the others stay in order"
    digits = damaged(THOUGHT, "digits", 1.0, 0)
    pairs = list(zip(THOUGHT, digits, strict=True))
    assert all(b.isdigit() and a != b for a, b in pairs if a.isdigit())
    assert all(a == b for a, b in pairs if not a.isdigit())
    letters = damaged(THOUGHT, "alphanumerics", 1.0, 0)
    pairs = list(zip(THOUGHT, letters, strict=True))
    assert all(b.isalnum() and a != b for a, b in pairs if a.isalnum())
    assert all(a == b for a, b in pairs if not a.isalnum())


@settings(max_examples=50)
@given(st.text(max_size=40), st.sampled_from(DAMAGES), st.integers(0, 9))
def test_a_larger_share_damages_more_and_none_nothing(
    thought: str, damage: Damage, seed: int
) -> None:
    found = [damaged(thought, damage, share, seed) for share in SHARES]
    assert found[0] == thought
    if damage in ("delete", "truncate_front", "truncate_back"):
        lengths = [len(each) for each in found]
        assert lengths == sorted(lengths, reverse=True) and found[-1] == ""
    else:
        changed = [
            {i for i, (a, b) in enumerate(zip(thought, each, strict=True)) if a != b}
            for each in found
        ]
        assert all(less <= more for less, more in pairwise(changed))
    assert found == [damaged(thought, damage, share, seed) for share in SHARES]


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
        ({"question": "1+1", "answer": ""}, "'answer' must be one answer"),
        ({"question": " ", "answer": "1"}, "the question is empty"),
        ({**MMLU, "answer": 4}, "'choices' must be 2 to 10 texts, or text and label, .* and 4"),
        ({**MMLU, "choices": ["one"]}, "'choices' must be 2 to 10 texts"),
        ({**ARC, "answerKey": "4"}, "answerKey .* names, found .* and '4'"),
        ({**ARC, "choices": {"text": ["a", "b"], "label": ["A", "A"]}}, "'choices' must be"),
        ({"text": "short"}, r"'text' has 5 tokens, and context_tokens=16 and .*=9 need 25"),
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
    assert isinstance(test, env.MarkovianProblem)
    assert (len(built.train), test.tokenized.gold, test.tags) == (
        4,
        "B",
        ("high_school chemistry",),
    )
    assert test.name.endswith("test.parquet, row 1")
