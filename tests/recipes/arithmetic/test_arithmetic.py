"""Additions: splits, what an answer earns, demonstrations, and the bundled model."""

import random
from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.recipes.arithmetic.dataset import (
    ArithmeticDatasetBuilder,
    ArithmeticEnv,
    Problem,
    forgot_a_carry,
    generate_problems,
    gold_answer,
    ones_first,
    right_digits,
    without_carries,
)
from es_cookbook.recipes.arithmetic.train_cli import CLIConfig
from es_cookbook.rl.types import Observation
from tools.bundled import arithmetic as warm_start
from tools.small_model import build_tokenizer
from tools.warm_start import measured


def grade(text: str, *terms: int, words: bool = False) -> tuple[float, dict[str, float]]:
    env = ArithmeticEnv(Observation(()), terms, "words" if words else "compact")
    graded = env.grade(text)
    return graded.reward, dict(graded.metrics)


def test_the_stream_is_seeded_and_distinct_and_a_fold_knows_no_order() -> None:
    first, again = (list(islice(generate_problems(3, "train"), 200)) for _ in range(2))
    assert first == again
    assert len(set(first)) == 200
    assert Problem((347, 285)).fold == Problem((285, 347)).fold


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
    wrong.discard(ones_first(first + second))
    assert all(forgot_a_carry(terms, answer) for answer in wrong)
    assert forgot_a_carry(terms, str(other)) == (str(other) in wrong)


def test_somebody_who_never_carries_forgot_one_unless_there_was_none() -> None:
    assert without_carries((347, 285)) == "225"
    assert forgot_a_carry((347, 285), "225")
    assert not forgot_a_carry((111, 222), without_carries((111, 222)))


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("236", 1.0, (1, 1, 1, 0)),
        (" 236\n", 1.0, (1, 1, 1, 0)),
        ("226", 1 / 3, (0, 2 / 3, 1, 1)),
        ("2", 1 / 6, (0, 1 / 3, 1, 0)),
        ("2361", 3 / 8, (0, 3 / 4, 1, 0)),
        ("23611", 0.0, (0, 0, 0, 0)),
        ("236 ", 1.0, (1, 1, 1, 0)),
        ("2+36", 0.0, (0, 0, 0, 0)),
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
        ("347 + 285 = 632", 1, 0),
        ("236", 0, 1),
        ("-632", 0, 0),
        ("632.5", 0, 0),
        ("9" * 1_000_000, 0, 0),
        ("none", 0, 0),
    ],
)
def test_what_an_answer_in_words_earns(text: str, correct: float, well_formed: float) -> None:
    _, metrics = grade(text, 347, 285, words=True)
    assert (metrics["correct"], metrics["well_formed"]) == (correct, well_formed)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=5), st.text())
def test_gold_answers_earn_everything_and_no_text_raises(terms: list[int], text: str) -> None:
    env = ArithmeticEnv(Observation(()), tuple(terms))
    assert env.grade(gold_answer(terms, "compact")).reward == 1.0
    assert 0.0 <= env.grade(text).reward <= 1.0
    assert grade(gold_answer(terms, "words"), *terms, words=True)[0] == 1.0


def test_right_digits_are_counted_from_the_ones() -> None:
    assert right_digits("123", "923") == pytest.approx(2 / 3)
    assert right_digits("23", "123") == 0


@pytest.mark.anyio
async def test_a_tokenizer_that_knows_no_character_is_refused() -> None:
    with pytest.raises(DataError, match=r"generated problem \d+\+\d+=: .*no tokens"):
        await ArithmeticDatasetBuilder(num_train=40)(build_tokenizer("xyz"))


@pytest.mark.parametrize("option", ["num_terms=1", "num_digits=0", "num_digits=31", "num_train=0"])
def test_fields_that_cannot_work_are_named(option: str) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=name):
        ArithmeticDatasetBuilder(**{name: int(value)})  # pyright: ignore[reportArgumentType]


def test_careless_demonstrations_forget_more_often_in_large_sums() -> None:
    rng = random.Random(0)

    def share(*terms: int, careless: float = 0.5) -> float:
        forgot = [warm_start.forgets_to_carry(Problem(terms), careless, rng) for _ in range(600)]
        return sum(forgot) / len(forgot)

    assert share(110, 120) < 0.4 < 0.6 < share(980, 970)
    assert (share(980, 970, careless=0), share(110, 120, careless=1)) == (0, 1)
    every = list(islice(generate_problems(0, "train"), 2000))
    forgot = [warm_start.forgets_to_carry(problem, 0.5, rng) for problem in every]
    assert sum(forgot) / 2000 == pytest.approx(0.5, abs=0.04)


def test_the_bundled_model_answers_in_good_form_and_half_of_it_is_right() -> None:
    """The point of the warm start; the README's numbers come from the command it names."""
    tokenizer = build_tokenizer(warm_start.CHARACTERS)
    model = AutoModelForCausalLM.from_pretrained(CLIConfig().model_name)
    found = measured(CLIConfig(), model, tokenizer, samples=2, num_test=100)
    assert found["well_formed"] >= 0.98
    assert 0.3 < found["correct"] < 0.6
    assert found["forgot_carry"] > 0.3
    assert found["sampled_correct"] < found["pass_at_2"] <= 2 * found["sampled_correct"]
