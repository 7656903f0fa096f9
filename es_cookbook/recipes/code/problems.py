"""Coding problems: what one is, how rows of data sets become one, and small generated ones.

A problem is judged by asserts (as in MBPP) or by what a program writes for an input (as in APPS).
`generate_problems` makes a task for the bundled character-level model: complete `return ...` with
an expression, here of given numbers, so that the test passes.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator
from typing import cast

from es_cookbook.common.errors import DataError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.generated import FOLDS, distinct
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.grading.asserts import asked_names


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One problem, with asserts or with cases.

    Attributes:
        task: what is asked, in words or in the bundled model's shorthand.
        asserts: statements that must raise nothing after the code.
        cases: what a program reads, and what it must write.
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
        """Code that says which names an answer defines."""
        return self.prefix or self.solution

    @property
    def fold(self) -> int:
        """Which fold the problem belongs to, a pure function of what is asked."""
        digest = hashlib.blake2b(self.task.encode(errors="replace"), digest_size=8).digest()
        return int.from_bytes(digest) % FOLDS


def read_problem(row: Row, max_cases: int) -> Problem:
    """A row in the format of MBPP or of APPS.

    MBPP: `text` or `prompt`, `test_list`, and where known `code`, `test_setup_code` and
    `test_imports`. APPS: `question`, `input_output` (JSON with `inputs` and `outputs`), and where
    known `solutions` (JSON).

    Args:
        row: of a file or a Hub set.
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
    try:
        asked_names(problem.asserts, problem.setup, problem.reference, problem.task)
    except DataError as error:
        raise row.error(str(error)) from None
    return problem


def _cases(row: Row) -> tuple[tuple[str, str], ...]:
    try:
        given = json.loads(row.text("input_output"))
    except (ValueError, RecursionError) as error:
        raise row.error(f"field 'input_output' is not JSON ({error})") from None
    if isinstance(given, dict) and "fn_name" in given:
        raise row.error(
            "field 'input_output' has 'fn_name': problems that call a function are accepted as "
            "asserts in 'test_list', programs that read stdin in 'input_output'"
        )
    try:
        inputs, outputs = (list(map(_lines, given[name])) for name in ("inputs", "outputs"))
    except (TypeError, KeyError):
        inputs, outputs = [], []
    if not inputs or len(inputs) != len(outputs):
        raise row.error(
            "field 'input_output' must have 'inputs' and 'outputs', as many texts in each, and some"
        )
    return tuple(zip(inputs, outputs, strict=True))


def _lines(text: object) -> str:
    """A text, or a list of its lines."""
    if isinstance(text, str):
        return text
    if isinstance(text, list):
        return "\n".join(map(str, cast(list[object], text)))
    raise TypeError


def _first_solution(row: Row) -> str | None:
    text = row.optional_text("solutions")
    if not text:
        return row.optional_text("solution")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise row.error(f"field 'solutions' is not JSON ({error})") from None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise row.error("field 'solutions' must be a JSON list of programs")
    return cast(list[str], found)[0] if found else None


def generate_problems(seed: int, *, is_test: bool, fold: int = 0) -> Iterator[Problem]:
    r"""Seeded stream of distinct expressions to complete, of a fold or of all others.

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
