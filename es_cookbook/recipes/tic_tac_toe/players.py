"""Players that are no models: random and perfect ones to be measured against, and two that teach.

Careful players win and block where one move does it. Careless ones overlook both. Elsewhere both
take the first free cell.
"""

import random

from es_cookbook.recipes.tic_tac_toe.game import (
    best_moves,
    legal_moves,
    mover,
    played,
    winner,
)


def random_move(position: str, rng: random.Random) -> int:
    """Any legal move."""
    return rng.choice(legal_moves(position))


def perfect_move(position: str, rng: random.Random) -> int:
    """Any of the best moves."""
    return rng.choice(best_moves(position))


def urgent_moves(position: str) -> tuple[int, ...]:
    """The moves that win at once; without any, those that keep the other side from it.

    >>> urgent_moves("XX.OO...."), urgent_moves("XX..O...."), urgent_moves("X........")
    ((3,), (3,), ())
    """
    moves = legal_moves(position)
    winning = tuple(cell for cell in moves if winner(played(position, cell)) is not None)
    return winning or tuple(cell for cell in moves if _completes(position, cell))


def _completes(position: str, cell: int) -> bool:
    """Whether the side that does not move would have three in a line with this cell."""
    other = "O" if mover(position) == "X" else "X"
    return winner(position[: cell - 1] + other + position[cell:]) is not None


def careful_move(position: str) -> int:
    """The first move that wins or blocks, else the first free cell.

    >>> careful_move("XX.OO....")
    3
    """
    return (urgent_moves(position) or legal_moves(position))[0]


def careless_move(position: str) -> int:
    """The first free cell that neither wins nor blocks, if there is one.

    >>> careless_move("XX.OO....")
    7
    """
    moves = legal_moves(position)
    quiet = [
        cell
        for cell in moves
        if winner(played(position, cell)) is None and not _completes(position, cell)
    ]
    return (quiet or moves)[0]
