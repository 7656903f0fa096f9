"""Expressions with three numbers, computed by a tool that knows two: a pocket calculator.

Typing `12+34*5` from left to right gives a wrong result: the product comes first. The results need
the tool, since a product of two numbers with two digits is more than a small model computes.
"""

import dataclasses
import functools
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.names import built_field
from es_cookbook.rl.data.generated import Fold, GeneratedDatasetBuilder, fold_of, problems_of
from es_cookbook.rl.messages.chat import Chat, ChatOptions, Limit
from es_cookbook.rl.messages.message import Form, Message, ToolCall, call_text
from es_cookbook.rl.messages.message_env import Reply, ToolEnv
from es_cookbook.rl.messages.tools import Tool, tool
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.answers import last_number
from es_cookbook.rl.types import Tokenizer

PromptStyle: TypeAlias = Literal["compact", "words"]
Order: TypeAlias = Literal["left", "right"]
"""The operation that comes first."""

_OPERATION = re.compile(r"\s*(\d{1,12})\s*([-+*])\s*(\d{1,12})\s*")


@tool(quick=True)
def calculate(expression: str) -> int:
    """A pocket calculator: one operation with two numbers.

    Args:
        expression: two whole numbers with +, - or * between them, such as 12*3
    """
    found = _OPERATION.fullmatch(expression)
    if found is None:
        raise ValueError("one operation with two whole numbers is accepted, such as 12*3")
    a, operation, b = int(found[1]), found[2], int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A sum or difference and a product: `a+b*c`, `a*b+c` or `a*b-c`."""

    numbers: tuple[int, int, int]
    operations: Literal["+*", "*+", "*-"]

    @property
    def expression(self) -> str:
        (a, b, c), (first, second) = self.numbers, self.operations
        return f"{a}{first}{b}{second}{c}"

    @property
    def fold(self) -> Fold:
        return fold_of("calculator", *self.numbers, *map(ord, self.operations))

    @property
    def right_order(self) -> Order:
        return "right" if self.operations == "+*" else "left"

    def steps(self, order: Order) -> tuple[str, str, str]:
        """Return two operations in this order, and the result."""
        (a, b, c), (first, second) = self.numbers, self.operations
        inner = f"{a}{first}{b}" if order == "left" else f"{b}{second}{c}"
        value = calculate.function(inner)
        outer = f"{value}{second}{c}" if order == "left" else f"{a}{first}{value}"
        return inner, outer, str(calculate.function(outer))

    @property
    def answer(self) -> str:
        return self.steps(self.right_order)[-1]


def generate_problems(seed: int, fold: Fold) -> Iterator[Problem]:
    """Yield distinct problems of one fold, in an order that a seed decides."""
    return problems_of("calculator", seed, fold, draw_problem)


def draw_problem(rng: random.Random) -> Problem:
    """Draw a problem, of any fold; three in four have the product last."""
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    return Problem((a, b, c), rng.choice(("+*", "+*", "+*", "*+", "*-")))


def chat_of(problem: Problem, order: Order, form: Form) -> tuple[str, ...]:
    """Return the model's turns: two calls and the answer."""
    *expressions, answer = problem.steps(order)
    calls = [ToolCall("calculate", {"expression": text}) for text in expressions]
    return (*(call_text(call, form) for call in calls), answer)


class QuestionEnv(ToolEnv):
    """One attempt at a question, with tools; a rollout that reaches a limit answers nothing."""

    def __init__(self, chat: Chat, question: str) -> None:
        super().__init__(chat)
        self._question = question

    @override
    async def initial_messages(self) -> Sequence[Message]:
        return [Message("user", self._question)]

    @override
    async def answer(self, text: str) -> Reply:
        return self.graded(text)

    @override
    def out_of_room(self, limit: Limit) -> Reply:
        return self.graded("")

    @abstractmethod
    def graded(self, text: str) -> Reply:
        """Grade the answer, which ends the rollout."""

    def scored(self, *, correct: bool, well_formed: bool, **metrics: float) -> Reply:
        """Return the end of a rollout, whose calls count towards being well-formed."""
        failed = self.counts["malformed_calls"] + self.counts["tool_errors"]
        metrics |= {"correct": float(correct), "well_formed": float(well_formed and not failed)}
        return Reply(float(correct), done=True, metrics=metrics)


class CalculatorEnv(QuestionEnv):
    """One attempt at one expression."""

    def __init__(self, chat: Chat, problem: Problem, style: PromptStyle) -> None:
        super().__init__(chat, question(problem, style))
        self._problem = problem

    @override
    def graded(self, text: str) -> Reply:
        value, is_number = last_number(text), re.fullmatch(r"-?\d+", text) is not None
        correct, other = value == int(self._problem.answer), self._problem.steps("left")[-1]
        left_to_right = float(not correct and value == int(other))
        return self.scored(correct=correct, well_formed=is_number, left_to_right=left_to_right)


def question(problem: Problem, style: PromptStyle) -> str:
    """Return the question in words, or as the bundled model knows it.

    >>> question(Problem((12, 34, 5), "+*"), "compact")
    '12+34*5='
    """
    if style == "compact":
        return f"{problem.expression}="
    return (
        f"What is {problem.expression}? Compute with the calculator, one operation a call, and "
        "then answer with the number alone."
    )


@chz.chz
class ToolDatasetBuilder(GeneratedDatasetBuilder):
    """Generated questions that need a tool."""

    prompt: PromptStyle = chz.field(
        default="compact",
        doc="compact: for the bundled model, which knows the tool without a description; words: "
        "for a model that reads",
    )
    chat: ChatOptions = built_field(
        ChatOptions, "turns and lengths of chats, and where the tool is described", max_turns=4
    )

    def chat_with(self, used: Tool, tokenizer: Tokenizer) -> Chat:
        """Return the chat in which a tool can be called."""
        tools = {"tools_in": "nowhere"} if self.prompt == "compact" else {}
        return Chat(tokenizer, chz.replace(self.chat, **tools), [used])


@chz.chz
class CalculatorDatasetBuilder(ToolDatasetBuilder):
    """Expressions for training and, disjoint from them, for the held-out test."""

    num_test: int = chz.field(default=400, doc="most held-out problems used; 0 for none")

    @override
    def generated(
        self, seed: int, fold: Fold, tokenizer: Tokenizer
    ) -> Iterator[ProblemGroupBuilder]:
        chat = self.chat_with(calculate, tokenizer)
        for problem in generate_problems(seed, fold):
            yield ProblemGroupBuilder(
                functools.partial(CalculatorEnv, chat, problem, self.prompt),
                f"generated problem {problem.expression}",
                gold=chat_of(problem, problem.right_order, chat.form),
            )
