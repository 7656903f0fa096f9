"""Tic-tac-toe: positions, moves, results, openings, prompts, and tournaments.

A position is nine characters, row by row, X, O or "." for a free cell; X began, so the marks say
who moves next. Cells have the numbers 1 to 9. Perfect play is minimax over all 5,478 positions,
each computed once.

An opening is a position from which a game begins. Those used here have the same number of marks and
are drawn if both sides play perfectly, so that neither begins with an advantage that the other
cannot hold. Which split an opening belongs to is a hash of its symmetry class: no held-out opening
is a rotation or reflection of a training one. No training game comes past a held-out opening
either, since all its positions have more marks than the openings.

In a tournament players meet from one opening, each pair with both colours.

All games advance together, a move at a time, and a player is asked once for its move at a position,
however many of its games come there. So games cost little: most of those that similar players play
are alike. Among n players who all answer each position in one of m ways, a round robin has n² − n
games, and a player is asked at no more positions than m ways branch into.

Left out: ratings of genomes. One opening is too few games for them.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.generated import Fold
from es_cookbook.rl.messages.thoughts import spoken

Mark: TypeAlias = Literal["X", "O"]
PromptStyle: TypeAlias = Literal["compact", "words"]

EMPTY = "." * 9
CELLS = range(1, 10)
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
OPENING_MOVES = 4
HELD_OUT_ONE_IN = 5
"""One symmetry class of openings in this many is in the test, as many in the development set."""

_ROTATED = (6, 3, 0, 7, 4, 1, 8, 5, 2)
_REFLECTED = (2, 1, 0, 5, 4, 3, 8, 7, 6)

_WORDS = """\
You play {mark} in a game of tic-tac-toe. Free cells of the board are shown by their numbers:

{board}

It is your move. Answer with the number of the free cell that you take, and nothing else."""


@functools.cache
def mover(position: str) -> Mark:
    """Return the side that moves next: X if both have equally many marks.

    >>> mover("X........")
    'O'
    """
    return "X" if position.count("X") == position.count("O") else "O"


@functools.cache
def legal_moves(position: str) -> tuple[int, ...]:
    """Return the free cells, none once the game is over.

    >>> legal_moves("XOXOXOOX."), legal_moves("XXXOO....")
    ((9,), ())
    """
    if winner(position) is not None:
        return ()
    return tuple(cell for cell in CELLS if position[cell - 1] == ".")


def played(position: str, cell: int) -> str:
    """Return the position after a legal move.

    >>> played("X........", 5)
    'X...O....'
    """
    return position[: cell - 1] + mover(position) + position[cell:]


@functools.cache
def winner(position: str) -> Mark | None:
    """Return the side that has three in a line, if any.

    >>> winner("XXXOO...."), winner("XX.OO....")
    ('X', None)
    """
    for a, b, c in LINES:
        if position[a] == position[b] == position[c] != ".":
            return "X" if position[a] == "X" else "O"
    return None


@functools.cache
def value(position: str) -> int:
    """Return the value of perfect play for the side that moves: 1 a win, 0 a draw, -1 a loss.

    >>> value(EMPTY), value("XX.OO....")
    (0, 1)
    """
    if winner(position) is not None:  # Of the side that has just moved.
        return -1
    return max((-value(played(position, cell)) for cell in legal_moves(position)), default=0)


@functools.cache
def best_moves(position: str) -> tuple[int, ...]:
    """Return the moves of a perfect player, those that win at once if there are any.

    >>> best_moves("XX.OO...."), best_moves("XX..O....")
    ((3,), (3,))
    """
    moves = legal_moves(position)
    after = {cell: played(position, cell) for cell in moves}
    at_once = tuple(cell for cell in moves if winner(after[cell]) is not None)
    return at_once or tuple(cell for cell in moves if -value(after[cell]) == value(position))


@functools.cache
def symmetry_class(position: str) -> str:
    """Return one position that stands for all its rotations and reflections."""
    images = [position]
    for _ in range(3):
        images.append("".join(images[-1][i] for i in _ROTATED))
    return min(images + ["".join(image[i] for i in _REFLECTED) for image in images])


def fold(opening: str) -> Fold:
    """Return the split of an opening, a pure function of its symmetry class."""
    place = derive_seed(0, f"tic_tac_toe/split/{symmetry_class(opening)}") % HELD_OUT_ONE_IN
    return "test" if place == 0 else "development" if place == 1 else "train"


@functools.cache
def openings(of: Fold | None = None) -> tuple[str, ...]:
    """Return the openings of one split, or all: drawn positions after `OPENING_MOVES`."""
    found: list[str] = []
    for taken in itertools.permutations(CELLS, OPENING_MOVES):
        if list(taken[::2]) != sorted(taken[::2]) or list(taken[1::2]) != sorted(taken[1::2]):
            continue  # The same marks in another order.
        position = functools.reduce(played, taken, EMPTY)
        is_open = winner(position) is None and legal_moves(position) and value(position) == 0
        if is_open and of in (None, fold(position)):
            found.append(position)
    return tuple(sorted(found))


def question(position: str, style: PromptStyle) -> str:
    """Return the prompt for the side that moves.

    In the bundled model's shorthand free cells are their numbers, its own marks "#", others "@".

    >>> question("XO.......", "compact")
    '#@3456789='
    """
    mark = mover(position)
    if style == "compact":
        signs = {mark: "#", "X" if mark == "O" else "O": "@"}
        return "".join(signs.get(sign, str(i)) for i, sign in enumerate(position, 1)) + "="
    signs = [str(i) if sign == "." else sign for i, sign in enumerate(position, 1)]
    rows = [" | ".join(signs[i : i + 3]) for i in (0, 3, 6)]
    return _WORDS.format(mark=mark, board="\n".join(rows))


_LONGEST = 20
"""Numbers with so many characters are not cells, and are not read: one may have a million."""


def read_move(text: str) -> int | None:
    """Return the last number of an answer, if it is a cell, 1 to 9.

    >>> read_move("5"), read_move("I take 7."), read_move("12"), read_move("no")
    (5, 7, None, None)
    """
    text = spoken(text)
    end = 1 + max(map(text.rfind, "0123456789"))
    last = re.search(r"(?:(?<![0-9])-)?[0-9]+(?:\.[0-9]+)?$", text[max(end - _LONGEST, 0) : end])
    number = float(last[0]) if last and len(last[0]) < _LONGEST else 0.0
    return int(number) if number in CELLS else None


Ask: TypeAlias = Callable[[int, str], Awaitable[int | None]]
"""A player's move at a position; None where its answer names no cell."""

_BY_WINNER = {"X": 1, None: 0, "O": -1}


class Tournament:
    """Games from one opening.

    Args:
        opening: starting position of every game.
        num_players: players are 0 to n - 1.
        ask: a player's move.

    Attributes:
        moves: answers at each position, by player.
        counts: a row per player: games won, drawn and lost.
    """

    def __init__(self, opening: str, num_players: int, ask: Ask) -> None:
        self.opening = opening
        self.moves: dict[str, dict[int, int | None]] = {}
        self.counts: NDArray[np.int64] = np.zeros((num_players, 3), dtype=np.int64)
        self._ask = ask

    def asked(self) -> tuple[Counter[int], Counter[int]]:
        """Return at how many positions each player was asked, and at how many it forfeited."""
        asked, illegal = Counter[int](), Counter[int]()
        for position, answers in self.moves.items():
            asked.update(answers.keys())
            moves = legal_moves(position)
            illegal.update(player for player, move in answers.items() if move not in moves)
        return asked, illegal

    async def play(self) -> None:
        """Play each pair with both colours, all games a move at a time."""
        if len(self.counts) < 2:
            return
        one, other = np.triu_indices(len(self.counts), 1)
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
        np.add.at(self.counts, (x_N, 1 - result_N), 1)
        np.add.at(self.counts, (o_N, 1 + result_N), 1)

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
