"""The rules, perfect play, the folds of openings, and how moves are read."""

import itertools
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.recipes.tic_tac_toe import game
from tools.bundled.tic_tac_toe import careful_move, careless_move


@pytest.mark.parametrize("mark", ["X", "O"])
def test_the_perfect_player_never_loses(mark: str) -> None:
    """Whatever it chooses among its best moves, and whatever the other side does."""

    def explore(position: str) -> None:
        assert game.winner(position) in (None, mark)
        own = game.mover(position) == mark
        for cell in (
            game.best_moves(position)
            if own and game.legal_moves(position)
            else game.legal_moves(position)
        ):
            explore(game.played(position, cell))

    explore(game.EMPTY)


def test_openings_are_drawn_and_no_class_is_in_two_splits() -> None:
    by_fold = {name: game.openings(name) for name in ("train", "development", "test")}
    found = [opening for part in by_fold.values() for opening in part]
    assert sorted(found) == list(game.openings()) and len(found) == len(set(found)) == 136
    assert {game.value(opening) for opening in found} == {0}
    assert {9 - opening.count(".") for opening in found} == {4}
    classes = [{game.symmetry_class(opening) for opening in part} for part in by_fold.values()]
    assert all(not one & other for one, other in itertools.combinations(classes, 2))
    assert all(len(part) >= 20 for part in by_fold.values())


@pytest.mark.parametrize(
    ("text", "move"),
    [
        *[("5", 5), ("I take cell 7.", 7), ("1, no, 3", 3), ("", None), ("ten", None)],
        *[("0", None), ("10", None), ("-3", None), ("2.5", None), ("4.0", 4), ("cell", None)],
    ],
)
def test_a_move_is_the_last_number_of_an_answer(text: str, move: int | None) -> None:
    assert game.read_move(text) == move


class Players:
    """What players answer: each always the first, the careful, or no legal move."""

    def __init__(self, *ways: str) -> None:
        self.ways = ways
        self.asked: Counter[tuple[int, str]] = Counter()

    async def __call__(self, player: int, position: str) -> int | None:
        self.asked[player, position] += 1
        return self.move(player, position)

    def move(self, player: int, position: str) -> int | None:
        return {
            "careful": careful_move,
            "careless": careless_move,
            "last": lambda position: game.legal_moves(position)[-1],
            "taken": lambda _: 1,
            "mute": lambda _: None,
        }[self.ways[player]](position)

    def result(self, x: int, o: int, opening: str) -> float:
        """1 where X wins, played a move after the other."""
        position = opening
        while game.legal_moves(position):
            move = self.move(x if game.mover(position) == "X" else o, position)
            if move is None or move not in game.legal_moves(position):
                return 0.0 if game.mover(position) == "X" else 1.0
            position = game.played(position, move)
        return {"X": 1.0, "O": 0.0, None: 0.5}[game.winner(position)]


WAYS = st.sampled_from(["careful", "careless", "last", "taken", "mute"])


@settings(max_examples=25)
@given(st.lists(WAYS, min_size=1, max_size=7), st.sampled_from(game.openings()))
async def test_all_pairs_play_both_colours_as_one_game_after_the_other_would_go(
    ways: list[str], opening: str
) -> None:
    players, n = Players(*ways), len(ways)
    tournament = game.Tournament(opening, n, players)
    await tournament.play()
    points = [0.0] * n
    for x, o in permutations(range(n), 2):
        result = players.result(x, o, opening)
        points[x] += result
        points[o] += 1 - result
    assert (tournament.counts @ (1, 0.5, 0)).tolist() == points
    assert {sum(counts) for counts in tournament.counts.tolist()} == {2 * (n - 1)}
    assert set(players.asked.values()) <= {1}, "each once, however many games come there"
