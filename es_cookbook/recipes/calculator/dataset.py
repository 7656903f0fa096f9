"""Expressions as a dataset: generated problems, and held-out ones that no seed trains on."""

import functools
from collections.abc import Iterator

import chz
from typing_extensions import override

from es_cookbook.recipes.calculator.env import (
    CalculatorEnv,
    PromptStyle,
    calculate,
    chat_of,
    generate_problems,
)
from es_cookbook.recipes.generated import Fold, GeneratedDatasetBuilder
from es_cookbook.recipes.settings import built_field
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Tokenizer


@chz.chz
class CalculatorDatasetBuilder(GeneratedDatasetBuilder):
    """Expressions for training and, disjoint from them, for the held-out test."""

    prompt: PromptStyle = chz.field(
        default="compact", doc="compact: for the bundled model; words: for a model that reads"
    )
    chat: ChatOptions = built_field(
        functools.partial(ChatOptions, max_turns=4, tools_in="nowhere"),
        "how chats go; the bundled model knows the tool: tools_in=template tells others of it",
    )

    @override
    def builders(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        chat = Chat(tokenizer, self.chat, [calculate])
        for problem in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(CalculatorEnv, chat, problem, self.prompt),
                f"generated problem {problem.expression}",
                gold=chat_of(problem, problem.right_order, chat.form),
            )
