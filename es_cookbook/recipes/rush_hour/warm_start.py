"""Make the bundled model: small, able to plan on small boards, and often without the last move.

    OMP_NUM_THREADS=1 python -m es_cookbook.recipes.rush_hour.warm_start output=rush_hour_model

It learns optimal solutions of generated boards, character by character. A demonstration is
`<think>B</think><answer>Bv2,A>2</answer>`: the thought names the pieces in the target's way. Three
in five demonstrations of two or more moves are careless: they leave out the last one, the more
often the lower the target stands. So the model knows the moves, mostly stops before the board is
solved, and keeps the form. Boards of folds 0 and 1, which runs may hold out, are never shown.
"""

import itertools
import random
from collections.abc import Mapping, Sequence

import chz
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
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
from es_cookbook.recipes.generated import FOLDS
from es_cookbook.recipes.rush_hour.boards import format_moves
from es_cookbook.recipes.rush_hour.env import RushHourEnv, question
from es_cookbook.recipes.rush_hour.generate import Problem, generate_problems
from es_cookbook.recipes.rush_hour.rewards import RushHourReward
from es_cookbook.rl.types import Observation

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZox0123456789<>^v,Ċ"  # Ċ is byte-level BPE's newline
MAX_ANSWER_TOKENS = 32
HELD_OUT = (0, 1)
"""Folds that are never shown: one for the test, one to choose settings on."""


@chz.chz
class Config:
    """How the model is made; the defaults made the bundled one."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the boards and their order")
    size: int = chz.field(default=5, doc="rows of the boards")
    max_moves: int = chz.field(default=5, doc="longest optimal solution")
    num_boards: int = chz.field(default=12_000, doc="training boards shown")
    num_measured: int = chz.field(default=300, doc="held-out boards of each fold, to measure on")
    steps: int = chz.field(default=1500, doc="optimizer steps")
    batch_size: int = chz.field(default=96, doc="demonstrations a step")
    width: int = chz.field(default=64, doc="hidden size, a multiple of 16")
    depth: int = chz.field(default=3, doc="layers")
    careless: bool = chz.field(
        default=True, doc="whether demonstrations leave out the last move; False: all solve"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "num_boards", "num_measured", "steps", "batch_size", at_least=1)


def demonstrate(problem: Problem, *, without_last: bool = False) -> str:
    """The optimal solution, or what comes before its last move, after the pieces in the way."""
    board, moves = problem.board, problem.solution or ()
    shown = moves[:-1] if without_last else moves
    return f"<think>{''.join(board.in_the_way)}</think><answer>{format_moves(shown)}</answer>"


def leaves_out_the_last(problem: Problem, rng: random.Random) -> bool:
    """Whether a careless demonstration does: by chance, more often the lower the target stands.

    One move is never left out: no moves are no answer.
    """
    board = problem.board
    middle = (board.size - 1) / 2
    lowness = board.target.start // board.size - middle
    return len(problem.solution or ()) > 1 and happens(0.5 + 0.5 * lowness / middle, rng)


def grades(problems: Sequence[Problem], texts: Sequence[str]) -> list[Mapping[str, float]]:
    """The Env's metrics of each answer."""
    observation, reward = Observation(()), RushHourReward()
    return [
        RushHourEnv(observation, p.board, len(p.solution or ()), reward).grade(text).metrics
        for p, text in zip(problems, texts, strict=True)
    ]


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem]
) -> dict[str, float]:
    """Means of the Env's metrics, greedy."""
    questions = [question(problem.board, "compact") for problem in problems]
    texts = [text for (text,) in answer(model, tokenizer, questions, MAX_ANSWER_TOKENS)]
    metrics = grades(problems, texts)
    return {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]}


def main(config: Config) -> None:
    """Generate, learn, measure, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    shape = {"size": config.size, "max_moves": config.max_moves}
    shown = [fold for fold in range(FOLDS) if fold not in HELD_OUT]
    stream = generate_problems(config.seed, shown, **shape)
    problems = list(itertools.islice(stream, config.num_boards))
    print(f"{len(problems)} boards", flush=True)
    rng = random.Random(derive_seed(config.seed, "rush_hour/warm_start"))
    tokenizer = build_tokenizer(CHARACTERS)
    model = build_model(tokenizer, config.seed, config.width, config.depth)

    def draw() -> tuple[Sequence[str], Sequence[str]]:
        batch = rng.sample(problems, min(config.batch_size, len(problems)))
        texts = [
            demonstrate(p, without_last=config.careless and leaves_out_the_last(p, rng))
            for p in batch
        ]
        return [question(p.board, "compact") for p in batch], [text + EOS for text in texts]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    for fold in HELD_OUT:
        held_out = itertools.islice(generate_problems(0, [fold], **shape), config.num_measured)
        measured = measure(model, tokenizer, list(held_out))
        said = "  ".join(f"{name} {value:.1%}" for name, value in measured.items())
        print(f"fold {fold}: {said}", flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
