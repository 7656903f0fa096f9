"""Games between the players of a group from one opening, each pair with both colours.

All games advance together, a move at a time, and a player is asked once for its move at a position,
however many of its games come there. So games cost little: most of those that similar players play
are alike. Among n players who all answer each position in one of m ways, a round robin has n² − n
games, and a player is asked at no more positions than m ways branch into.

A round robin plays all pairs. `swiss` plays rounds between players who have done about as well, for
populations in which all pairs would be too many positions.

Guests play everyone with both colours and are not paired otherwise. Games with them do not count
for the score.

Elo's scale turns a score s against an opponent into a difference of ratings,
400 · log10(s / (1 − s)) (A. E. Elo, The Rating of Chessplayers, Past and Present, 1978), which for
two players is the Bradley-Terry model's fit.

Left out: ratings of single genomes. One opening is too few games for them.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.tic_tac_toe.game import legal_moves, mover, played, winner
from es_cookbook.rl.judging.tournament import PlayerPair, round_robin, swiss

Ask: TypeAlias = Callable[[int, str], Awaitable[int | None]]
"""A player's move at a position; None where its answer names no cell."""

_BY_WINNER = {"X": 1, None: 0, "O": -1}


def elo(points: float, games: int) -> float:
    """The difference of ratings that explains so many points of so many games.

    Half a point of one further game is added, so that nobody is infinitely better.

    >>> round(elo(75, 100)), round(elo(50, 100)), round(elo(10, 10))
    (189, 0, 529)
    """
    score = (points + 0.5) / (games + 1)
    return 400 * math.log10(score / (1 - score))


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What a player has done, in games with players or, apart, with guests.

    Attributes:
        wins: games won; `draws` and `losses` too.
        asked: positions at which it was asked for a move.
        illegal: of those, where it named no free cell, and forfeited.
    """

    wins: int = 0
    draws: int = 0
    losses: int = 0
    asked: int = 0
    illegal: int = 0

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    def points(self, draw: float = 0.5) -> float:
        """1 for a win, `draw` for a draw."""
        return self.wins + draw * self.draws


class Tournament:
    """Games from one opening.

    Args:
        opening: where every game begins.
        num_players: they are 0 to n - 1; guests have the numbers from there on.
        num_guests: who play everyone.
        ask: a player's move.

    Attributes:
        moves: what was answered at each position, by player.
    """

    def __init__(self, opening: str, num_players: int, num_guests: int, ask: Ask) -> None:
        self.opening = opening
        self.moves: dict[str, dict[int, int | None]] = {}
        self._num_players = num_players
        self._num_guests = num_guests
        self._ask = ask
        self._games: list[NDArray[np.int64]] = []  # Rows of player of X, player of O, result.

    async def play_round_robin(self) -> None:
        await self._play(round_robin(self._num_players))

    async def play_swiss(self, rounds: int, seed: int) -> None:
        """Some rounds, paired by the points so far."""
        met: set[PlayerPair] = set()
        for number in range(rounds):
            scores = [standing.points() for standing in self.standings()]
            pairs = swiss(scores, met, derive_seed(seed, "tic_tac_toe/swiss", number))
            met.update(pairs)
            await self._play(pairs)

    async def play_guests(self) -> None:
        players = range(self._num_players)
        guests = range(self._num_players, self._num_players + self._num_guests)
        await self._play([(player, guest) for player in players for guest in guests])

    def standings(self, with_guests: bool = False) -> list[Standing]:
        """What each player has done, with other players or with guests."""
        games = np.concatenate([np.zeros((0, 3), dtype=np.int64), *self._games])
        chosen = (games[:, :2] >= self._num_players).any(axis=1) == with_guests
        x_N, o_N, result_N = games[chosen].T
        size = self._num_players + self._num_guests

        def times(x_result: int) -> NDArray[np.int64]:
            as_x = np.bincount(x_N[result_N == x_result], minlength=size)
            return as_x + np.bincount(o_N[result_N == -x_result], minlength=size)

        asked, illegal = Counter[int](), Counter[int]()
        for position, answers in self.moves.items():
            asked.update(answers.keys())
            moves = legal_moves(position)
            illegal.update(player for player, move in answers.items() if move not in moves)
        wins, draws, losses = (times(result).tolist() for result in (1, 0, -1))
        return [
            Standing(wins[i], draws[i], losses[i], asked[i], illegal[i])
            for i in range(self._num_players)
        ]

    def games_of(self, player: int, count: int) -> list[PlayerPair]:
        """Who had X and who O in a player's first games, as many with each colour."""
        games = np.concatenate(self._games)
        own = [games[games[:, colour] == player][:count] for colour in (0, 1)]
        return [(x, o) for x, o, _ in np.concatenate(own).tolist()]

    def moves_of(self, x: int, o: int) -> list[int | None]:
        """The moves of a game that was played; the last is None where it was forfeited."""
        position, moves = self.opening, list[int | None]()
        while legal_moves(position):
            move = self.moves[position][x if mover(position) == "X" else o]
            if move is None or move not in legal_moves(position):
                return [*moves, None]
            moves.append(move)
            position = played(position, move)
        return moves

    async def _play(self, pairs: Sequence[PlayerPair]) -> None:
        """Each pair with both colours, all games a move at a time."""
        if not pairs:
            return
        one, other = np.array(pairs, dtype=np.int64).T
        x_N, o_N = np.concatenate([one, other]), np.concatenate([other, one])
        result_N = np.zeros_like(x_N)
        at = {self.opening: np.arange(len(x_N))}
        while at:
            movers = {p: (x_N if mover(p) == "X" else o_N)[games] for p, games in at.items()}
            await self._ask_all({p: np.unique(players) for p, players in movers.items()})
            following: dict[str, list[NDArray[np.int64]]] = {}
            for position, games in at.items():
                answers = self.moves[position]
                cells = np.array([answers[player] or 0 for player in movers[position].tolist()])
                for cell in np.unique(cells).tolist():
                    chosen = games[cells == cell]
                    if cell not in legal_moves(position):
                        result_N[chosen] = -1 if mover(position) == "X" else 1
                        continue
                    after = played(position, cell)
                    if legal_moves(after):
                        following.setdefault(after, []).append(chosen)
                    else:
                        result_N[chosen] = _BY_WINNER[winner(after)]
            at = {position: np.concatenate(games) for position, games in following.items()}
        self._games.append(np.stack([x_N, o_N, result_N], axis=1))

    async def _ask_all(self, players_at: dict[str, NDArray[np.int64]]) -> None:
        """Ask everyone who has not been asked at a position yet, all at once."""

        async def ask(player: int, position: str, answers: dict[int, int | None]) -> None:
            answers[player] = await self._ask(player, position)

        async with anyio.create_task_group() as asking:
            for position, players in players_at.items():
                answers = self.moves.setdefault(position, {})
                for player in players.tolist():
                    if player not in answers:
                        asking.start_soon(ask, player, position, answers)
