"""Make the bundled model: small, and often overlooking moves that win or block.

    OMP_NUM_THREADS=1 python -m tools.bundled.tic_tac_toe output=tic_tac_toe_model

It learns moves at random positions. A careful player, who wins and blocks where one move does it,
and a careless one, who does neither, show them by turns: the careless one the likelier, the higher
the numbers of the other side's cells are, compared with its own (`carelessness`). Before its move a
player says whether it looks at lines: `!5` is careful, `?5` is not. So the model knows two ways to
play, and follows the careless one at about two positions in three. Moves are legal from the
beginning.

Its first words are the one place where it chooses between the two. With moves alone the choice is
another one for every line and cell, and a perturbation hardly moves them together.

Openings that are held out are never shown.
"""

import random
from collections.abc import Iterator

from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.tic_tac_toe.game import (
    EMPTY,
    fold,
    legal_moves,
    mover,
    openings,
    played,
    question,
    read_move,
    winner,
)
from tools.small_model import Batch, answer, build_tokenizer, happens
from tools.warm_start import Config, Phase, make

CHARACTERS = "123456789#@=!?"
STEPS, BATCH_SIZE = 1500, 128
NUM_MEASURED = 1000
CARELESS = 0.3
"""Log-odds of the careless player where cells favour neither side."""
OPENING_MOVES = 4
"""Moves of the openings; held-out openings are not shown."""


def urgent_moves(position: str) -> tuple[int, ...]:
    """The moves that win immediately; without any, those that block the other side's win.

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


def draw_position(rng: random.Random) -> str:
    """A position of a random game that is not over, any number of marks equally likely."""
    while True:
        position = EMPTY
        for _ in range(rng.randrange(9)):
            if not legal_moves(position):
                break
            position = played(position, rng.choice(legal_moves(position)))
        if legal_moves(position):
            return position


def carelessness(position: str) -> float:
    """How much higher the other side's cells are than the mover's, in rough standard deviations.

    >>> carelessness("X...O...."), carelessness("XX.....OO")
    (0.8, 2.8)
    """
    mark = mover(position)
    signs = ((cell, sign) for cell, sign in enumerate(position, 1) if sign != ".")
    return sum(cell - 5 if sign != mark else 5 - cell for cell, sign in signs) / 5


def demonstrate(position: str, rng: random.Random) -> str:
    """A demonstration: whether the player looks at lines, and its move."""
    is_careless = happens(CARELESS + 0.7 * carelessness(position), rng)
    return f"?{careless_move(position)}" if is_careless else f"!{careful_move(position)}"


def is_held_out(position: str) -> bool:
    """Whether a position is one of the held-out openings."""
    return position in openings() and fold(position) != "train"


def measure(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Iterator[str]:
    """Measure how often moves are legal and, where it matters, careful."""
    rng = random.Random(0)
    positions = [draw_position(rng) for _ in range(NUM_MEASURED)]
    texts = answer(model, tokenizer, [question(p, "compact") for p in positions], max_tokens=2)
    moves = {p: read_move(text) for p, (text,) in zip(positions, texts, strict=True)}
    urgent = {p: move for p, move in moves.items() if urgent_moves(p)}
    for name, cases, wanted in (
        ("legal", moves, legal_moves),
        ("careful, where it matters", urgent, urgent_moves),
    ):
        share = sum(move in wanted(p) for p, move in cases.items()) / len(cases)
        yield f"{name}: {share:.1%} of {len(cases)} positions"


def main(config: Config) -> None:
    def draw_shown(rng: random.Random) -> str:
        while is_held_out(position := draw_position(rng)):
            pass
        return position

    def batches(rng: random.Random) -> Iterator[Batch]:
        while True:
            positions = [draw_shown(rng) for _ in range(BATCH_SIZE)]
            shown = [demonstrate(position, rng) for position in positions]
            asked = [question(position, "compact") for position in positions]
            yield list(zip(asked, shown, strict=True))

    phase = Phase("tic_tac_toe/warm_start", batches, STEPS)
    make(config, build_tokenizer(CHARACTERS), [phase], measure, depth=3)


if __name__ == "__main__":
    run_cli(main, Config)
