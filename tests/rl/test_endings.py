"""What answers that were cut look like: some go on behind an answer, some were not done."""

import pytest

from es_cookbook.rl.endings import endings, repeats_itself, runs_on


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (" 53\n\nQ: 7 + 9\nA: 16", "63"),
        ('{"name": "Ann", "age": 7}\nSentence: Bob is', '{"name": "Bo", "age": 71}'),
        ("The capital of France is the city of Paris.\nThe capital of", "paris"),
    ],
)
def test_an_answer_with_the_next_question_behind_it_ran_on(text: str, gold: str) -> None:
    assert runs_on(text, gold)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("To find the sum we add the tens first:\n50 + 3", "63"),
        ("The sum of the two is", "63"),
        (" 63\n", "63"),
        ("\n\nQ: 7 + 9", "63"),
        ("def f():\n    return", "def f():\n    return 1"),
        (" 53\n\nQ: 7 + 9", None),
    ],
)
def test_an_answer_that_was_not_done_needs_room(text: str, gold: str | None) -> None:
    assert not runs_on(text, gold)


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("no no no no no no no no no no", True),
        ("A: 5\nA: 5\nA: 5\nA: 5\nA: 5\nA:", True),
        ("It is a long way, and it is a long way, and it is a long way, and it", True),
        ("1. Add.\n2. Carry.\n3. Add again.", False),
        ("10000000", False),
        ("", False),
    ],
)
def test_what_comes_again_and_again_at_the_end_is_a_repetition(text: str, does: bool) -> None:
    assert repeats_itself(text) is does


def test_shares_are_of_all_answers_and_none_where_none_was_cut() -> None:
    cut = [(" 5\nA: 6", "7"), ("ha ha ha ha ha ha ha ha ha ha", "7")]
    assert endings(cut, 8) == {"rollouts/ran_on": 1 / 8, "rollouts/repeated": 1 / 8}
    assert endings([], 8) == {}


def test_a_first_line_has_the_gold_answer_in_either_form_of_its_letters() -> None:
    said = "The word that you are looking for is certainly cafe\u0301, as I said.\nQ: next"
    assert runs_on(said, "caf\u00e9") and not runs_on(said, "th\u00e9")
