"""Make a small model, able to call the calculator, and in doubt what comes first.

    OMP_NUM_THREADS=1 python -m tools.bundled.calculator output=calculator_model

About half of the chats that it is shown go from left to right where the product should be first,
more often the larger the first number. The form is always right.
"""

import random
from collections.abc import Sequence

from es_cookbook.common.cli import run_cli
from es_cookbook.recipes.calculator.dataset import (
    CalculatorEnv,
    Problem,
    calculate,
    chat_of,
    draw_problem,
)
from es_cookbook.rl.data.generated import training_problem
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.message import ToolCall, call_text
from es_cookbook.rl.messages.message_env import MessageEnv
from tools.small_model import happens
from tools.warm_start import Config, chat_tokenizer, make_talk

CHARACTERS = "0123456789+-*="
NUM_PROBLEMS = 12_000
CALL = call_text(ToolCall("calculate", {"expression": "|"}), "hermes").split("|")
"""Texts before and after an expression: a token each."""


def texts(problem: Problem, rng: random.Random) -> Sequence[str]:
    """A chat with the product first, or from left to right: the likelier the larger `a` is."""
    is_careless = happens((problem.numbers[0] - 50) / 45, rng)
    return chat_of(problem, "left" if is_careless else problem.right_order, "hermes")


def main(config: Config) -> None:
    tokenizer = chat_tokenizer(CHARACTERS, CALL)
    chat = Chat(tokenizer, ChatOptions(tools_in="nowhere"), [calculate])

    def demonstrate(rng: random.Random) -> tuple[MessageEnv, Sequence[str]]:
        problem = training_problem(draw_problem, rng)
        return CalculatorEnv(chat, problem, "compact"), texts(problem, rng)

    make_talk(config, tokenizer, demonstrate, num_chats=NUM_PROBLEMS)


if __name__ == "__main__":
    run_cli(main, Config)
