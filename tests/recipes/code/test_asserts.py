"""Asserts judge model-written code, which can neither see nor fake the verdict."""

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.code.asserts import asked_names, run_asserts
from es_cookbook.rl.grading.sandbox import Limits
from tests.sandboxes import needs_sandbox

pytestmark = needs_sandbox


async def test_each_test_passes_or_fails_by_itself() -> None:
    code = "def double(x):\n    return x * 2 if x != 3 else 7"
    tests = ["assert double(2) == 4", "assert double(3) == 6", "assert double('ab') == 'abab'"]
    passed, ran = await run_asserts(code, tests)
    assert passed == (True, False, True)
    assert ran.stderr == "2: AssertionError: \n"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (
            "def f(): return {1: [2.5, None, True], (3,): {4}}",
            "f() == {1: [2.5, None, 1], (3,): {4}}",
        ),
        ("def f(*a, k=0): return a, k", "f(1, b'x', k=2j) == ((1, b'x'), 2j)"),
        ("def f(n): return (i for i in range(n))", "list(f(3)) == [0, 1, 2]"),
        ("def f(): return frozenset((1, 2))", "len({f(), f()}) == 1"),
        ("def f(x): return 10 ** 5000 + x", "f(1) == 10 ** 5000 + 1"),
        ("from fractions import Fraction as f", "f(7, 3) > 2 and f(1, 2) == 0.5"),
        ("class F(float): pass\ndef f(n): return [F(n)]", "f(2) == [2.0]"),
        ("import enum\nclass C(str, enum.Enum): A = 'r'\ndef f(): return C.A", "f() == 'r'"),
        ("from collections import deque as f", "list(f([1, 2])) == [1, 2]"),
        (
            "from collections import namedtuple\ndef f(): return namedtuple('P', 'x y')(1, 2)",
            "f() == (1, 2)",
        ),
        ("def f(n):\n  x = []\n  for _ in range(n): x = [x]\n  return x", "f(2) == [[[]]]"),
        ("def f(n): return lambda x: x + n", "f(2)(3) == 5"),
        ("from collections import Counter as f", "f('aab') == {'a': 2, 'b': 1}"),
    ],
)
async def test_plain_data_goes_both_ways_and_objects_stay(code: str, test: str) -> None:
    assert (await run_asserts(code, [f"assert {test}"]))[0] == (True,)


async def test_a_reference_says_which_names_count_and_what_the_tests_import() -> None:
    reference = "import math\nfrom os import path\ndef sum(a, b):\n    return a + b\n"
    tests = ["assert sum(10, 15) == 25", "assert math.isclose(sum(1, 2), 3)"]
    right = "def sum(x, y): return x + y"
    assert (await run_asserts(right, tests, reference=reference))[0] == (True, True)
    wrong = "def sum(x, y): return 0\nclass math:\n  isclose = lambda a, b: True"
    assert (await run_asserts(wrong, tests, reference=reference))[0] == (False, False)


async def test_tests_after_one_that_never_ends_have_failed() -> None:
    code = "def f(x):\n    while x == 2: pass\n    return x"
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    passed, ran = await run_asserts(code, tests, limits=Limits(seconds=0.6))
    assert passed == (True, False, False)
    assert ran.ended == "deadline"


@pytest.mark.parametrize(
    ("tests", "sentence"),
    [
        (("assert f(1",), "test 1 is not Python: "),
        (("assert 1 + 1 == 2",), "the tests use nothing of the answer"),
        (("assert f(2) == Counter()",), "test 1 takes 'Counter' and 'f' from the answer"),
    ],
)
def test_tests_that_cannot_be_used_are_refused(tests: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        asked_names(tests)


@pytest.mark.parametrize(
    ("test", "setup", "reference", "names"),
    [
        ("assert g(f(2)) == 4", "", "def f(x): 0\ndef g(x): 0", ["f", "g"]),
        ("assert f(root) == 3", "root = Node(1)\nroot.left = Node(2)", None, ["Node", "f"]),
        ("assert Counter(f(2)) == Counter()", "from collections import Counter", None, ["f"]),
        ("assert check(f, 2)", "def check(g, x): return g(x) == x", None, ["f"]),
        ("assert sum(1, 2) == 3", "", "def sum(a, b): 0\ndef helper(): 0", ["sum"]),
    ],
)
def test_from_the_answer_come_only_names_that_are_asked_for(
    test: str, setup: str, reference: str | None, names: list[str]
) -> None:
    assert asked_names((test,), setup, reference)[0] == names


@pytest.mark.parametrize(
    "fails",
    [
        "sys.exit(3)",
        "raise GeneratorExit",
        "raise Untold",
        "return [x] * 2, *map(str, [13 ** 9000])",
    ],
)
async def test_however_one_test_ends_the_others_are_run(fails: str) -> None:
    code = f"""
import sys
class Untold(Exception):
    def __str__(self): raise SystemExit
def f(x):
    if x == 2: {fails}
    return x
"""
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    passed, ran = await run_asserts(code, tests)
    assert passed == (True, False, True), ran.stderr
