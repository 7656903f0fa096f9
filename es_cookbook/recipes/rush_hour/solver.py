"""The fewest moves that solve a Rush Hour board, by breadth-first search.

A move is a slide of any length. A position says how far along its line each piece stands, and the
cells of each piece at each place are a bit mask, so a slide costs one test of a bit mask a cell.
The search ends a move early: a position from which the target's way is clear is one move away from
solved.

`Distances` goes the other way, for generating: it lists all positions that can be reached, and
searches from all solved ones at once. Every move can be taken back, so that gives the optimal
length of every position.
"""

import itertools
from collections.abc import Iterator
from typing import TypeAlias

from es_cookbook.recipes.rush_hour.boards import Board, Move, Piece

MAX_POSITIONS = 200_000
"""Most positions that a search looks at: some seconds, and some tens of megabytes."""
Position: TypeAlias = tuple[int, ...]
"""How far each piece stands from the left or upper end of its line, the target first."""


class TooManyPositionsError(Exception):
    """The search has looked at as many positions as it may, and found no end."""


class _Positions:
    """Positions of one board's pieces."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._pieces = sorted(board.pieces, key=lambda piece: piece != board.target)
        self.start: Position = tuple(map(self._place, self._pieces))
        self.exit = board.size - board.target.length
        self._walls = sum(1 << cell for cell in board.walls)
        self._masks = [
            [
                sum(1 << cell for cell in board.cells(self._moved(piece, place)))
                for place in range(board.size - piece.length + 1)
            ]
            for piece in self._pieces
        ]

    def neighbours(self, position: Position) -> Iterator[Position]:
        """Positions one move away."""
        occupied = self._walls
        for masks, place in zip(self._masks, position, strict=True):
            occupied |= masks[place]
        for i, (masks, place) in enumerate(zip(self._masks, position, strict=True)):
            others = occupied ^ masks[place]
            for places in (range(place + 1, len(masks)), range(place - 1, -1, -1)):
                for new in places:
                    if others & masks[new]:
                        break
                    yield (*position[:i], new, *position[i + 1 :])

    def is_clear(self, position: Position) -> bool:
        """Whether nothing is between the target and the last column."""
        way = self._walls
        for masks, place in zip(self._masks[1:], position[1:], strict=True):
            way |= masks[place]
        return not any(way & mask for mask in self._masks[0][position[0] :])

    def solved(self, position: Position) -> Position:
        """The position with the target in the last column, and all else as it is."""
        return self.exit, *position[1:]

    def move(self, before: Position, after: Position) -> Move:
        for piece, old, new in zip(self._pieces, before, after, strict=True):
            if old != new:
                back, forward = "<>" if piece.is_horizontal else "^v"
                return Move(piece.name, forward if new > old else back, abs(new - old))
        raise ValueError("both positions are the same")

    def to_board(self, position: Position) -> Board:
        pieces = itertools.starmap(self._moved, zip(self._pieces, position, strict=True))
        ordered = tuple(sorted(pieces, key=lambda piece: piece.start))
        return Board(self._board.size, self._board.walls, ordered)

    def _place(self, piece: Piece) -> int:
        column, row = piece.start % self._board.size, piece.start // self._board.size
        return column if piece.is_horizontal else row

    def _moved(self, piece: Piece, place: int) -> Piece:
        stride = 1 if piece.is_horizontal else self._board.size
        return piece._replace(start=piece.start + (place - self._place(piece)) * stride)


def solve(board: Board, max_positions: int = MAX_POSITIONS) -> tuple[Move, ...] | None:
    """The fewest moves that solve a board; None where nothing does; none where it is solved.

    >>> from es_cookbook.recipes.rush_hour.boards import format_moves, parse_board
    >>> format_moves(solve(parse_board("ooBo AABo oooo oooo")) or ())
    'Bv2,A>2'

    Raises:
        TooManyPositionsError: No solution among the first `max_positions` positions.
    """
    positions = _Positions(board)
    came_from = {positions.start: positions.start}
    clear = positions.start
    if not positions.is_clear(clear):
        if (found := _search(positions, came_from, max_positions)) is None:
            return None
        clear = found
    path = [positions.solved(clear), clear]
    while path[-1] != positions.start:
        path.append(came_from[path[-1]])
    path.reverse()
    return tuple(positions.move(*pair) for pair in itertools.pairwise(path) if pair[0] != pair[1])


def _search(
    positions: _Positions, came_from: dict[Position, Position], max_positions: int
) -> Position | None:
    """The first position from which the way is clear; notes where each position came from."""
    frontier = [positions.start]
    for position in frontier:  # It grows.
        for new in positions.neighbours(position):
            if new in came_from:
                continue
            came_from[new] = position
            if positions.is_clear(new):
                return new
            frontier.append(new)
        if len(came_from) > max_positions:
            raise TooManyPositionsError
    return None


class Distances:
    """All positions that moves can reach from a board, by the fewest moves that solve them.

    Attributes:
        layers: `layers[length]` are the positions that `length` moves solve; none where nothing
            solves the board.

    Raises:
        TooManyPositionsError: More than `max_positions` can be reached.
    """

    def __init__(self, board: Board, max_positions: int = MAX_POSITIONS) -> None:
        self._positions = positions = _Positions(board)
        neighbours: dict[Position, list[Position]] = {}
        frontier, seen = [positions.start], {positions.start}
        for position in frontier:  # It grows.
            neighbours[position] = list(positions.neighbours(position))
            for new in neighbours[position]:
                if new not in seen:
                    seen.add(new)
                    frontier.append(new)
            if len(frontier) > max_positions:
                raise TooManyPositionsError
        layer = [position for position in frontier if position[0] == positions.exit]
        self._towards = {position: position for position in layer}
        self.layers: list[list[Position]] = []
        while layer:
            self.layers.append(layer)
            layer = []
            for position in self.layers[-1]:
                for new in neighbours[position]:
                    if new not in self._towards:
                        self._towards[new] = position
                        layer.append(new)

    def solution(self, position: Position) -> tuple[Board, tuple[Move, ...]]:
        """The board in one of the positions, and the fewest moves that solve it."""
        moves: list[Move] = []
        board = self._positions.to_board(position)
        while (nearer := self._towards[position]) != position:
            moves.append(self._positions.move(position, nearer))
            position = nearer
        return board, tuple(moves)
