"""The fewest moves that solve a Rush Hour board, by breadth-first search.

A move is a slide of any length. A position is one whole number: a few bits per piece that say how
far along its line it stands. Which cells are occupied is carried beside it as a bit mask, so a
slide costs one test of a bit and two additions. The search ends a move early: a position from which
the target's way is clear is one move away from solved.

`Distances` goes the other way, for generating: it lists all positions that can be reached, and
searches from all solved ones at once. Every move can be taken back, so that gives the optimal
length of every position.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from es_cookbook.recipes.rush_hour.boards import Board, Move, Piece

MAX_POSITIONS = 200_000
"""Most positions that a search looks at: some seconds, and some tens of megabytes."""


class TooManyPositionsError(Exception):
    """The search has looked at as many positions as it may, and found no end."""


class _Slide(NamedTuple):
    """One cell further: the cell that must be free, and the difference to the start of the move."""

    entered: int
    code: int
    occupied: int


class _Piece(NamedTuple):
    """A piece in a code: `slides[place]` are the moves forward and the moves back from there."""

    shift: int
    slides: tuple[tuple[tuple[_Slide, ...], tuple[_Slide, ...]], ...]


class _Coding:
    """Positions of one board's pieces as whole numbers."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.bits = (board.size - 1).bit_length()
        self.mask = (1 << self.bits) - 1
        ordered = sorted(board.pieces, key=lambda piece: piece != board.target)  # the target first
        self.named = ordered
        self.pieces = [self._moves(piece, i * self.bits) for i, piece in enumerate(ordered)]
        self.start = sum(self._place(piece) << i * self.bits for i, piece in enumerate(ordered))
        self.occupied = sum(
            1 << cell
            for cells in (board.walls, *(board.cells(piece) for piece in board.pieces))
            for cell in cells
        )
        self.exit = board.size - board.target.length
        row = board.target.start // board.size * board.size
        self.ways = [
            sum(1 << row + column for column in range(place + board.target.length, board.size))
            for place in range(self.exit + 1)
        ]

    def neighbours(self, code: int, occupied: int) -> Iterator[tuple[int, int]]:
        """Positions one move away, with the cells they occupy."""
        mask = self.mask
        for shift, slides in self.pieces:
            for direction in slides[code >> shift & mask]:
                for entered, change, cells in direction:
                    if occupied & entered:
                        break
                    yield code + change, occupied ^ cells

    def is_clear(self, code: int, occupied: int) -> bool:
        """Whether nothing is between the target and the last column."""
        return not occupied & self.ways[code & self.mask]

    def solved(self, code: int) -> int:
        """The position with the target in the last column, and all else as it is."""
        return code + self.exit - (code & self.mask)

    def move(self, before: int, after: int) -> Move:
        for i, piece in enumerate(self.named):
            old, new = (code >> i * self.bits & self.mask for code in (before, after))
            if old != new:
                back, forward = "<>" if piece.is_horizontal else "^v"
                return Move(piece.name, forward if new > old else back, abs(new - old))
        raise ValueError("both positions are the same")

    def to_board(self, code: int) -> Board:
        pieces = [
            piece._replace(
                start=piece.start
                + ((code >> i * self.bits & self.mask) - self._place(piece)) * self._stride(piece)
            )
            for i, piece in enumerate(self.named)
        ]
        ordered = tuple(sorted(pieces, key=lambda piece: piece.start))
        return Board(self.board.size, self.board.walls, ordered)

    def _place(self, piece: Piece) -> int:
        """How far a piece stands from the left or upper end of its line."""
        column, row = piece.start % self.board.size, piece.start // self.board.size
        return column if piece.is_horizontal else row

    def _stride(self, piece: Piece) -> int:
        return 1 if piece.is_horizontal else self.board.size

    def _moves(self, piece: Piece, shift: int) -> _Piece:
        stride = self._stride(piece)
        line = piece.start - self._place(piece) * stride
        body = sum(1 << i * stride for i in range(piece.length))
        last = self.board.size - piece.length

        def slide(place: int, steps: int) -> _Slide:
            new = place + steps
            entered = new + piece.length - 1 if steps > 0 else new
            changed = body << line + place * stride ^ body << line + new * stride
            return _Slide(1 << line + entered * stride, steps * (1 << shift), changed)

        return _Piece(
            shift,
            tuple(
                (
                    tuple(slide(place, steps) for steps in range(1, last - place + 1)),
                    tuple(slide(place, -steps) for steps in range(1, place + 1)),
                )
                for place in range(last + 1)
            ),
        )


def solve(board: Board, max_positions: int = MAX_POSITIONS) -> tuple[Move, ...] | None:
    """The fewest moves that solve a board; None where nothing does; none where it is solved.

    >>> from es_cookbook.recipes.rush_hour.boards import format_moves, parse_board
    >>> format_moves(solve(parse_board("ooBo AABo oooo oooo")) or ())
    'Bv2,A>2'

    Raises:
        TooManyPositionsError: No solution among the first `max_positions` positions.
    """
    coding = _Coding(board)
    came_from = {coding.start: coding.start}
    clear = coding.start
    if not coding.is_clear(coding.start, coding.occupied):
        if (found := _search(coding, came_from, max_positions)) is None:
            return None
        clear = found
    path = [coding.solved(clear), clear]
    while path[-1] != coding.start:
        path.append(came_from[path[-1]])
    path.reverse()
    return tuple(coding.move(*pair) for pair in itertools.pairwise(path) if pair[0] != pair[1])


def _search(coding: _Coding, came_from: dict[int, int], max_positions: int) -> int | None:
    """The first position from which the way is clear; notes where each position came from."""
    frontier = [(coding.start, coding.occupied)]
    while frontier:
        reached: list[tuple[int, int]] = []
        for code, occupied in frontier:
            for new, cells in coding.neighbours(code, occupied):
                if new in came_from:
                    continue
                came_from[new] = code
                if coding.is_clear(new, cells):
                    return new
                reached.append((new, cells))
            if len(came_from) > max_positions:
                raise TooManyPositionsError
        frontier = reached
    return None


class Distances:
    """All positions that moves can reach from a board, by the fewest moves that solve them.

    Attributes:
        layers: `layers[length]` are the positions, as codes, that `length` moves solve; none where
            nothing solves the board.

    Raises:
        TooManyPositionsError: More than `max_positions` can be reached.
    """

    def __init__(self, board: Board, max_positions: int = MAX_POSITIONS) -> None:
        self._coding = coding = _Coding(board)
        occupied_of = {coding.start: coding.occupied}
        frontier = [coding.start]
        for code in frontier:  # it grows
            for new, cells in coding.neighbours(code, occupied_of[code]):
                if new not in occupied_of:
                    occupied_of[new] = cells
                    frontier.append(new)
            if len(frontier) > max_positions:
                raise TooManyPositionsError
        solved = [code for code in frontier if code & coding.mask == coding.exit]
        self._towards = {code: code for code in solved}
        self.layers: list[list[int]] = []
        layer = solved
        while layer:
            self.layers.append(layer)
            layer = []
            for code in self.layers[-1]:
                for new, _ in coding.neighbours(code, occupied_of[code]):
                    if new not in self._towards:
                        self._towards[new] = code
                        layer.append(new)

    def solution(self, code: int) -> tuple[Board, tuple[Move, ...]]:
        """The board in one of the positions, and the fewest moves that solve it."""
        moves: list[Move] = []
        position = code
        while (nearer := self._towards[position]) != position:
            moves.append(self._coding.move(position, nearer))
            position = nearer
        return self._coding.to_board(code), tuple(moves)
