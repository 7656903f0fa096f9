"""A generator's problem as an Env: the prompt, the grade and its metrics."""

import math
import re
from typing import Literal, TypeAlias

from typing_extensions import override

from es_cookbook.common.errors import WorkerError, WorkerTimeoutError
from es_cookbook.recipes.logic.generators import Problem, score, score_in_limits, scorer
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.problem_env import Grade, ProblemEnv
from es_cookbook.rl.rewards.answers import extracted
from es_cookbook.rl.types import Observation

PromptStyle: TypeAlias = Literal["compact", "words"]
RewardKind: TypeAlias = Literal["score", "correct"]

COMPACT_AFTER = {"chain_sum": "problem: "}
"""Generator -> where the part of its questions begins that a compact prompt asks."""

_WORDS = (
    "\n\nShow your work in <think> </think> tags. And return only the final answer, in the form "
    "asked for, in <answer> </answer> tags."
)
_NUMBER = re.compile(r"-?[0-9]+")


def question(problem: Problem, style: PromptStyle) -> str:
    """The problem with a sentence on tags ("words"), or alone, for small models ("compact")."""
    if style == "words":
        return problem.question + _WORDS
    return problem.question.rpartition(COMPACT_AFTER.get(problem.source.task, "\0"))[2]


class LogicEnv(ProblemEnv):
    """One attempt at one problem."""

    def __init__(
        self,
        observation: Observation,
        problem: Problem,
        style: PromptStyle,
        reward: RewardKind,
        timeout: float,
    ) -> None:
        super().__init__(observation)
        self.problem = problem
        self.style: PromptStyle = style
        self.reward: RewardKind = reward
        self.timeout = timeout

    @override
    def grade(self, text: str) -> Grade:
        """The grade of an answer whose score is computed here: of a cheap generator's."""
        answer = self._answer(text)
        found = score(scorer(self.problem.source), answer or "", self.problem.entry)
        return self._grade(answer, found, late=False)

    @override
    async def graded(self, text: str) -> Grade:
        """Metrics: `correct`, `score`, `well_formed`, `not_scored`, `late`."""
        own = scorer(self.problem.source)
        answer = self._answer(text)
        if own.is_cheap or not answer:
            return self.grade(text)
        entry = self.problem.entry
        try:
            found = await in_worker(score_in_limits, own, answer, entry, timeout=self.timeout)
        except WorkerError as error:
            return self._grade(answer, None, late=isinstance(error, WorkerTimeoutError))
        return self._grade(answer, found, late=False)

    def _answer(self, text: str) -> str | None:
        return extracted(text, "text" if self.style == "compact" else "answer")

    def _grade(self, answer: str | None, found: float | None, *, late: bool) -> Grade:
        value = found or 0.0
        correct = float(math.isclose(value, 1.0))
        metrics = {
            "correct": correct,
            "score": value,
            "well_formed": float(self._is_well_formed(answer)),
            "not_scored": float(found is None),
            "late": float(late),
        }
        return Grade(value if self.reward == "score" else correct, metrics)

    def _is_well_formed(self, answer: str | None) -> bool:
        """Whether there is an answer, and a whole number where one is asked for."""
        if not answer or not _NUMBER.fullmatch(self.problem.gold):
            return bool(answer)
        return _NUMBER.fullmatch(answer) is not None
