"""Tournaments among answers, with judges of which it is known what they prefer."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.common.errors import EnvError
from es_cookbook.plugins.judges.tournament import Compare, PlayerPair, Tournament, ring

NUMBERS = [str(number) for number in range(20)]


class Judge:
    """Prefers the larger number, and the first place by `bias`."""

    def __init__(self, bias: float = 0.0, speechless: str = "") -> None:
        self.bias, self.speechless = bias, speechless
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, first: str, second: str) -> float:
        self.asked.append((first, second))
        if self.speechless in (first, second):
            raise EnvError("no verdict")
        return min(0.5 + 0.2 * (int(first) > int(second)) - 0.1 + self.bias, 1.0)


async def rates(
    answers: list[str], judge: Compare, against: str | None = None, **options: object
) -> list[float]:
    found, _ = await Tournament(**options).win_rates(answers, judge, 0, against)  # pyright: ignore[reportArgumentType]
    return found


async def test_all_meet_all_in_both_orders_and_the_win_rate_is_the_mean() -> None:
    async def table(first: str, second: str) -> float:
        return {"ab": 0.9, "ba": 0.3, "ac": 1.0, "ca": 0.0, "bc": 0.5, "cb": 0.5}[first + second]

    found, tally = await Tournament(opponents=99).win_rates(["a", "b", "c"], table, 0)
    assert found == pytest.approx([(0.8 + 1) / 2, (0.2 + 0.5) / 2, (0 + 0.5) / 2])
    assert tally.metrics == {
        "judgements": 6.0,
        "lost_judgements": 0.0,
        "first_wins": pytest.approx(3 / 6),  # ab, ac and two halves
        "swap_changes": 0.0,
    }


async def test_a_preference_for_the_first_place_cancels_and_is_measured() -> None:
    biased = Judge(bias=0.3)
    found, tally = await Tournament(opponents=99).win_rates(["1", "2"], biased, 0)
    assert found == pytest.approx([0.4, 0.6])
    assert tally.metrics["first_wins"] == tally.metrics["swap_changes"] == 1.0


@pytest.mark.parametrize(("opponents", "judgements"), [(4, 20 * 4), (99, 20 * 19)])
async def test_a_ring_judges_each_pair_once_in_each_order(opponents: int, judgements: int) -> None:
    judge = Judge()
    found, tally = await Tournament(opponents=opponents).win_rates(NUMBERS, judge, 0)
    assert len(judge.asked) == len(set(judge.asked)) == tally.metrics["judgements"] == judgements
    assert (found[0], found[19]) == pytest.approx((0.4, 0.6)), "against any opponents"


async def test_against_one_answer_each_is_asked_once_in_each_order() -> None:
    judge = Judge()
    assert await rates(["1", "5", "3", "5"], judge, against="3") == pytest.approx(
        [0.4, 0.6, 0.5, 0.6]
    )
    assert len(judge.asked) == 4
    assert await rates(["3"], judge, against="3") == [0.5]
    assert len(judge.asked) == 4, "the same text is not asked about"


async def test_the_same_text_is_one_player_and_counts_as_often_as_it_stands_there() -> None:
    judge = Judge()
    found = await rates(["1", "2", "2", "2"], judge)
    assert len(judge.asked) == 2
    assert found == pytest.approx([0.4, *[(0.6 + 2 * 0.5) / 3] * 3])
    assert await rates(["7"] * 5, judge) == [0.5] * 5
    assert len(judge.asked) == 2


async def test_an_answer_without_a_judgement_has_no_win_rate_and_the_others_keep_theirs() -> None:
    judge = Judge(speechless="2")
    found, tally = await Tournament(opponents=99).win_rates(["1", "2", "3", "2"], judge, 0)
    assert math.isnan(found[1]) and math.isnan(found[3])
    assert [found[0], found[2]] == pytest.approx([0.4, 0.6])
    assert tally.metrics["lost_judgements"] == pytest.approx(4 / 6)
    assert tally.lost[0] == "no verdict"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(NUMBERS[:9]), min_size=2, max_size=12),
    st.sampled_from([2, 99]),
    st.floats(-0.3, 0.3),
)
async def test_whatever_the_bias_equal_answers_rank_equal(
    answers: list[str], opponents: int, bias: float
) -> None:
    found = await rates(answers, Judge(bias), opponents=opponents)
    plain = await rates(answers, Judge(), opponents=opponents)
    assert found == pytest.approx(plain)
    assert all(0 <= rate <= 1 for rate in found)
    by_text = dict(zip(answers, found, strict=True))
    assert found == [by_text[text] for text in answers]


def times(pairs: list[PlayerPair]) -> Counter[int]:
    return Counter(player for pair in pairs for player in pair)


def is_linked(n: int, pairs: list[PlayerPair]) -> bool:
    reached = {0}
    for _ in range(n):
        reached |= {player for pair in pairs if reached & set(pair) for player in pair}
    return len(reached) == n


@settings(max_examples=60)
@given(st.integers(0, 24), st.integers(1, 30), st.integers(0, 5))
def test_on_a_ring_each_meets_as_many_others_once_each(n: int, k: int, seed: int) -> None:
    pairs = ring(n, k, seed)
    assert len(set(pairs)) == len(pairs)
    assert all(0 <= i < j < n for i, j in pairs)
    wanted = min(k, max(n - 1, 0))
    met = times(pairs)
    assert sum(met[player] != wanted for player in range(n)) == (wanted % 2 and n % 2)
    if n > 1 and k > 1:
        assert is_linked(n, pairs)
