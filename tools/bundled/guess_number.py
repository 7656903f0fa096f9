"""Make the bundled model: small, and between halving the range and going up from its edge.

    OMP_NUM_THREADS=1 python -m tools.bundled.guess_number output=guess_model

About half of the guesses that it is shown are the lowest number that is left, more often the larger
that is; the others are in the middle. The form is always right.
"""

import random
from collections.abc import Sequence

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.guess_number.dataset import (
    HIGHEST,
    GuessEnv,
    Problem,
    draw_problem,
    narrowed,
)
from es_cookbook.rl.data.generated import training_problem
from es_cookbook.rl.messages.chat import Chat
from es_cookbook.rl.messages.message_env import MessageEnv
from tools.small_model import happens
from tools.warm_start import Config, chat_tokenizer, make_talk

CHARACTERS = "0123456789.=+-?"
NUM_PROBLEMS = 20_000


def guesses(problem: Problem, rng: random.Random) -> Sequence[str]:
    """Halving the range, or guessing its lowest number: the likelier the larger that is."""
    low, high, said = problem.low, problem.high, list[int]()
    while len(said) < problem.guesses and (not said or said[-1] != problem.number):
        is_careless = happens(1.5 * (low / HIGHEST - 0.35), rng)
        said.append(low if is_careless else (low + high) // 2)
        low, high = narrowed(low, high, said[-1], problem.number)
    return [str(guess) for guess in said]


def main(config: Config) -> None:
    tokenizer = chat_tokenizer(CHARACTERS)
    chat = Chat(tokenizer)

    def demonstrate(rng: random.Random) -> tuple[MessageEnv, Sequence[str]]:
        problem = training_problem(draw_problem, rng)
        return GuessEnv(chat, problem, "compact"), guesses(problem, rng)

    sizes = {"num_chats": NUM_PROBLEMS, "batch_size": 128, "steps": 800, "depth": 3}
    make_talk(config, tokenizer, demonstrate, **sizes)


if __name__ == "__main__":
    run_cli(main, Config)
