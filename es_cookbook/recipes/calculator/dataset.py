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
from es_cookbook.recipes.recipe import built_field
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Tokenizer


@chz.chz
class CalculatorDatasetBuilder(GeneratedDatasetBuilder):
    """Expressions for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=400, doc="most held-out problems used; 0 for none")
    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, which knows the tool and is told of none; words: for "
        "a model that reads",
    )
    chat: ChatOptions = built_field(
        functools.partial(ChatOptions, max_turns=4),
        "how chats go, and where words tell of the tool",
    )

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        told = {"tools_in": "nowhere"} if self.prompt == "compact" else {}
        chat = Chat(tokenizer, chz.replace(self.chat, **told), [calculate])
        for problem in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(CalculatorEnv, chat, problem, self.prompt),
                f"generated problem {problem.expression}",
                gold=chat_of(problem, problem.right_order, chat.form),
            )
