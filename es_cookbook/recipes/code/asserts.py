"""Tests as asserts, run against model-written code that cannot fake them.

    passed, _ = await run_asserts("def double(x): return 2 * x", ["assert double(2) == 4"])
    passed == (True,)

Run in one interpreter, code under test would own its tests: it could return objects that equal
everything, end the process with success, or print what a passed test prints. Here the tests run in
a separate process inside the same sandbox, and the code's functions are called across a pipe
(`asserts_inside`). Arguments and results are plain data: None, numbers, text, bytes, lists, tuples,
sets, dicts, what iterators yield, and of the standard library fractions, decimals, dates and times,
counters, ordered dicts and deques. A value of a derived class arrives as the class it derives from;
other objects stay with the code, and tests can call them and pass them back. What the code raises
arrives as the nearest built-in exception.

Names that the tests use are their own: Python's, those of `setup`, of modules of the standard
library, of the reference's imports. The others come from the code, one in each test, unless a
reference defines more.

What code can still do: answer by the arguments of a call instead of an algorithm, learn from
earlier calls, and, where a test asks only whether a result is true, return just that.

Left out: arguments that the code changes in place (it gets copies), attributes of its objects, and
tests that pass functions. A problem that needs them fails with its own solution too.
"""

import ast
import builtins
import functools
import json
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.code import asserts_inside
from es_cookbook.rl.grading.sandbox import Limits, Ran, run_code

_DEFINED = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=", re.M)
_IMPORT = re.compile(r"^(?:import|from)[ \t][^\n(\\]*$", re.M)


async def run_asserts(
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    reference: str | None = None,
    limits: Limits | None = None,
) -> tuple[tuple[bool, ...], Ran]:
    """Run tests against code within one deadline; tests that are not reached fail.

    Returns:
        Which tests passed, in order; and how the sandbox ran, whose stderr says why not.

    Args:
        code: the text of a module.
        tests: statements, each of which passes if it raises nothing.
        setup: run before the tests, in their process.
        reference: a solution known to be right. Its top-level names are those that the tests see of
            the code, also in place of built-in ones, and its imports are made for the tests.
        limits: `Limits()` if None.

    Raises:
        DataError: The tests cannot be used: see `asked_names`.
        SandboxError: There is no sandbox here, or it did not start.
    """
    token = secrets.token_hex(16)
    names, modules = asked_names(tuple(tests), setup, reference)
    imports = [*_IMPORT.findall(reference or ""), *(f"import {name}" for name in modules)]
    given = {
        "tests": [*tests],
        "names": [*names],
        "imports": "\n".join(imports),
        "setup": setup,
        "token": token,
    }
    size = len(code.encode(errors="replace"))
    program = Path(asserts_inside.__file__).read_text(encoding="utf-8")
    ran = await run_code(program, f"{size:016}{code}{json.dumps(given)}", limits)
    said = set(ran.stdout.split("\n"))
    return tuple(f"{token} {i}" in said for i in range(len(tests))), ran


@functools.lru_cache
def asked_names(
    tests: tuple[str, ...], setup: str = "", reference: str | None = None
) -> tuple[Sequence[str], Sequence[str]]:
    r"""Return names that the tests take from the code, and modules that they import.

    >>> asked_names(("assert f(2) == abs(-4)", "assert math.isclose(f(.5), 1)"))
    (['f'], ['math'])
    >>> asked_names(("assert sum(len([1]), 2) == 3",), "", "def sum(a, b):\n  return a + b")
    (['sum'], [])

    Raises:
        DataError: A test is not Python, or takes several names without a reference, one of which
            could fake what the other returns: `isclose(double(2), 4)` where nothing says whose
            `isclose` is. Or they take none at all.
    """
    trees = [_parsed(text, f"test {i + 1}") for i, text in enumerate(tests)]
    whole = [_parsed(setup, "the setup"), *trees]
    defined = {name for pair in _DEFINED.findall(reference or "") for name in pair if name}
    modules = {name for tree in whole for name in _modules(tree)} - defined
    own = {name for tree in whole for name in _bound(tree)} | modules
    used = [_loaded(tree) - own for tree in whole]
    theirs = [
        names & defined if reference is not None else names - {*dir(builtins)} for names in used
    ]
    if not any(theirs):
        raise DataError("the tests use nothing of the answer")
    for i, names in enumerate(theirs[1:]):
        if reference is None and len(names) > 1:
            raise DataError(
                f"test {i + 1} takes {' and '.join(map(repr, sorted(names)))} from the answer, so "
                "that one could fake what the other returns: give a solution, which says what an "
                "answer defines, or define or import the tests' own names in their setup"
            )
    return sorted(set().union(*theirs)), sorted(modules)


def _loaded(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    """Return names that a part of the tests assigns, in any scope."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _modules(tree: ast.AST) -> set[str]:
    """Return standard modules whose attributes are used: `math` of `math.isclose`."""
    bases = (node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {n.id for n in bases if isinstance(n, ast.Name)} & sys.stdlib_module_names


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where} is not Python: {error}") from None
