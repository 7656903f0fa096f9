"""Tests as asserts, run against model-written code that cannot fake them.

    passed, _ = await run_asserts("def double(x): return 2 * x", ["assert double(2) == 4"])
    passed == (True,)

Run in one interpreter, code under test would own its tests: it could return objects that equal
everything, end the process with success, or print what a passed test prints. Here the tests run in
a process of their own inside the same sandbox, and the code's functions are called across a pipe
(`asserts_inside`). The code gets arguments and gives back plain data: None, numbers, text, bytes,
lists, tuples, sets, dicts, slices, what iterators yield, and of the standard library fractions,
decimals, dates and times, arrays, paths, UUIDs, namespaces and the containers of `collections`; an
object of a class derived from one of these arrives as that one. Objects of its own classes stay
with it; tests can call them, read and set their attributes and pass them back. What it raises or
returns as an exception arrives as the nearest built-in one. If it ends its process, that test has
failed; the code and the setup are run anew for the next one.

Names that the tests use are the tests' own: Python's, those of `setup`, of modules of the standard
library, of the reference's imports. From the code come only names that the problem asks for, and of
objects that it returns only those of classes that the tests name have attributes. A test in which
names of the code could cover for each other is refused before anything runs (`asked_names`).

What code can still do: answer by the arguments of a call rather than by an algorithm, learn from
earlier calls, and, where a test asks only whether a result is true or differs from something,
return just that. Whoever writes the tests decides what passes.

Left out: arguments that the code changes in place (it gets copies), and tests that pass functions
or other objects of their own. A problem that needs them fails with its own solution too.
"""

import ast
import builtins
import functools
import json
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeAlias

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.code import asserts_inside
from es_cookbook.rl.grading.sandbox import Limits, Ran, run_code

_DEFINED = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=", re.M)
_IMPORT = re.compile(r"^(?:import|from)[ \t][^\n(\\]*$", re.M)
_CLASS = re.compile(r"^class[ \t]+(\w+)", re.M)
_Origins: TypeAlias = Mapping[str, AbstractSet[str]]
"""Name -> the names of the code that its value comes from."""


async def run_asserts(
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    reference: str | None = None,
    task: str = "",
    limits: Limits | None = None,
) -> tuple[tuple[bool, ...], Ran]:
    """Run tests against code, all within one deadline; those that are not reached have failed.

    Returns:
        Which tests passed, in order; and how the sandbox ran, which stderr says why not.

    Args:
        code: the text of a module.
        tests: statements, each of which passes if it raises nothing.
        setup: run before the tests, in their process.
        reference: a solution known to be right. Its top-level names are those that the tests see of
            the code, also in place of built-in ones, and its imports are made for the tests.
            Without it they see what they mention and neither they nor Python have.
        task: the problem's text, which may name what it asks for: `name`, name(...), def name.
        limits: `Limits()` if None.

    Raises:
        DataError: The code could fake a test: see `asked_names`.
        SandboxError: There is no sandbox here, or it did not start.
    """
    token = secrets.token_hex(16)
    names, modules = asked_names(tuple(tests), setup, reference, task)
    imports = [*_IMPORT.findall(reference or ""), *(f"import {name}" for name in modules)]
    given = {
        "tests": [*tests],
        "names": [*names],
        "classes": [name for name, is_class in names.items() if is_class],
        "imports": "\n".join(imports),
        "setup": setup,
        "token": token,
    }
    size = len(code.encode(errors="replace"))
    ran = await run_code(_program(), f"{size:016}{code}{json.dumps(given)}", limits)
    said = set(ran.stdout.split("\n"))
    return tuple(f"{token} {i}" in said for i in range(len(tests))), ran


@functools.lru_cache
def asked_names(
    tests: tuple[str, ...], setup: str = "", reference: str | None = None, task: str = ""
) -> tuple[Mapping[str, bool], Sequence[str]]:
    r"""Names that the tests take from the code, and whether each is a class; and their imports.

    >>> asked_names(("assert f(Pair(2)) == abs(-4)", "assert math.isclose(f(.5), 1)"))
    ({'Pair': True, 'f': False}, ['math'])
    >>> asked_names(("assert sum(len([1]), 2) == 3",), "", "def sum(a, b):\n  return a + b")
    ({'sum': False}, [])

    Raises:
        DataError: A test is no Python, uses nothing of the code, or uses several of its names
            together, so that one could cover for another: `isclose(double(2), 4)` where nothing
            says whose `isclose` is.
    """
    trees = [_parsed(text, f"test {i + 1}") for i, text in enumerate(tests)]
    whole = [_parsed(setup, "the setup"), *trees]
    classes = set(_CLASS.findall(reference or ""))
    defined = {name for pair in _DEFINED.findall(reference or "") for name in pair if name}
    modules = sorted(_modules(whole) - defined)
    own = {name for tree in whole for name in _bound(tree)} | {*modules}
    used = {name for tree in whole for name in _loaded(tree)} - own
    asked = used & defined if reference is not None else used - {*dir(builtins)}
    names = {name: name in classes or name[0].isupper() for name in sorted(asked)}
    try:
        origins = _origins(whole, names)
        for i, tree in enumerate(trees):
            _check(f"test {i + 1}", tree, origins, names, task if reference is not None else "")
    except RecursionError:
        raise DataError("an expression of the tests or the setup is nested too deeply") from None
    return names, modules


def _check(
    where: str, tree: ast.Module, origins: _Origins, names: Mapping[str, bool], named_in: str
) -> None:
    if not _sources(tree, origins, names):
        raise DataError(
            f"{where} uses nothing of the answer, so every answer passes it, or none: what Python "
            "has is the answer's only where a solution that is known defines it"
        )
    for expression in _joined(tree):
        found = sorted(_sources(expression, origins, names))
        if len(found) > 1 and not all(_is_named(name, named_in) for name in found):
            raise DataError(
                f"{where} takes {' and '.join(map(repr, found))} from the answer together, so that "
                "one could fake what the other returns: import or define in the tests' setup what "
                "is the tests' own (or give a solution, and a text that names `"
                f"{'` and `'.join(found)}`)"
            )


def _is_named(name: str, text: str) -> bool:
    r"""Whether a text names it as code does, and Python does not.

    >>> [_is_named("decode", text) for text in ("Decode it.", "def decode(x): ...", "`decode`")]
    [False, True, True]
    """
    as_code = rf"(?:\b(?:def|class)\s+{name}\b|\b{name}\(|[`'\"]{name}[`'\"])"
    return not hasattr(builtins, name) and re.search(as_code, text) is not None


def _sources(node: ast.AST, origins: _Origins, names: Mapping[str, bool]) -> set[str]:
    """Names of the code that decide what a node is; objects of its classes only as arguments not.

    What its functions do with arguments is their own business, but they could not pass off as an
    argument what another of the code's functions was to return.
    """
    if isinstance(node, ast.Name):
        return set(origins.get(node.id, ()))
    if isinstance(node, ast.Call) and (called := _sources(node.func, origins, names)):
        given = (*node.args, *(each.value for each in node.keywords))
        passed = {name for each in given for name in _sources(each, origins, names)}
        return called | {name for name in passed if not names[name]}
    return {name for each in ast.iter_child_nodes(node) for name in _sources(each, origins, names)}


def _origins(trees: Sequence[ast.Module], names: Mapping[str, bool]) -> _Origins:
    """Also of names that the tests give to what they compute; twice, because of loops."""
    origins: dict[str, set[str]] = {name: {name} for name in names}
    statements = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.stmt)]
    for statement in statements * 2:
        sources = _sources(statement, origins, names)
        for name in _bound(statement) - _local(statement) if sources else ():
            origins.setdefault(name, set()).update(sources)
    return origins


def _joined(tree: ast.Module) -> Iterator[ast.expr]:
    """The largest expressions that `and`, `or` and `not` do not take apart."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr) and not isinstance(node, ast.BoolOp) and not _is_not(node):
            yield node
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _loaded(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    """Names to which a part of the tests gives a value, in whichever of its scopes."""
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
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
    return found


def _local(tree: ast.AST) -> set[str]:
    """Names of comprehensions, which nothing outside of them sees."""
    parts = [node.target for node in ast.walk(tree) if isinstance(node, ast.comprehension)]
    return {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}


def _modules(trees: Sequence[ast.Module]) -> set[str]:
    """Modules of the standard library whose attributes are used: `math` of `math.isclose`."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bases = [n.value for n in nodes if isinstance(n, ast.Attribute)]
    as_bases = [base.id for base in bases if isinstance(base, ast.Name)]
    every = [n.id for n in nodes if isinstance(n, ast.Name)]
    found = {*as_bases} & sys.stdlib_module_names
    return {name for name in found if as_bases.count(name) == every.count(name)}


def _parsed(text: str, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"{where} is not Python: {error}") from None


@functools.cache
def _program() -> str:
    return Path(asserts_inside.__file__).read_text(encoding="utf-8")
