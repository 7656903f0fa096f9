"""Tournaments: counts, costs, forfeits, and Elo's scale."""

from collections import Counter
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.recipes.tic_tac_toe.game import (
    careful_move,
    careless_move,
    legal_moves,
    mover,
    openings,
    played,
    winner,
)
from es_cookbook.recipes.tic_tac_toe.tournament import Standing, Tournament, elo

pytestmark = pytest.mark.anyio
OPENING = "....OXX.O"
"""Two careful players go on with 1, 4, 2, 3, 8, a draw."""


class Players:
    """What players answer: each always the first, the careful, or no legal move."""

    def __init__(self, *ways: str) -> None:
        self.ways = ways
        self.asked: Counter[tuple[int, str]] = Counter()

    async def __call__(self, player: int, position: str) -> int | None:
        self.asked[player, position] += 1
        return self.move(player, position)

    def move(self, player: int, position: str) -> int | None:
        match self.ways[player]:
            case "careful":
                return careful_move(position)
            case "careless":
                return careless_move(position)
            case "last":
                return legal_moves(position)[-1]
            case "taken":
                return 1
            case _:
                return None

    def result(self, x: int, o: int, opening: str) -> float:
        """1 where X wins, played a move after the other."""
        position = opening
        while legal_moves(position):
            move = self.move(x if mover(position) == "X" else o, position)
            if move is None or move not in legal_moves(position):
                return 0.0 if mover(position) == "X" else 1.0
            position = played(position, move)
        return {"X": 1.0, "O": 0.0, None: 0.5}[winner(position)]


WAYS = st.sampled_from(["careful", "careless", "last", "taken", "mute"])


@settings(max_examples=25)
@given(st.lists(WAYS, min_size=1, max_size=7), st.sampled_from(openings(4)))
async def test_all_pairs_play_both_colours_as_one_game_after_the_other_would_go(
    ways: list[str], opening: str
) -> None:
    players = Players(*ways, "careful")
    n = len(ways)
    tournament = Tournament(opening, n, 1, players)
    await tournament.play_guests()
    await tournament.play_round_robin()
    points = [0.0] * n
    for x, o in permutations(range(n), 2):
        result = players.result(x, o, opening)
        points[x] += result
        points[o] += 1 - result
    standings = tournament.standings()
    assert [standing.points() for standing in standings] == points
    assert {standing.games for standing in standings} == {2 * (n - 1)}
    with_guest = [
        players.result(i, n, opening) + 1 - players.result(n, i, opening) for i in range(n)
    ]
    assert [standing.points() for standing in tournament.standings(True)] == with_guest
    assert set(players.asked.values()) == {1}, "each once, however many games come there"


async def test_players_who_play_alike_are_asked_no_more_than_a_game_asks() -> None:
    players = Players(*["careful"] * 20)
    tournament = Tournament(OPENING, 20, 0, players)
    await tournament.play_round_robin()
    assert [standing.asked for standing in tournament.standings()] == [5] * 20
    assert tournament.standings()[0].draws == 38
    assert len(players.asked) == 100, "for 380 games of 5 moves"
    assert tournament.moves_of(0, 1) == [1, 4, 2, 3, 8]


async def test_who_names_no_free_cell_forfeits_and_it_is_counted() -> None:
    tournament = Tournament(OPENING, 2, 0, Players("careful", "mute"))
    await tournament.play_round_robin()
    careful, mute = tournament.standings()
    assert (careful.wins, careful.games, careful.illegal) == (2, 2, 0)
    assert (mute.losses, mute.illegal, mute.asked) == (2, 2, 2)
    assert tournament.moves_of(1, 0) == [None]
    assert tournament.moves_of(0, 1) == [1, None]
    assert tournament.games_of(1, 3) == [(1, 0), (0, 1)]


async def test_swiss_plays_each_round_once_and_the_best_comes_first() -> None:
    players = Players("careful", *["careless"] * 6, "mute")
    tournament = Tournament(OPENING, 8, 0, players)
    await tournament.play_swiss(3, seed=0)
    standings = tournament.standings()
    assert {standing.games for standing in standings} == {6}
    assert standings[7].wins == 0
    met = [tuple(sorted(pair)) for i in range(8) for pair in tournament.games_of(i, 9)]
    assert Counter(Counter(met).values()) == Counter({4: 12}), "nobody twice: both see both games"
    again = Tournament(OPENING, 8, 0, players)
    await again.play_swiss(3, seed=0)
    assert again.standings() == standings


async def test_one_player_alone_plays_nobody() -> None:
    tournament = Tournament(OPENING, 1, 0, Players("careful"))
    await tournament.play_round_robin()
    assert tournament.standings() == [Standing()]


def test_what_a_draw_is_worth() -> None:
    assert Standing(wins=3, draws=4, losses=1).points() == 5
    assert Standing(wins=3, draws=4, losses=1).points(draw=0.75) == 6


@pytest.mark.parametrize(
    ("points", "games", "rating"), [(0, 0, 0), (50, 100, 0), (7600, 10000, 200), (9091, 10000, 400)]
)
def test_elo_is_the_difference_that_explains_a_score(
    points: float, games: int, rating: float
) -> None:
    assert elo(points, games) == pytest.approx(rating, abs=0.5)
    assert elo(games - points, games) == pytest.approx(-rating, abs=0.5)


def test_elo_of_who_always_wins_is_finite() -> None:
    assert 0 < elo(4, 4) < elo(40, 40) < 1000
    assert all(elo(one, 9) < elo(other, 9) for one, other in combinations(range(10), 2))
