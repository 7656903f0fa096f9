r"""Mathematical problems as Envs: generated word problems, or rows of public sets.

- GSM8K: `question` and `answer`; the answer is what stands behind the last `####` of `answer`.
- DeepScaleR: `problem` and `answer`, with or without `solution`; the answer is `answer`.
- MATH: `problem` and `solution`; the answer is the last `\boxed{}` of `solution`. `level` and
  `type` become tags.

Every row says by its columns which format it has, so one file may mix them.

The answer stands in the last `\boxed{}`, or in the last `<answer>`; nothing else counts. A gold
answer that is a number (GSM8K) is compared as one, here and in microseconds. All others go to
math-verify in a worker process.

With w the share that is `answered` and a the share of those that are right, correct = w · a, so
Δcorrect = Δw · a_before (form) + w_after · Δa (answers that became right).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal, TypeAlias

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import DataError
from es_cookbook.recipes.generated import FOLDS, Fold, SourcedDatasetBuilder, fold_of_text
from es_cookbook.recipes.math.word_problems import generate_problems
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.messages.thoughts import opened_thought
from es_cookbook.rl.problem_env import (
    PREFILL_DOC,
    Grade,
    ProblemEnv,
    ProblemGroupBuilder,
    digest_of,
    render_prompt,
)
from es_cookbook.rl.rewards.answers import Extract, boxed, extracted, texts_of
from es_cookbook.rl.rewards.base import Reward, graded
from es_cookbook.rl.rewards.format import THINK_OPEN, prompt_ends_in_think, tag_format_reward
from es_cookbook.rl.rewards.matching import Number
from es_cookbook.rl.rewards.math_answers import Math
from es_cookbook.rl.rewards.values import Scalar, printed
from es_cookbook.rl.types import Observation, Tokenizer

MARK = "####"
"""Stands before the answer of a GSM8K row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        question: in words.
        gold: its answer, LaTeX or a number.
        is_number: whether the answer is compared as a number, as GSM8K's are.
        tags: names under which metrics are reported, for example "level 5".
    """

    question: str
    gold: str
    is_number: bool
    tags: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.question

    @property
    def fold(self) -> int:
        """Which fold it belongs to, by its question."""
        return fold_of_text(self.question)


def read_problem(row: Row) -> Problem:
    r"""The problem of a row, whose columns say which format it has.

    Raises:
        DataError: Columns of no known format, or no answer where the format has it.
    """
    found = [name for name, value in row.fields.items() if value is not None]
    is_gsm8k = {"question", "answer"} <= {*found}
    if is_gsm8k:
        _, mark, gold = row.text("answer").rpartition(MARK)
        if not mark:
            raise row.error(
                f"field 'answer' must end in '{MARK} ' and the answer beside a field 'question' "
                "(as GSM8K); an answer alone goes with a field 'problem' (as DeepScaleR)"
            )
        gold = gold.strip().replace(",", "")
    elif {"problem", "answer"} <= {*found}:
        gold = one_answer(row, "answer")
    elif {"problem", "solution"} <= {*found}:
        gold = boxed(row.text("solution"))
        if gold is None:
            raise row.error(r"field 'solution' must have the answer in \boxed{}, as MATH's rows do")
    else:
        raise row.error(
            "a row has question and answer (as GSM8K), problem and solution (MATH), or problem and "
            f"answer (DeepScaleR), found: {', '.join(found) or 'nothing'}"
        )
    question = row.text("question" if is_gsm8k else "problem").strip()
    if not gold:
        raise row.error("the answer is empty")
    return Problem(question, gold, is_gsm8k, _tags(row))


def one_answer(row: Row, name: str) -> str:
    """The answer under `name`, of which there may not be several."""
    try:
        (answer,) = texts_of(row.fields, name)
    except (DataError, ValueError) as error:
        raise row.error(f"field {name!r} must be one answer ({error})") from None
    return answer.strip()


def _tags(row: Row) -> tuple[str, ...]:
    """`level` and `type`, where there are some: "Level 5" is "level 5"."""
    found: list[str] = []
    for name in ("level", "type"):
        value = row.fields.get(name)
        if isinstance(value, Scalar) and value != "":
            text = " ".join(printed(value).lower().split())
            found.append(f"level {text}" if name == "level" and text.isdigit() else text)
    return tuple(found)


PromptStyle: TypeAlias = Literal["plain", "boxed", "tags"]

_BOX = r"\boxed"
_HOW = {
    "plain": "",
    "boxed": "\nWork it out step by step, and put the final answer into \\boxed{}.",
    "tags": "\nShow your work in <think> </think> tags, and return the final answer, and nothing "
    "else, in <answer> </answer> tags.",
}


def question(problem: str, style: PromptStyle) -> str:
    r"""The problem, and how to answer it.

    >>> question("What is 6 * 7?", "boxed").splitlines()[1]
    'Work it out step by step, and put the final answer into \\boxed{}.'
    """
    return problem + _HOW[style]


def gold_text(gold: str, style: PromptStyle, *, prompt_ends_in_think: bool = False) -> str:
    r"""A perfect answer.

    >>> gold_text("42", "plain"), gold_text("42", "tags")
    ('\\boxed{42}', '<think></think><answer>42</answer>')
    """
    if style == "tags":
        text = f"<think></think><answer>{gold}</answer>"
        return text.removeprefix(THINK_OPEN) if prompt_ends_in_think else text
    return f"{_BOX}{{{gold}}}"


@dataclasses.dataclass(eq=False)
class MathEnv(ProblemEnv):
    """One attempt at one problem.

    Attributes:
        observation: the prompt.
        name: what sentences call the problem.
        gold: its answer.
        reward: compares with the field `answer` of a row.
        style: of the prompt; says where the answer stands.
        format_weight: share of the reward for the form.
        prompt_ends_in_think: the prompt already holds the opening `<think>`.
    """

    observation: Observation
    name: str
    gold: str
    reward: Reward
    style: PromptStyle
    format_weight: float
    prompt_ends_in_think: bool = False

    @override
    async def graded(self, text: str) -> Grade:
        r"""Reward and metrics.

        `correct`: the answer is the row's. `format`: the share of the four tags that are correctly
        placed, or whether there is exactly one box, closed and not empty. `answered`: an answer was
        found, right or wrong. `math_timeouts`: math-verify was not done in time.
        """
        answered = bool(extracted(text, extract_of(self.style)))
        correct = await graded(self.reward, text, {"answer": self.gold}, self.name)
        if self.style == "tags":
            form = tag_format_reward(text, prompt_ends_in_think=self.prompt_ends_in_think)
        else:
            form = float(answered and text.count(_BOX) == 1)
        weight = self.format_weight
        metrics = {"correct": correct.reward, "format": form, "answered": float(answered)}
        reward = (1 - weight) * correct.reward + weight * form
        return Grade(reward, {**metrics, **correct.metrics}, correct.logs)


def extract_of(style: PromptStyle) -> Extract:
    """Where answers to a prompt stand."""
    return "answer" if style == "tags" else "boxed"


def reward_of(style: PromptStyle, *, is_number: bool) -> Reward:
    """What compares answers to a prompt."""
    return (Number if is_number else Math)(extract=extract_of(style))


@chz.chz
class MathDatasetBuilder(SourcedDatasetBuilder[Problem]):
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

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "format_weight", at_least=0, at_most=1)

    @override
    def check(self) -> None:
        if self.grading == "math":
            reward_of(self.prompt, is_number=False).check()
        super().check()

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        """They are read from their rows, as problems of others are."""
        others = [each for each in range(FOLDS) if each != self.fold]
        for problem in generate_problems(seed, others if fold == "train" else [self.fold]):
            name = f"generated problem {problem.question!r}"
            yield name, read_problem(Row(name, problem.row))

    @override
    def read(self, row: Row, tokenizer: "Tokenizer | None") -> Problem:
        return read_problem(row)

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem.question, self.prompt)
        tokens_T = render_prompt(tokenizer, text, chat=True, prefill=self.prefill)
        ends_in_think = prompt_ends_in_think(tokenizer, tokens_T)
        is_number = problem.is_number if self.grading == "auto" else self.grading == "number"
        reward = reward_of(self.prompt, is_number=is_number)
        try:
            reward.check_row({"answer": problem.gold})
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        given = name, problem.gold, reward, self.prompt, self.format_weight, ends_in_think
        return ProblemGroupBuilder(
            functools.partial(MathEnv, Observation(tokens_T), *given),
            name,
            gold=gold_text(problem.gold, self.prompt, prompt_ends_in_think=ends_in_think),
            problem_tags=problem.tags,
            contents=(digest_of(problem.key),),
            opened=opened_thought(tokenizer, tokens_T, self.prefill),
        )
