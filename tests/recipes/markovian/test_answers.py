"""Which answers are found and right, what leaks, and how thoughts are damaged."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.recipes.markovian.answers import Extraction, given_answer, is_right, leaks
from es_cookbook.recipes.markovian.measuring import DAMAGES, SHARES, Damage, damaged

THOUGHT = "3+5=8, then 8+9=17, so 19."


@pytest.mark.parametrize(
    ("text", "gold", "extraction", "answer"),
    [
        ("<answer>7</answer> <answer> 8 </answer>", "8", "tag", "8"),
        ("7", "7", "tag", None),
        ("Answer: 5\nso Answer:  7 apples\n8", "7", "anchor", "7 apples"),
        ("ANSWER: 7", "7", "anchor", "7"),
        ("3+4=7=7", "7", "anchor", "7"),
        ("seven", "7", "anchor", None),
        ("x is 1,234 or 5", "1234", "integer", "1234"),
        ("-7 and 8", "-7", "integer", "-7"),
        ("seven", "7", "integer", None),
        ("", "7", "integer", None),
        ("= 7", "7", "auto", "7"),
        ("7 because 3+4", "7", "auto", "7"),
        ("Paris\nFrance", "Paris", "auto", "Paris"),
        ("", "Paris", "auto", ""),
    ],
)
def test_an_answer_is_found_where_it_stands(
    text: str, gold: str, extraction: Extraction, answer: str | None
) -> None:
    assert given_answer(text, gold, extraction) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("19", "19", True),
        (" 19. ", "19", True),
        ("19.0", "19", True),
        ("1,019", "1019", True),
        ("$19", "19", True),
        ("019", "19", True),
        ("190", "19", False),
        ("19 apples", "19", False),
        ("", "19", False),
        (None, "19", False),
        ("B", "B", True),
        ("(B) iron", "B", True),
        ("A or B", "B", False),
        ("Because", "B", False),
        ("b", "B", False),
        (" paris. ", "Paris", True),
        ("Paris, France", "Paris", False),
        ("9" * 100_000, "9", False),
        ("١٩", "19", False),
    ],
)
def test_right_is_the_same_number_letter_or_text(
    answer: str | None, gold: str, right: bool
) -> None:
    assert is_right(answer, gold) is right


@pytest.mark.parametrize(
    ("thought", "gold", "leaked"),
    [
        ("8,17,19", "19", True),
        ("8,17,190", "19", False),
        ("119", "19", False),
        ("", "19", False),
        ("19" * 50_000, "19", False),
        ("it is PARIS!", "Paris", True),
        ("(a|b)*", "(a|b)*", True),
    ],
)
def test_a_thought_leaks_that_has_the_answer_in_it(thought: str, gold: str, leaked: bool) -> None:
    assert leaks(thought, gold) is leaked


@pytest.mark.parametrize("extraction", ["auto", "tag", "anchor", "integer"])
def test_a_megabyte_costs_milliseconds(extraction: Extraction) -> None:
    for text in ("9" * 1_000_000, "=" * 1_000_000, "<answer>" * 100_000, "-,1" * 300_000):
        began = time.process_time()
        is_right(given_answer(text, "19", extraction), "19")
        assert time.process_time() - began < 0.5


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
