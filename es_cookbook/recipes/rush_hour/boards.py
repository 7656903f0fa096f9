"""Rush Hour boards and moves: reading, writing, and playing them.

A board is a square of cells, written row by row as one string: `o` is empty, `x` a wall, a capital
letter a piece. A piece is straight, two or more cells long, and slides along its own line. `A` is
the target: it lies horizontally, and the board is solved when its right end is in the last column.

A move is `<piece><direction><steps>`, a slide of any length: `A>2,Bv3`. The simulator `play` is the
judge of an answer: any legal sequence that ends solved is right.

Left out: an exit on another side, pieces of one cell, and boards with more than 26 pieces.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

EMPTY, WALL, TARGET = "o", "x", "A"
MIN_SIZE, MAX_SIZE = 3, 10
"""Rows of the smallest and of the largest board."""
MAX_TEXT = 2000
"""Longest list of moves read, in characters."""

_ARROWS = {">": ">", "<": "<", "^": "^", "v": "v", "R": ">", "L": "<", "U": "^", "D": "v"}
_MOVE = re.compile(r"([A-Z])([<>^vRLUD])([1-9][0-9]?)")


class Move(NamedTuple):
    """A piece slides `steps` cells: `direction` is one of `>`, `<`, `^` and `v`."""

    piece: str
    direction: str
    steps: int


class Piece(NamedTuple):
    """A piece: its name, its upper or left end as an index of a cell, its length, its axis."""

    name: str
    start: int
    length: int
    is_horizontal: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Board:
    """A position. `parse_board` makes one from text.

    Attributes:
        size: rows, and as many columns.
        walls: indices of the cells, row by row, that nothing can enter; sorted.
        pieces: pieces in the order of their upper or left ends.
    """

    size: int
    walls: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def target(self) -> Piece:
        """The piece that has to reach the last column."""
        return next(piece for piece in self.pieces if piece.name == TARGET)

    @property
    def is_solved(self) -> bool:
        """Whether the target's right end is in the last column."""
        return self.distance == 0

    @property
    def distance(self) -> int:
        """Columns between the target's right end and the last column."""
        return self.size - self.target.start % self.size - self.target.length

    @property
    def in_the_way(self) -> list[str]:
        """Names of the pieces between the target's right end and the last column."""
        end = self.target.start + self.target.length
        way = {*range(end, end + self.distance)}
        return [piece.name for piece in self.pieces if not way.isdisjoint(self.cells(piece))]

    def cells(self, piece: Piece) -> range:
        """Return the indices of the cells that a piece covers."""
        stride = 1 if piece.is_horizontal else self.size
        return range(piece.start, piece.start + piece.length * stride, stride)

    def rows(self) -> list[str]:
        text = str(self)
        return [text[start : start + self.size] for start in range(0, len(text), self.size)]

    def __str__(self) -> str:
        """Return the board row by row, in one string."""
        cells = [EMPTY] * self.size**2
        for wall in self.walls:
            cells[wall] = WALL
        for piece in self.pieces:
            for cell in self.cells(piece):
                cells[cell] = piece.name
        return "".join(cells)


def parse_board(text: str) -> Board:
    """Read a board; white space in it is ignored.

    >>> parse_board("ooB AAB ooo").pieces[1]
    Piece(name='A', start=3, length=2, is_horizontal=True)

    Raises:
        ValueError: It is not a board; the message is a clause that says why.
    """
    cells = "".join(text.split())
    size = round(len(cells) ** 0.5)
    if size**2 != len(cells) or not MIN_SIZE <= size <= MAX_SIZE:
        raise ValueError(
            f"a board has 3 × 3 to {MAX_SIZE} × {MAX_SIZE} cells, found {len(cells)} cells"
        )
    for cell in cells:
        if cell not in (EMPTY, WALL) and not ("A" <= cell <= "Z"):
            raise ValueError(
                f"a cell is 'o' (empty), 'x' (wall) or a piece's capital letter, found {cell!r}"
            )
    names = [name for name in dict.fromkeys(cells) if name not in (EMPTY, WALL)]
    pieces = tuple(_piece(name, cells, size) for name in names)
    if not any(piece.name == TARGET and piece.is_horizontal for piece in pieces):
        raise ValueError("the target piece 'A' must be there and lie horizontally")
    walls = tuple(i for i, cell in enumerate(cells) if cell == WALL)
    return Board(size, walls, pieces)


def _piece(name: str, cells: str, size: int) -> Piece:
    """Return the piece that covers all cells with its name."""
    covered = [i for i, cell in enumerate(cells) if cell == name]
    start, length = covered[0], len(covered)
    across = list(range(start, start + length))
    down = list(range(start, start + length * size, size))
    if length >= 2 and covered == across and start // size == across[-1] // size:
        return Piece(name, start, length, is_horizontal=True)
    if length >= 2 and covered == down:
        return Piece(name, start, length, is_horizontal=False)
    raise ValueError(f"a piece is a straight line of 2 or more cells, and {name!r} is not")


def parse_moves(text: str) -> tuple[Move, ...] | None:
    """Read a list of moves, in canonical form; None for text that is not one.

    R, L, U and D are accepted for the arrows. Consecutive moves of one piece in one direction are
    one move. Linear in the length of any text, and never an error.

    >>> parse_moves("A>1, AR1,Bv3")
    (Move(piece='A', direction='>', steps=2), Move(piece='B', direction='v', steps=3))
    """
    if len(text) > MAX_TEXT:
        return None
    moves: list[Move] = []
    for part in text.split(","):
        if (match := _MOVE.fullmatch(part.strip())) is None:
            return None
        moves.append(Move(match[1], _ARROWS[match[2]], int(match[3])))
    return merged(moves)


def merged(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Join consecutive moves of one piece in one direction."""
    joined: list[Move] = []
    for move in moves:
        if joined and joined[-1][:2] == move[:2]:
            move = move._replace(steps=joined.pop().steps + move.steps)
        joined.append(move)
    return tuple(joined)


def format_moves(moves: Sequence[Move]) -> str:
    """Return moves as text, for example `A>2,Bv3`."""
    return ",".join(f"{move.piece}{move.direction}{move.steps}" for move in moves)


def play(board: Board, moves: Sequence[Move]) -> tuple[int, Board]:
    """Make moves until one is illegal: no such piece, not along its axis, or something in the way.

    Returns:
        How many moves were made, and the position after those.

    >>> legal, end = play(parse_board("ooB AAB ooo"), parse_moves("Bv1,A>1"))
    >>> legal, str(end)
    (1, 'oooAABooB')
    """
    pieces = {piece.name: piece for piece in board.pieces}
    occupied = {*board.walls, *(cell for piece in board.pieces for cell in board.cells(piece))}
    legal = 0
    for move in moves:
        piece = pieces.get(move.piece)
        if piece is None or (slid := _slide(board, piece, move, occupied)) is None:
            break
        occupied -= {*board.cells(piece)}
        occupied |= {*board.cells(slid)}
        pieces[move.piece] = slid
        legal += 1
    ordered = tuple(sorted(pieces.values(), key=lambda piece: piece.start))
    return legal, dataclasses.replace(board, pieces=ordered)


def _slide(board: Board, piece: Piece, move: Move, occupied: set[int]) -> Piece | None:
    """Return the piece after the move; None if the move is illegal."""
    is_forward = move.direction in (">", "v")
    if piece.is_horizontal != (move.direction in (">", "<")):
        return None
    stride = 1 if piece.is_horizontal else board.size
    along = piece.start % board.size if piece.is_horizontal else piece.start // board.size
    room = board.size - along - piece.length if is_forward else along
    if move.steps > room:
        return None
    first = piece.start + piece.length * stride if is_forward else piece.start - stride
    step = stride if is_forward else -stride
    if any(first + i * step in occupied for i in range(move.steps)):
        return None
    return piece._replace(start=piece.start + move.steps * step)


def mirrored(board: Board) -> Board:
    """Return the board upside down: the same puzzle, since the target leaves to the right."""
    return parse_board("".join(reversed(board.rows())))


def canonical(board: Board) -> str:
    """Return a text that identifies the puzzle, whatever the names, also upside down.

    >>> canonical(parse_board("ooC AAC ooo")) == canonical(parse_board("ooo AAB ooB"))
    True
    """
    return min(str(renamed(each, row_by_row(each))) for each in (board, mirrored(board)))


def row_by_row(board: Board) -> dict[str, str]:
    """Return new names for the pieces: B, C, … in order of their upper or left ends."""
    others = (piece.name for piece in board.pieces if piece.name != TARGET)
    return {TARGET: TARGET} | {name: chr(ord("B") + i) for i, name in enumerate(others)}


def renamed(board: Board, names: Mapping[str, str]) -> Board:
    """Return the same position with other names for the pieces."""
    pieces = tuple(piece._replace(name=names[piece.name]) for piece in board.pieces)
    return dataclasses.replace(board, pieces=pieces)


def arrangement(board: Board) -> str:
    """Return what moves do not change: size, walls, and the order of pieces on a line.

    Positions that can be reached from each other have the same arrangement. Nor does turning the
    board upside down change it.
    """
    return min(_lines(board), _lines(mirrored(board)))


def _lines(board: Board) -> str:
    rows = [""] * board.size
    columns = [""] * board.size
    for piece in board.pieces:
        length = TARGET if piece.name == TARGET else str(piece.length)
        if piece.is_horizontal:
            rows[piece.start // board.size] += length
        else:
            columns[piece.start % board.size] += length
    return f"{','.join(rows)}|{','.join(columns)}|{','.join(map(str, board.walls))}"
