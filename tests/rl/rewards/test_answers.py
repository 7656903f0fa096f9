"""Where an answer stands in a text, and which answers a row accepts."""

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.rl.rewards.answers import Extract, boxed, extracted, texts_of


@pytest.mark.parametrize(
    ("text", "extract", "answer"),
    [
        ("<answer>1</answer> or <answer> 2 </answer>", "auto", "2"),
        (r"<answer>1</answer> \boxed{2}", "auto", "1"),
        (r"<answer>1</answer> \boxed{2}", "boxed", "2"),
        (r"\boxed{1} \boxed{2}", "auto", "2"),
        (r"\boxed{1", "auto", None),
        ("plain", "answer", None),
        ("<answer>1</answer>", "text", "<answer>1</answer>"),
    ],
)
def test_the_last_one_counts(text: str, extract: Extract, answer: str | None) -> None:
    assert extracted(text, extract) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed 5", None),
        (r"\boxed", None),
    ],
)
def test_braces_are_balanced(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize("value", ["", [], [""], True, {"a": 1}, [["a"]], [None]])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(DataError, match=r"field 'answer' must be a text, a number or a list of th"):
        texts_of({"answer": value}, "answer")
