"""Make the bundled model: small, and often overlooking that a move wins or must block.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.tic_tac_toe.warm_start output=tic_tac_toe_model

It learns moves at random positions. A careful player, who wins and blocks where one move does it,
and a careless one, who does neither, show them by turns: the careless one the likelier, the higher
the numbers of the other side's cells are, compared with its own (`carelessness`). Before its move a
player says whether it looks at lines: `!5` is careful, `?5` is not. So the model knows two ways to
play, and follows the careless one at about two positions in three. Moves are legal from the
beginning.

What it says first is the one place where it chooses between the two. With moves alone the choice is
another one for every line and cell, and a perturbation hardly moves them together.

Openings that are held out are never shown.
"""

import random
from collections.abc import Sequence

import chz

from es_cookbook.baselines.small_model import (
    answer,
    build_model,
    build_tokenizer,
    fit,
    happens,
    new_directory,
    save,
)
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.tic_tac_toe.game import (
    EMPTY,
    fold,
    legal_moves,
    mover,
    openings,
    played,
    question,
    read_move,
)
from es_cookbook.recipes.tic_tac_toe.players import (
    careful_move,
    careless_move,
    random_move,
    urgent_moves,
)

CHARACTERS = "123456789#@=!?"
NUM_MEASURED = 1000


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the positions and who plays")
    steps: int = chz.field(default=1500, doc="optimizer steps")
    batch_size: int = chz.field(default=128, doc="positions a step")
    careless: float = chz.field(
        default=0.3, doc="log-odds of the careless player where cells favour neither side"
    )
    opening_moves: int = chz.field(
        default=4, doc="moves of the openings of which the held-out ones are not shown"
    )
    width: int = chz.field(default=64, doc="hidden size, a multiple of 16")
    depth: int = chz.field(default=3, doc="layers")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "steps", "batch_size", "depth", at_least=1)
        check_range(self, "opening_moves", at_least=0, at_most=6)


def draw_position(rng: random.Random) -> str:
    """A position of a random game that is not over, any number of marks equally likely."""
    while True:
        position = EMPTY
        for _ in range(rng.randrange(9)):
            if not legal_moves(position):
                break
            position = played(position, random_move(position, rng))
        if legal_moves(position):
            return position


def carelessness(position: str) -> float:
    """How much higher the other side's cells are than the mover's, in about standard deviations.

    >>> carelessness("X...O...."), carelessness("XX.....OO")
    (0.8, 2.8)
    """
    mark = mover(position)
    signs = ((cell, sign) for cell, sign in enumerate(position, 1) if sign != ".")
    return sum(cell - 5 if sign != mark else 5 - cell for cell, sign in signs) / 5


def demonstrate(position: str, careless: float, rng: random.Random) -> str:
    """What is shown: whether the player looks at lines, and its move."""
    is_careless = happens(careless + 0.7 * carelessness(position), rng)
    return f"?{careless_move(position)}" if is_careless else f"!{careful_move(position)}"


def is_held_out(position: str, opening_moves: int) -> bool:
    """Whether a position is one of the held-out openings."""
    return position in openings(opening_moves) and fold(position) != "train"


def main(config: Config) -> None:
    """Learn, measure, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed, config.width, config.depth)
    rng = random.Random(derive_seed(config.seed, "tic_tac_toe/warm_start"))

    def draw_shown() -> str:
        while is_held_out(position := draw_position(rng), config.opening_moves):
            pass
        return position

    def draw() -> tuple[Sequence[str], Sequence[str]]:
        positions = [draw_shown() for _ in range(config.batch_size)]
        shown = [demonstrate(position, config.careless, rng) for position in positions]
        return [question(position, "compact") for position in positions], shown

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    positions = [draw_position(rng) for _ in range(NUM_MEASURED)]
    texts = answer(model, tokenizer, [question(p, "compact") for p in positions], max_tokens=2)
    moves = [read_move(text) for (text,) in texts]
    told = list(zip(positions, moves, strict=True))
    urgent = [(p, move) for p, move in told if urgent_moves(p)]
    for name, cases, wanted in (
        ("legal", told, legal_moves),
        ("careful, where it matters", urgent, urgent_moves),
    ):
        share = sum(move in wanted(p) for p, move in cases) / len(cases)
        print(f"{name}: {share:.1%} of {len(cases)} positions", flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
