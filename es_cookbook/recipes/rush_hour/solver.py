"""The fewest moves that solve a Rush Hour board, by breadth-first search.

A move is a slide of any length. A position says how far along its line each piece stands, and the
cells of each piece at each place are a bit mask, so a slide costs one test of a bit mask a cell.

`Distances` lists all positions that can be reached, and searches from all solved ones at once.
Every move can be taken back, so that gives the optimal length of every position.
"""

from collections.abc import Iterator
from typing import TypeAlias

from es_cookbook.recipes.rush_hour.boards import Board, Move, Piece

MAX_POSITIONS = 200_000
"""Limit on the positions of a search, which then takes some seconds."""
Position: TypeAlias = tuple[int, ...]
"""The distance of each piece from the left or upper end of its line, the target first."""


class TooManyPositionsError(Exception):
    """More positions can be reached than a search may look at."""


def solve(board: Board, max_positions: int = MAX_POSITIONS) -> tuple[Move, ...] | None:
    """Return the fewest moves that solve a board; None if nothing does; () if it is solved.

    >>> from es_cookbook.recipes.rush_hour.boards import format_moves, parse_board
    >>> format_moves(solve(parse_board("ooBo AABo oooo oooo")) or ())
    'Bv2,A>2'

    Raises:
        TooManyPositionsError: More than `max_positions` can be reached.
    """
    distances = Distances(board, max_positions)
    return distances.moves_from(distances.start) if distances.layers else None


class Distances:
    """All positions that moves can reach from a board, by the fewest moves that solve them.

    Attributes:
        start: the board's own position.
        layers: `layers[length]` are the positions that `length` moves solve; empty if nothing
            solves the board.

    Raises:
        TooManyPositionsError: More than `max_positions` can be reached.
    """

    def __init__(self, board: Board, max_positions: int = MAX_POSITIONS) -> None:
        self._board = board
        self._pieces = sorted(board.pieces, key=lambda piece: piece != board.target)
        self._walls = sum(1 << cell for cell in board.walls)
        self._masks = [
            [
                sum(1 << cell for cell in board.cells(self._moved(piece, place)))
                for place in range(board.size - piece.length + 1)
            ]
            for piece in self._pieces
        ]
        self.start: Position = tuple(map(self._place, self._pieces))
        neighbours: dict[Position, list[Position]] = {}
        frontier, seen = [self.start], {self.start}
        for position in frontier:  # It grows.
            neighbours[position] = list(self._neighbours(position))
            for new in neighbours[position]:
                if new not in seen:
                    seen.add(new)
                    frontier.append(new)
            if len(frontier) > max_positions:
                raise TooManyPositionsError
        solved = board.size - board.target.length
        layer = [position for position in frontier if position[0] == solved]
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

    def board_at(self, position: Position) -> Board:
        pieces = map(self._moved, self._pieces, position)
        ordered = tuple(sorted(pieces, key=lambda piece: piece.start))
        return Board(self._board.size, self._board.walls, ordered)

    def moves_from(self, position: Position) -> tuple[Move, ...]:
        """Return the fewest moves that solve the board from one of the positions."""
        moves: list[Move] = []
        while (nearer := self._towards[position]) != position:
            (i,) = (i for i, old in enumerate(position) if old != nearer[i])
            piece, steps = self._pieces[i], nearer[i] - position[i]
            back, forward = "<>" if piece.is_horizontal else "^v"
            moves.append(Move(piece.name, forward if steps > 0 else back, abs(steps)))
            position = nearer
        return tuple(moves)

    def _neighbours(self, position: Position) -> Iterator[Position]:
        """Yield the positions one move away."""
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

    def _place(self, piece: Piece) -> int:
        row, column = divmod(piece.start, self._board.size)
        return column if piece.is_horizontal else row

    def _moved(self, piece: Piece, place: int) -> Piece:
        stride = 1 if piece.is_horizontal else self._board.size
        return piece._replace(start=piece.start + (place - self._place(piece)) * stride)
