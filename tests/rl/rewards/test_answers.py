"""Where an answer stands in a text, and which answers a row accepts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import DataError
from es_cookbook.rl.rewards.answers import LONGEST_BOX, Extract, boxed, extracted, texts_of


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        ("<answer>1</answer> or <answer> 2 </answer>", "auto", "2"),
        ("<answer>1</answer> or <answer>2", "auto", None),
        (r"<answer>1</answer> \boxed{2}", "auto", "1"),
        (r"<answer>1</answer> \boxed{2}", "boxed", "2"),
        (r"\boxed{1} \boxed{2}", "auto", "2"),
        (r"\boxed{1", "auto", None),
        (" plain ", "auto", "plain"),
        ("plain", "answer", None),
        ("plain", "boxed", None),
        ("<answer>1</answer>", "text", "<answer>1</answer>"),
        ("", "auto", ""),
    ],
)
def test_the_last_one_counts(text: str, extract: Extract, answer: str | None) -> None:
    assert extracted(text, extract) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed {\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        (r"\boxed{{1}", None),
        (r"\boxed", None),
        ("boxed{1}", None),
    ],
)
def test_braces_are_balanced(text: str, content: str | None) -> None:
    assert boxed(text) == content


def test_a_box_that_is_not_closed_soon_is_none() -> None:
    assert boxed(r"\boxed{" + "1" * (LONGEST_BOX - 2) + "}") is not None
    assert boxed(r"\boxed{" + "1" * LONGEST_BOX + "}") is None


@given(st.recursive(st.text("ab \\n", max_size=3), lambda inner: inner.map(lambda s: f"{{{s}}}")))
def test_what_was_boxed_comes_back(content: str) -> None:
    content = content.replace("\\", "/")
    assert boxed(rf"so \boxed{{{content}}} and }}}}") == content.strip()


@pytest.mark.parametrize(
    ("value", "texts"),
    [("a", ["a"]), (3, ["3"]), (0.5, ["0.5"]), (["a", 1], ["a", "1"]), (("a", "b"), ["a", "b"])],
)
def test_a_row_accepts_a_text_a_number_or_any_of_a_list(value: object, texts: list[str]) -> None:
    assert texts_of({"answer": value}, "answer") == texts


@pytest.mark.parametrize("value", ["", [], [""], True, {"a": 1}, [["a"]], [None]])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(DataError, match=r"field 'answer' must be a text, a number or a list of th"):
        texts_of({"answer": value}, "answer")
