"""Coding problems as Envs: generated expressions, or rows in the formats of MBPP and APPS.

A problem is judged by asserts (as in MBPP) or by what a program writes for an input (as in APPS).
Generated ones are for the bundled model of single characters: complete `return ...` with an
expression, here of given numbers, so that the test passes.

Tests come from strangers as the code does, so both run in the sandbox, and the code cannot fake the
verdict: a program's output is compared outside, and asserts have a separate process
(`es_cookbook.recipes.code.asserts`). The genomes of a group often answer alike; an answer is graded
once per group.

Every row's own solution runs in the sandbox before training: tests that it does not pass, or that
ask for what the sandbox does not give, are found before the first generation.
"""

import dataclasses
import functools
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal, TypeAlias, cast

import anyio
import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError
from es_cookbook.common.names import built_field
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.code.asserts import asked_names, run_asserts
from es_cookbook.rl.data.generated import FOLDS, Fold, SourcedDatasetBuilder, distinct
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.grading.sandbox import Limits, Ran, check_sandbox, run_code
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, digest_of
from es_cookbook.rl.prompts import render_observation
from es_cookbook.rl.rewards.format import last_answer
from es_cookbook.rl.timeouts import clock_stopped
from es_cookbook.rl.types import EnvGroup, Observation, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem, with asserts or with cases.

    Attributes:
        task: the question, in words or in the bundled model's shorthand.
        asserts: statements that must raise nothing after the code.
        cases: input of a program, and its expected output.
        setup: run before the asserts.
        prefix: code that an answer completes.
        solution: an answer that passes, where one is known.
    """

    task: str
    asserts: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()
    setup: str = ""
    prefix: str = ""
    solution: str | None = None

    @property
    def key(self) -> str:
        return self.task

    @property
    def reference(self) -> str | None:
        """Code that defines the names that an answer must define."""
        return self.prefix or self.solution

    @property
    def fold(self) -> int:
        """The problem's fold, a pure function of the question."""
        digest = hashlib.blake2b(self.task.encode(errors="replace"), digest_size=8).digest()
        return int.from_bytes(digest) % FOLDS


def read_problem(row: Row, max_cases: int) -> Problem:
    """Read a row in the format of MBPP or of APPS.

    MBPP: `text` or `prompt`, `test_list`, and where known `code`, `test_setup_code` and
    `test_imports`. APPS: `question`, `input_output` (JSON with `inputs` and `outputs`), and where
    known `solutions` (JSON).

    Args:
        row: row of a file or a Hub set.
        max_cases: cases used, the first ones.

    Raises:
        DataError: A field is missing or is of another kind, or answers could fake a test; names
            the row.
    """
    if row.fields.get("input_output") is not None:
        cases = _cases(row)[:max_cases]
        return Problem(row.text("question", "prompt"), cases=cases, solution=_first_solution(row))
    tests = row.fields.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise row.error(
            "a problem needs tests: 'test_list', a list of asserts (MBPP), or 'input_output' (APPS)"
        )
    imports = row.fields.get("test_imports") or []  # In the sanitized MBPP.
    problem = Problem(
        row.text("text", "prompt"),
        asserts=tuple(cast(list[str], tests)),
        setup="\n".join([*cast(list[str], imports), row.optional_text("test_setup_code") or ""]),
        solution=row.optional_text("code"),
    )
    with row.named_in(DataError):
        asked_names(problem.asserts, problem.setup, problem.reference)
    return problem


def _cases(row: Row) -> tuple[tuple[str, str], ...]:
    found = _json(row, "input_output")
    given = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    if "fn_name" in given:
        raise row.error(
            "field 'input_output' has 'fn_name': problems that call a function are accepted as "
            "asserts in 'test_list', programs that read stdin in 'input_output'"
        )
    inputs, outputs = _texts(given.get("inputs")), _texts(given.get("outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise row.error(
            "field 'input_output' must have 'inputs' and 'outputs', as many texts in each, and some"
        )
    return tuple(zip(inputs, outputs, strict=True))


def _first_solution(row: Row) -> str | None:
    found = _json(row, "solutions") if row.optional_text("solutions") else None
    programs = _texts(found)
    if found and not programs:
        raise row.error("field 'solutions' must be a JSON list of programs")
    return programs[0] if programs else None


def _json(row: Row, name: str) -> object:
    try:
        return json.loads(row.text(name))
    except (ValueError, RecursionError) as error:
        raise row.error(f"field {name!r} is not JSON ({error})") from None


def _texts(found: object) -> list[str]:
    """Return a list of texts; lists of lines are joined, and anything else gives none."""
    texts: list[str] = []
    for each in cast("list[object]", found) if isinstance(found, list) else []:
        if isinstance(each, list):
            texts.append("\n".join(map(str, cast("list[object]", each))))
        elif isinstance(each, str):
            texts.append(each)
        else:
            return []
    return texts


def generate_problems(seed: int, *, is_test: bool, fold: int = 0) -> Iterator[Problem]:
    r"""Yield distinct expressions to complete, of a fold or of all others.

    It ends where 100,000 draws have brought nothing new.

    >>> problem = next(generate_problems(0, is_test=False))
    >>> problem.prefix + problem.solution, problem.asserts
    ('def value():\n    return 25+7-5', ('assert value() == 27',))
    """
    rng = random.Random(derive_seed(seed, "code/test" if is_test else "code/train"))

    def draw() -> Problem | None:
        a, b, c = sorted((rng.randint(1, 30) for _ in range(3)), reverse=True)
        expression, value = rng.choice(
            ((f"{a}+{b}+{c}", a + b + c), (f"{a}+{b}-{c}", a + b - c), (f"{a}*{c}-{b}", a * c - b))
        )
        task = f"{a},{b},{c}={value}\n"
        asserts = (f"assert value() == {value}",)
        problem = Problem(task, asserts, prefix="def value():\n    return ", solution=expression)
        return problem if 1 <= value <= 99 else None

    def is_wanted(problem: Problem) -> bool:
        return (problem.fold == fold) == is_test

    return distinct(draw, is_wanted, lambda problem: problem.task)


Reward: TypeAlias = Literal["share", "all"]
_FENCE = "```"


def question(problem: Problem, shown_tests: int) -> str:
    """Return the problem in words; for an expression, as the bundled model knows it.

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
    r"""Return the last closed fenced block, of the last `<answer>` if there is one.

    >>> extract_code("So:\n```python\nx = 1\n```\nor\n```\nx = 2\n```\ndone")
    'x = 2\n'
    >>> extract_code("<answer> 1 + 1 </answer>"), extract_code("x = 1")
    ('1 + 1', None)
    """
    text = spoken(text)
    answer = last_answer(text)
    parts = (text if answer is None else answer).split(_FENCE)
    if len(parts) < 3:
        return answer
    block = parts[(len(parts) - 3) // 2 * 2 + 1]
    language, line_end, code = block.partition("\n")
    is_language = not language.strip() or language.strip().isalnum()
    return code if line_end and is_language else block


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
    """Run each case in its own sandbox; after one that times out the rest have failed."""
    passed, ran = [False] * len(problem.cases), None
    for index, (given, expected) in enumerate(problem.cases):
        ran = await run_code(problem.prefix + code, given, limits)
        ended_well = ran.ended == "exit" and ran.exit_code == 0
        passed[index] = ended_well and _lines(ran.stdout) == _lines(expected)
        if ran.ended == "deadline":
            break
    return passed, ran


def _lines(text: str) -> list[str]:
    """Return the lines, without trailing white space and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


class CodeEnv(ProblemEnv):
    """One attempt at one problem."""

    def __init__(
        self, observation: Observation, problem: Problem, reward: Reward, limits: Limits
    ) -> None:
        super().__init__(observation)
        self._given = problem, reward, limits
        self.grades: dict[str | None, Grade] = {}
        """Code -> grade; shared by the attempts of a group."""
        self.locks: defaultdict[str | None, anyio.Lock] = defaultdict(anyio.Lock)

    @override
    async def graded(self, text: str) -> Grade:
        """Run the tests, once for equal answers of a group."""
        problem, reward, limits = self._given
        code = extract_code(text)
        with clock_stopped():
            await self.locks[code].acquire()
        try:
            if code not in self.grades:
                self.grades[code] = await grade_code(problem, code, reward, limits)
            return self.grades[code]
        finally:
            self.locks[code].release()

    @override
    async def try_gold(self, gold: str | tuple[str, ...], context_length: int) -> tuple[float, str]:
        grade = await self.graded(str(gold))
        said = grade.logs.get("stderr", "").strip().splitlines()[-1:]
        return grade.reward, f" (in the sandbox: {said[0]})" if said else ""


class _CodeProblem(ProblemGroupBuilder):
    """One problem, whose attempts share what has been graded."""

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        group = await ProblemGroupBuilder.make_envs(self, num_envs)
        envs = [env for env in group.envs if isinstance(env, CodeEnv)]
        for env in envs:
            env.grades, env.locks = envs[0].grades, envs[0].locks
        return group


@chz.chz
class CodeDatasetBuilder(SourcedDatasetBuilder[Problem]):
    """Coding problems for training and, disjoint from them, for the held-out test."""

    num_train: int = chz.field(default=500, doc="most training problems used")
    num_test: int = chz.field(default=100, doc="most held-out problems used; 0 for none")
    problems_per_generation: int = chz.field(default=16, doc="problems in a batch")
    shown_tests: int = chz.field(default=1, doc="asserts that the prompt shows; it shows no cases")
    max_cases: int = chz.field(default=8, doc="inputs and outputs used of a problem, the first")
    reward: Reward = chz.field(
        default="share", doc="share: of the tests that pass; all: 1 if every test does, else 0"
    )
    limits: Limits = built_field(
        Limits, "what an answer may use, in all asserts together or in each case"
    )

    _max_cases = in_range("max_cases", at_least=1)
    _shown_tests = in_range("shown_tests", at_least=0)

    @override
    def check(self) -> None:
        check_sandbox()
        super().check()

    @override
    def generate(self, seed: int, fold: Fold) -> Iterator[tuple[str, Problem]]:
        for problem in generate_problems(seed, is_test=fold != "train", fold=self.fold):
            yield f"generated problem {problem.task.strip()}", problem

    @override
    def read(self, row: Row, tokenizer: "Tokenizer | None") -> Problem:
        return read_problem(row, self.max_cases)

    @override
    def builder(self, name: str, problem: Problem, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        text = question(problem, self.shown_tests)
        observation = render_observation(tokenizer, text, chat=not problem.prefix)
        solution = problem.solution
        return _CodeProblem(
            functools.partial(CodeEnv, observation, problem, self.reward, self.limits),
            name,
            gold=None if solution is None else f"<answer>{solution}</answer>",
            contents=(digest_of(problem.key),),
        )
