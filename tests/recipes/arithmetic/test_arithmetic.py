"""Additions: splits, what an answer earns, demonstrations, and the bundled model."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.arithmetic import dataset
from es_cookbook.rl.types import Observation
from tools.small_model import build_tokenizer


def grade(text: str, *terms: int, words: bool = False) -> tuple[float, dict[str, float]]:
    env = dataset.ArithmeticEnv(Observation(()), terms, "words" if words else "compact")
    graded = env.grade(text)
    return graded.reward, dict(graded.metrics)


def carries_forgotten(terms: tuple[int, int], forgotten: tuple[bool, ...]) -> str:
    """Add by hand, and forget the carry out of some columns."""
    digits, carry = "", 0
    for place, forget in enumerate(forgotten):
        value = sum(term // 10**place % 10 for term in terms) + carry
        digits += str(value % 10)
        carry = 0 if forget else value // 10
    return digits + (str(carry) if carry else "")


@settings(max_examples=40)
@given(st.integers(100, 999), st.integers(100, 999), st.integers(0, 19999))
def test_a_forgotten_carry_is_recognised_and_nothing_else_is(
    first: int, second: int, other: int
) -> None:
    terms = first, second
    wrong = {carries_forgotten(terms, each) for each in product([False, True], repeat=3)}
    wrong.discard(dataset.ones_first(first + second))
    assert all(dataset.forgot_a_carry(terms, answer) for answer in wrong)
    assert dataset.forgot_a_carry(terms, str(other)) == (str(other) in wrong)


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("236", 1.0, (1, 1, 1, 0)),
        ("226", 1 / 3, (0, 2 / 3, 1, 1)),
        ("2", 1 / 6, (0, 1 / 3, 1, 0)),
        ("2361", 3 / 8, (0, 3 / 4, 1, 0)),
        ("23611", 0.0, (0, 0, 0, 0)),
        (" 236\n", 1.0, (1, 1, 1, 0)),
        ("٢٣٦", 0.0, (0, 0, 0, 0)),
        ("", 0.0, (0, 0, 0, 0)),
    ],
)
def test_what_a_compact_answer_earns(
    text: str, reward: float, metrics: tuple[float, float, float, float]
) -> None:
    earned, found = grade(text, 347, 285)
    assert earned == pytest.approx(reward)
    names = ("correct", "digits", "well_formed", "forgot_carry")
    assert found == pytest.approx(dict(zip(names, metrics, strict=True)))


@pytest.mark.parametrize(
    ("text", "correct", "well_formed"),
    [
        ("632", 1, 1),
        ("It is 632.", 1, 0),
        ("236", 0, 1),
        ("-632", 0, 0),
        ("632.5", 0, 0),
        ("9" * 1_000_000, 0, 0),
    ],
)
def test_what_an_answer_in_words_earns(text: str, correct: float, well_formed: float) -> None:
    _, metrics = grade(text, 347, 285, words=True)
    assert (metrics["correct"], metrics["well_formed"]) == (correct, well_formed)


async def test_a_tokenizer_that_knows_no_character_is_refused() -> None:
    with pytest.raises(DataError, match=r"generated problem \d+\+\d+=: .*no tokens"):
        await dataset.ArithmeticDatasetBuilder(num_train=40)(build_tokenizer("xyz"))
