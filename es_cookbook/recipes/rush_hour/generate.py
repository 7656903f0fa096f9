"""Solvable Rush Hour boards: seeded, balanced over difficulty, in folds that share nothing.

Pieces are put down at random, all positions that can be reached from there are listed with their
optimal lengths (`solver.Distances`), and of these one easy, one medium and one hard board are
taken. So a set is balanced over the three, and lengths are even within each, as far as there
are such positions.

A board's fold is a hash of what no move changes (`boards.arrangement`): no board of one fold can be
reached from a board of another, nor is it the mirror image of one.
"""

import dataclasses
import random
from collections.abc import Collection, Iterator
from typing import Literal, TypeAlias

from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.rush_hour.boards import (
    EMPTY,
    TARGET,
    WALL,
    Board,
    Move,
    arrangement,
    canonical,
    parse_board,
    renamed,
    row_by_row,
)
from es_cookbook.recipes.rush_hour.solver import Distances, TooManyPositionsError
from es_cookbook.rl.data.generated import FOLDS

Difficulty: TypeAlias = Literal["easy", "medium", "hard"]

EASY_BELOW, MEDIUM_BELOW = 3, 5
"""Optimal lengths at which a board is no longer easy, and no longer medium."""
GENERATED_SIZES = range(4, 8)
"""Rows of generated boards: smaller ones are never hard, larger ones take seconds each."""

_MAX_POSITIONS = 2000  # an arrangement with more is dropped: it would take longer than ten others
_FRUITLESS = 2000  # arrangements in a row that bring no new board: there are no more


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One board, with the fewest moves that solve it where they are known."""

    board: Board
    solution: tuple[Move, ...] | None = None

    @property
    def key(self) -> str:
        return canonical(self.board)

    @property
    def fold(self) -> int:
        """The problem's fold, a pure function of the invariants of moves."""
        return derive_seed(0, f"rush_hour/split/{arrangement(self.board)}") % FOLDS


def difficulty(optimal: int) -> Difficulty:
    """Return the name of an optimal length: easy below 3 moves, medium below 5, else hard."""
    return "easy" if optimal < EASY_BELOW else "medium" if optimal < MEDIUM_BELOW else "hard"


def generate_problems(
    seed: int, folds: Collection[int], *, size: int = 6, max_walls: int = 0, max_moves: int = 10
) -> Iterator[Problem]:
    """Yield distinct solved boards of some folds: easy, medium, hard, and again.

    It ends only where there is no further board, which it takes for granted after 2,000
    arrangements of pieces that brought none.

    Args:
        seed: same seed, same stream.
        folds: from 0 to 9; boards of different folds are disjoint for all seeds.
        size: rows, and as many columns; 4 to 7.
        max_walls: each board has 0 to this many walls.
        max_moves: longest optimal solution; 5 or more.
    """
    rng = random.Random(derive_seed(seed, "rush_hour/boards", *sorted(folds)))
    seen: set[str] = set()
    fruitless = 0
    while fruitless < _FRUITLESS:
        board = random_board(rng, size, rng.randint(0, max_walls))
        if Problem(board).fold not in folds:
            continue
        fruitless += 1
        problems = _one_of_each(rng, board, max_moves)
        keys = [problem.key for problem in problems]
        if problems and seen.isdisjoint(keys):
            fruitless = 0
            seen.update(keys)
            yield from problems


def random_board(rng: random.Random, size: int, walls: int) -> Board:
    """Return a board with pieces of two and three cells at random places.

    A third to two fifths of a board's cells times one piece: with fewer there are so many
    positions that listing them takes long, with more nothing can move.
    """
    cells = [EMPTY] * size**2
    row, column = rng.randrange(size), rng.randrange(size - 2)
    _put(cells, [row * size + column, row * size + column + 1], TARGET)
    names = iter("BCDEFGHIJKLMNOPQRSTUVWXYZ"[: rng.randint(size**2 // 3, 2 * size**2 // 5)])
    for cell in rng.sample([i for i in range(size**2) if i // size != row], walls):
        cells[cell] = WALL
    for _ in range(6 * size**2):  # attempts: not every place is free
        length = 3 if rng.random() < 0.3 else 2
        line, start = rng.randrange(size), rng.randrange(size - length + 1)
        is_horizontal = rng.random() < 0.5
        if is_horizontal and line == row:  # beside the target: always in its way, or of no use
            continue
        first, stride = (line * size + start, 1) if is_horizontal else (start * size + line, size)
        places = [first + i * stride for i in range(length)]
        if all(cells[place] == EMPTY for place in places):
            if (name := next(names, None)) is None:
                break
            _put(cells, places, name)
    return parse_board("".join(cells))


def _put(cells: list[str], places: list[int], name: str) -> None:
    for place in places:
        cells[place] = name


def _one_of_each(rng: random.Random, board: Board, max_moves: int) -> list[Problem]:
    """Return an easy, a medium and a hard position of these pieces; none if one is missing."""
    try:
        distances = Distances(board, _MAX_POSITIONS)
    except TooManyPositionsError:
        return []
    longest = min(len(distances.layers) - 1, max_moves)
    if longest < MEDIUM_BELOW:
        return []
    problems: list[Problem] = []
    for shortest, end in ((1, EASY_BELOW), (EASY_BELOW, MEDIUM_BELOW), (MEDIUM_BELOW, longest + 1)):
        position = rng.choice(distances.layers[rng.randrange(shortest, end)])
        found = distances.board_at(position)
        names = row_by_row(found)
        moves = distances.moves_from(position)
        solution = tuple(move._replace(piece=names[move.piece]) for move in moves)
        problems.append(Problem(renamed(found, names), solution))
    return problems
