r"""Mathematical problems as Envs: generated word problems, or rows of public sets.

Rows have the formats of `es_cookbook.plugins.math.rows`. A model's answer stands in the last
`\boxed{}`, or in the last `<answer>`; nothing else counts. A gold answer that is a number (GSM8K)
is compared as one, here and in microseconds. All others go to math-verify in a worker process.

With w the share that is `answered` and a the share of those that are right, correct = w · a, so
Δcorrect = Δw · a_before (form) + w_after · Δa (answers that became right).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.plugins.math.reward import Math
from es_cookbook.plugins.math.rows import MathProblem, read_problem
from es_cookbook.recipes.math.word_problems import generate_problems
from es_cookbook.rl.data.generated import Fold, SourcedDatasetBuilder
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import check_row
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.prompts import PREFILL_DOC, render_observation
from es_cookbook.rl.rewards.answers import Extract, extracted
from es_cookbook.rl.rewards.base import Reward, graded
from es_cookbook.rl.rewards.format import THINK_OPEN, tag_format_reward
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.types import Observation, Tokenizer

PromptStyle: TypeAlias = Literal["plain", "boxed", "tags"]

_BOX = r"\boxed"
_HOW = {
    "plain": "",
    "boxed": "\nWork it out step by step, and put the final answer into \\boxed{}.",
    "tags": "\nShow your work in <think> </think> tags, and return the final answer, and nothing "
    "else, in <answer> </answer> tags.",
}


def question(problem: str, style: PromptStyle) -> str:
    r"""Return the problem, and how to answer it.

    >>> question("What is 6 * 7?", "boxed").splitlines()[1]
    'Work it out step by step, and put the final answer into \\boxed{}.'
    """
    return problem + _HOW[style]


def gold_text(gold: str, style: PromptStyle) -> str:
    r"""Return a perfect answer.

    >>> gold_text("42", "plain"), gold_text("42", "tags")
    ('\\boxed{42}', '<think></think><answer>42</answer>')
    """
    if style == "tags":
        return f"<think></think><answer>{gold}</answer>"
    return f"{_BOX}{{{gold}}}"


@dataclasses.dataclass(eq=False)
class MathEnv(ProblemEnv):
    """One attempt at one problem.

    Attributes:
        observation: the prompt.
        name: name of the problem in messages.
        gold: its answer.
        reward: compares with the field `answer` of a row.
        style: style of the prompt; says where the answer stands.
        format_weight: share of the reward for the form.
    """

    observation: Observation
    name: str
    gold: str
    reward: Reward
    style: PromptStyle
    format_weight: float

    @override
    async def graded(self, text: str) -> Grade:
        r"""Return reward and metrics.

        `correct`: the answer is the row's. `format`: the share of the four tags that are correctly
        placed, or whether there is exactly one box, closed and not empty. `answered`: an answer was
        found, right or wrong. `math_timeouts`: math-verify was not done in time.
        """
        answered = bool(extracted(text, extract_of(self.style)))
        correct = await graded(self.reward, text, {"answer": self.gold}, self.name)
        if self.style == "tags":
            in_think = self.observation.opened == THINK_OPEN
            form = tag_format_reward(text, prompt_ends_in_think=in_think)
        else:
            form = float(answered and text.count(_BOX) == 1)
        weight = self.format_weight
        metrics = {"correct": correct.reward, "format": form, "answered": float(answered)}
        reward = (1 - weight) * correct.reward + weight * form
        return Grade(reward, {**metrics, **correct.metrics}, correct.logs)


def extract_of(style: PromptStyle) -> Extract:
    """Return where an answer to a prompt is found."""
    return "answer" if style == "tags" else "boxed"


def reward_of(style: PromptStyle, *, is_number: bool) -> Reward:
    """Return the reward that compares answers to a prompt."""
    return (Number if is_number else Math)(extract=extract_of(style))


@chz.chz
class MathDatasetBuilder(SourcedDatasetBuilder[MathProblem]):
    """Mathematical problems for training and, disjoint from them, for the held-out test."""

    num_train: int = chz.field(default=10_000, doc="most training problems used")
    prompt: PromptStyle = chz.field(
        default="plain",
        doc=r"plain: the question alone, answered in \boxed{}, for the bundled model; boxed: asks "
        "for the box; tags: asks for <think> and <answer>",
    )
    prefill: str = chz.field(default="", doc=PREFILL_DOC)
    grading: Literal["auto", "number", "math"] = chz.field(
        default="auto",
        doc="number: compare the last number of the answer; math: by math-verify; auto: GSM8K's "
        "rows as numbers, others by math-verify",
    )
    format_weight: float = chz.field(default=0.1, doc="share of the reward for the form")

    _format_weight = in_range("format_weight", at_least=0, at_most=1)

    @override
    def check(self) -> None:
        if self.grading == "math":
            reward_of(self.prompt, is_number=False).check()
        super().check()

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, MathProblem]]:
        """Generate word problems, read from their rows as those of public sets are."""
        for problem in generate_problems(seed, self.folds(fold)):
            name = f"generated problem {problem.question!r}"
            yield name, read_problem(Row(name, problem.row))

    @override
    def read(self, row: Row, tokenizer: "Tokenizer | None") -> MathProblem:
        return read_problem(row)

    @override
    def builder(self, name: str, problem: MathProblem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem.question, self.prompt)
        observation = render_observation(tokenizer, text, chat=True, prefill=self.prefill)
        is_number = problem.is_number if self.grading == "auto" else self.grading == "number"
        reward = reward_of(self.prompt, is_number=is_number)
        check_row(reward, Row(name, {"answer": problem.gold}))
        make_env = functools.partial(
            MathEnv, observation, name, problem.gold, reward, self.prompt, self.format_weight
        )
        return ProblemGroupBuilder(
            make_env,
            name,
            gold=gold_text(problem.gold, self.prompt).removeprefix(observation.opened),
            problem_tags=problem.tags,
            contents=(digest_of(problem.key),),
        )
