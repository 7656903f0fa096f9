"""Tests as asserts, run against model-written code that cannot fake them.

    checked = await run_asserts("def double(x): return 2 * x", ["assert double(2) == 4"])
    checked.passed == (True,)

Run in one interpreter, code under test would own its tests: it could return objects that equal
everything, end the process with success, or print what a passed test prints. Here the tests run in
a process of their own inside the same sandbox, and the code's functions are called across a pipe
(`es_cookbook.rl.grading.asserts_inside`). The code gets arguments and gives back plain data: None,
numbers, text, bytes, lists, tuples, sets, dicts, and what iterators yield. Objects of its own
classes stay with it; tests can call them, read their attributes and pass them back.

What code can still do: answer by the arguments of a call rather than by an algorithm, learn from
earlier calls, and, where a test asks only whether a result is true or differs from something,
return an object of its own. Whoever writes the tests decides what passes.

Left out: arguments that the code changes in place (it gets copies), and tests that pass functions
or other objects of their own. A problem that needs them fails with its own solution too.
"""

import builtins
import dataclasses
import functools
import json
import keyword
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from es_cookbook.rl.grading import asserts_inside
from es_cookbook.rl.grading.sandbox import Limits, Ran, run_code

_DEFINED = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*(?::[^=\n]*)?=", re.M)
_IMPORT = re.compile(r"^(?:import|from)[ \t][^\n(\\]*$", re.M)
_NAME = re.compile(r"\b[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """Which tests passed, in order; and how the sandbox ran, which stderr says why not."""

    passed: tuple[bool, ...]
    ran: Ran


async def run_asserts(
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    reference: str | None = None,
    limits: Limits | None = None,
) -> Checked:
    """Run tests against code, all within one deadline; those that are not reached have failed.

    Args:
        code: the text of a module.
        tests: statements, each of which passes if it raises nothing.
        setup: run before the tests, in their process.
        reference: a solution known to be right. Its top-level names are those that the tests see of
            the code, also in place of built-in ones, and its imports are made for the tests.
            Without it they see what they mention and Python does not have.
        limits: `Limits()` if None.

    Raises:
        SandboxError: There is no sandbox here, or it did not start.
    """
    token = secrets.token_hex(16)
    imports = _IMPORT.findall(reference or "")
    asked = {
        "tests": [*tests],
        "names": names_for(tests, setup, reference),
        "setup": "\n".join([*imports, setup]),
        "token": token,
    }
    size = len(code.encode(errors="replace"))
    ran = await run_code(_program(), f"{size:016}{code}{json.dumps(asked)}", limits)
    said = set(ran.stdout.splitlines())
    return Checked(tuple(f"{token} {i}" in said for i in range(len(tests))), ran)


def names_for(tests: Sequence[str], setup: str, reference: str | None) -> list[str]:
    r"""Names that the tests take from the code.

    >>> names_for(["assert sum(len(x)) == abs(y)"], "", "def sum(a):\n  return a\ny = 1")
    ['sum', 'y']
    >>> names_for(["assert double(2) == abs(-4)"], "", None)
    ['double']
    """
    if reference is not None:
        return sorted({name for pair in _DEFINED.findall(reference) for name in pair if name})
    mentioned = {name for text in (*tests, setup) for name in _NAME.findall(text)}
    return sorted(n for n in mentioned if not hasattr(builtins, n) and not keyword.iskeyword(n))


@functools.cache
def _program() -> str:
    return Path(asserts_inside.__file__).read_text(encoding="utf-8")
