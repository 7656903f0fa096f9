"""Numbers to guess as a dataset: generated problems, and held-out ones that no seed trains on."""

import functools
from collections.abc import Iterator

import chz
from typing_extensions import override

from es_cookbook.recipes.generated import Fold, GeneratedDatasetBuilder
from es_cookbook.recipes.guess_number.env import GuessEnv, PromptStyle, generate_problems, halving
from es_cookbook.recipes.recipe import built_field
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Tokenizer


@chz.chz
class GuessNumberDatasetBuilder(GeneratedDatasetBuilder):
    """Numbers to guess, for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=400, doc="most held-out problems used; 0 for none")
    prompt: PromptStyle = chz.field(
        default="compact", doc="compact: for the bundled model; words: for a model that reads"
    )
    chat: ChatOptions = built_field(ChatOptions, "how chats go")

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        chat = Chat(tokenizer, self.chat)
        for problem in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(GuessEnv, chat, problem, self.prompt),
                f"generated problem {problem.number} of {problem.low} to {problem.high}",
                gold=tuple(map(str, halving(problem))),
            )
