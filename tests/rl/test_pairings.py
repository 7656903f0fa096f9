"""Pairings: who meets whom, how often, and whom never twice."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.rl.pairings import PlayerPair, ring, round_robin, swiss


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


def test_a_ring_is_drawn_by_its_seed() -> None:
    assert ring(32, 4, 1) == ring(32, 4, 1) != ring(32, 4, 2)


@pytest.mark.parametrize(("n", "count"), [(0, 0), (1, 0), (2, 1), (7, 21)])
def test_all_meet_all(n: int, count: int) -> None:
    assert len(set(round_robin(n))) == count


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=17), st.integers(0, 5))
def test_a_swiss_round_pairs_all_but_one_of_an_odd_number(scores: list[float], seed: int) -> None:
    pairs = swiss(scores, (), seed)
    assert len(pairs) == len(scores) // 2
    assert set(times(pairs).values()) <= {1}


def test_swiss_pairs_those_who_have_done_as_well_and_have_not_met() -> None:
    scores = [3.0, 3.0, 2.0, 2.0, 0.0, 0.0]
    assert swiss(scores, (), 0) == [(0, 1), (2, 3), (4, 5)]
    again = swiss(scores, {(0, 1), (2, 3), (4, 5)}, 0)
    assert not {(0, 1), (2, 3)} & set(again)
    assert swiss([1.0, 0.0], {(0, 1)}, 0) == [(0, 1)], "again, where nobody else is left"


def test_who_sat_out_does_not_sit_out_again() -> None:
    met: set[PlayerPair] = set()
    sat_out: list[int] = []
    for turn in range(5):
        pairs = swiss([0.0] * 5, met, turn)
        sat_out += set(range(5)) - times(pairs).keys()
        met |= set(pairs)
    assert len(set(sat_out[:3])) == 3


def test_rounds_of_swiss_find_the_order_with_few_pairs() -> None:
    n = 32
    scores, met = [0.0] * n, set[PlayerPair]()
    for turn in range(5):
        pairs = swiss(scores, met, turn)
        met |= set(pairs)
        for i, j in pairs:
            scores[max(i, j)] += 1
    assert max(range(n), key=lambda player: scores[player]) == n - 1
    assert scores[0] == 0.0
    assert len(met) == 5 * n / 2
