"""Coding problems as an Env: the prompt, the answer's code, and its tests in the sandbox.

Tests come from strangers as the code does, so both run in the sandbox, and the code cannot fake the
verdict: what a program writes is compared outside, and asserts have a process of their own
(`es_cookbook.rl.grading.asserts`). The genomes of a group often answer alike; an answer is graded
once per group.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

import anyio
from typing_extensions import override

from es_cookbook.recipes.code.problems import Problem
from es_cookbook.rl.grading.asserts import run_asserts
from es_cookbook.rl.grading.sandbox import Limits, Ran, run_code
from es_cookbook.rl.problem_env import Grade, ProblemGroupBuilder, digest_of
from es_cookbook.rl.rewards.format import extract_answer
from es_cookbook.rl.timeouts import nobody_has_control
from es_cookbook.rl.types import Action, Env, EnvGroup, Observation, StepResult

Reward: TypeAlias = Literal["share", "all"]
Grader: TypeAlias = Callable[[str | None], Awaitable[Grade]]
"""Grades an answer's code, None where it has none."""
_FENCE = "```"


def question(problem: Problem, shown_tests: int) -> str:
    """The problem in words: an expression's shorthand stays as it is.

    >>> question(Problem("Double x.", ("assert double(2) == 4",)), 1).splitlines()[2]
    'assert double(2) == 4'
    """
    if problem.prefix:
        return problem.task
    if problem.cases:
        how = "Write a Python program that reads its input from stdin and prints the answer."
    else:
        shown = "\n".join(problem.asserts[:shown_tests])
        how = f"Write Python code that passes tests such as:\n{shown}" if shown else "Use Python."
    where = f"Put the whole code into one block between {_FENCE}python and {_FENCE}."
    return f"{problem.task}\n{how}\n{where}"


def extract_code(text: str) -> str | None:
    r"""The last `<answer>`, and in it or else in the whole text the last closed fenced block.

    >>> extract_code("So:\n```python\nx = 1\n```\nor\n```\nx = 2\n```\ndone")
    'x = 2\n'
    >>> extract_code("<answer> 1 + 1 </answer>"), extract_code("x = 1")
    ('1 + 1', None)
    """
    answer = extract_answer(text)
    parts = (text if answer is None else answer).split(_FENCE)
    if len(parts) < 3:
        return answer
    block = parts[(len(parts) - 3) // 2 * 2 + 1]
    language, line_end, code = block.partition("\n")
    return code if line_end and (not language.strip() or language.strip().isalnum()) else block


async def grade_code(
    problem: Problem, code: str | None, reward: Reward = "share", limits: Limits | None = None
) -> Grade:
    """Run the tests of a problem in the sandbox.

    Metrics: `solved` (every test passes), `passed` (the share of tests), `answered` (there is
    code), `timed_out`.

    Raises:
        SandboxError: There is no sandbox here, or it did not start.
    """
    if code is None:
        passed, ran = [False], None
    elif problem.cases:
        passed, ran = await _run_cases(problem, code, limits)
    else:
        passed, ran = await run_asserts(
            problem.prefix + code,
            problem.asserts,
            setup=problem.setup,
            reference=problem.reference,
            task=problem.prefix + problem.task,
            limits=limits,
        )

    share = sum(passed) / len(passed)
    solved = float(all(passed))
    metrics = {
        "solved": solved,
        "passed": share,
        "answered": float(code is not None),
        "timed_out": float(ran is not None and ran.ended == "deadline"),
    }
    said = ran.stderr[-1000:] if ran is not None else ""
    return Grade(share if reward == "share" else solved, metrics, {"stderr": said} if said else {})


async def _run_cases(
    problem: Problem, code: str, limits: Limits | None
) -> tuple[list[bool], Ran | None]:
    """Each case in a sandbox of its own; after one that takes too long the rest have failed."""
    passed, ran = [False] * len(problem.cases), None
    for index, (given, expected) in enumerate(problem.cases):
        ran = await run_code(problem.prefix + code, given, limits)
        ended_well = ran.ended == "exit" and ran.exit_code == 0
        passed[index] = ended_well and _lines(ran.stdout) == _lines(expected)
        if ran.ended == "deadline":
            break
    return passed, ran


def _lines(text: str) -> list[str]:
    """The lines, without white space at their ends and at the end of the whole."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodeEnv(Env):
    """One attempt at one problem."""

    def __init__(self, observation: Observation, grade: Grader) -> None:
        self.observation = observation
        self._grade = grade

    async def initial_observation(self) -> Observation:
        return self.observation

    async def step(self, action: Action) -> StepResult:
        """Run the tests and end the rollout."""
        grade = await self._grade(extract_code(action.text))
        return StepResult(grade.reward, done=True, metrics=grade.metrics, logs=grade.logs)


@dataclasses.dataclass(frozen=True, slots=True)
class CodeProblem(ProblemGroupBuilder):
    """One problem with its tests; attempts at it share what has been graded."""

    problem: Problem = dataclasses.field(kw_only=True)
    observation: Observation = dataclasses.field(kw_only=True)
    grade: Grader = dataclasses.field(kw_only=True)

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        grades: dict[str | None, Grade] = {}
        locks: defaultdict[str | None, anyio.Lock] = defaultdict(anyio.Lock)

        async def grade(code: str | None) -> Grade:
            """Whoever asks for the same at the same time waits for it."""
            with nobody_has_control():
                await locks[code].acquire()
            try:
                if code not in grades:
                    grades[code] = await self.grade(code)
                return grades[code]
            finally:
                locks[code].release()

        return EnvGroup([CodeEnv(self.observation, grade) for _ in range(num_envs)])


def coding_problem(
    observation: Observation, problem: Problem, reward: Reward, limits: Limits, name: str
) -> CodeProblem:
    """A problem as it is asked.

    Args:
        observation: the prompt.
        problem: with its tests.
        reward: "share" of the tests, or 1 for "all" of them.
        limits: for all asserts together, or for each case.
        name: what error messages call the problem, for example "train.jsonl, line 3".
    """
    grade = functools.partial(grade_code, problem, reward=reward, limits=limits)
    return CodeProblem(
        functools.partial(CodeEnv, observation, grade),
        name,
        contents=(digest_of(problem.key), digest_of(observation.tokens_T)),
        problem=problem,
        observation=observation,
        grade=grade,
    )
