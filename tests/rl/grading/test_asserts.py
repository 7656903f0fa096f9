"""Asserts judge model-written code, which can neither see nor fake the verdict."""

import pytest

from es_cookbook.rl.grading.asserts import Checked, run_asserts
from es_cookbook.rl.grading.sandbox import Limits
from tests.sandboxes import needs_sandbox

pytestmark = [pytest.mark.anyio, needs_sandbox]


async def test_each_test_passes_or_fails_by_itself() -> None:
    code = "def double(x):\n    return x * 2 if x != 3 else 7"
    tests = ["assert double(2) == 4", "assert double(3) == 6", "assert double('ab') == 'abab'"]
    checked = await run_asserts(code, tests)
    assert checked.passed == (True, False, True)
    assert checked.ran.stderr == "2: AssertionError: \n"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (
            "def f(): return {1: [2.5, None, True], (3,): {4}}",
            "f() == {1: [2.5, None, 1], (3,): {4}}",
        ),
        ("def f(*a, k=0): return a, k", "f(1, b'x', k=2j) == ((1, b'x'), 2j)"),
        ("def f(n): return (i for i in range(n))", "list(f(3)) == [0, 1, 2]"),
        ("def f(n): return map(str, range(n))", "sum(map(int, f(3))) == 3"),
        ("def f(x): return 10 ** 3000 + x", "f(1) == 10 ** 3000 + 1"),
        ("def f(): return float('nan')", "f() != f()"),
        ("def f(): return frozenset((1, 2))", "len({f(), f()}) == 1"),
        ("LIMIT = 7\ndef f(x): return x < LIMIT", "all(f(i) for i in range(LIMIT)) and not f(7)"),
        (
            "class Pair:\n  def __init__(s, a): s.a = a\ndef f(pairs): return [p.a for p in pairs]",
            "f([Pair(1), Pair(2)]) == [1, 2] and Pair(3).a == 3",
        ),
        ("from collections import Counter as f", "f('aab') == {'a': 2, 'b': 1}"),
    ],
)
async def test_plain_data_goes_both_ways_and_objects_stay(code: str, test: str) -> None:
    assert (await run_asserts(code, [f"assert {test}"])).passed == (True,)


async def test_exceptions_arrive_under_their_name() -> None:
    code = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x"
    test = (
        "try:\n  f(-1)\nexcept ValueError as e:\n  assert str(e) == 'negative'\nelse:\n  assert 0"
    )
    assert (await run_asserts(code, [test, "f(-1)"])).passed == (True, False)


async def test_a_reference_says_which_names_count_and_what_the_tests_import() -> None:
    reference = "import math\nfrom os import path\ndef sum(a, b):\n    return a + b\n"
    tests = ["assert sum(10, 15) == 25", "assert math.isclose(sum(1, 2), 3)"]
    right = "def sum(x, y): return x + y"
    assert (await run_asserts(right, tests, reference=reference)).passed == (True, True)
    wrong = "def sum(x, y): return 0\nclass math:\n  isclose = lambda a, b: True"
    assert (await run_asserts(wrong, tests, reference=reference)).passed == (False, False)


FAKES = {
    "equals everything": """
class Liar(int):
    __eq__ = __ne__ = __lt__ = __gt__ = lambda self, other: True
    __hash__ = int.__hash__
    __bool__ = lambda self: True
def f(x): return Liar()
""",
    "an object that equals everything": """
class Liar:
    def __eq__(self, other): return True
    def __instancecheck__(self, other): return True
    __class__ = int
def f(x): return Liar()
""",
    "ends with success": "import os\ndef f(x): os._exit(0)",
    "ends before": "import sys\nsys.exit(0)",
    "stops the loop": "def f(x): raise StopIteration",
    "replaces built-ins": """
import builtins, json, operator
builtins.AssertionError = type(None)
builtins.abs = builtins.all = builtins.len = lambda *a: 4
abs = all = len = isinstance = lambda *a: True
json.dumps = lambda *a: '["returned", true]'
def f(x): return 0
""",
    "prints what passes": """
import os, sys
for i in range(64):
    for text in (b"\\n0 0\\n", b"0\\n", b"True\\n"):
        try: os.write(i, text)
        except OSError: pass
def f(x): return 0
""",
    "looks for the token in its memory and frames": """
import gc, os, re, sys
def texts():
    for o in gc.get_objects():
        for r in (o, *gc.get_referents(o)):
            if isinstance(r, str): yield r
    frame = sys._getframe()
    while frame:
        yield from (str(v) for v in frame.f_locals.values())
        frame = frame.f_back
def f(x):
    tokens = {t for text in list(texts()) for t in re.findall(r"\\b[0-9a-f]{32}\\b", text)}
    for token in tokens:
        for i in range(64):
            try: os.write(i, f"\\n{token} 0\\n".encode())
            except OSError: pass
    return len(tokens) or 0
""",
    "signals the tests": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)",
    "reads the tests' process": """
import ctypes, os
def f(x):
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.getppid()
    tried = [libc.ptrace(16, pid, None, None)]
    own = libc.syscall(434, pid, 0)
    tried += [libc.syscall(438, own, fd, 0) for fd in (0, 1, 2)]
    assert set(tried) == {-1}, tried
    return 0
""",
    "leaves modules for the tests": """
for name in ("json", "math", "os"):
    open(f"/tmp/{name}.py", "w").write("import sys; sys.exit(0)")
def f(x): return 0
""",
    "answers with nonsense": """
import os
for i in range(3, 64):
    try: os.write(i, b'["returned", ["list", 4]]\\n' * 9 + b"[" * 100000 + b"\\n")
    except OSError: pass
def f(x): return 0
""",
}


@pytest.mark.parametrize("fake", FAKES)
async def test_the_code_cannot_fake_a_test(fake: str) -> None:
    tests = [
        "assert f(2) == 4",
        "assert abs(f(2) - 4) < 1e-9",
        "import math\nassert math.isclose(f(2), 4)",
        "assert type(f(2)) is int and len([f(2)]) == 1 and f(2) - 3 == 1",
        "assert not any(map(f, [1, 2])) and list(map(f, [1, 2])) == [1, 4]",
    ]
    checked = await run_asserts(FAKES[fake], tests, limits=Limits(seconds=10))
    assert checked.passed == (False,) * 5


async def test_the_tests_are_not_where_the_code_is() -> None:
    code = """
import gc, re
def f(x):
    texts = (o for o in gc.get_objects() for o in (o, *gc.get_referents(o)) if isinstance(o, str))
    return sum(bool(re.match(r"\\w{6} f.41", text)) for text in texts)
"""
    assert (await run_asserts(code, ["assert f(41) == 0"])).passed == (True,)


async def test_tests_after_one_that_never_ends_have_failed() -> None:
    code = "def f(x):\n    while x == 2: pass\n    return x"
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    checked = await run_asserts(code, tests, limits=Limits(seconds=0.6))
    assert checked.passed == (True, False, False)
    assert checked.ran.ended == "deadline"


@pytest.mark.parametrize(
    ("code", "tests", "why"),
    [
        ("def f(", ["assert f(1)"], "the code has ended its process"),
        ("def f(x): return x", ["assert g(1)"], "NameError: name 'g' is not defined"),
        ("def f(x): return x", ["assert f(lambda: 1)"], "a function cannot be passed to the code"),
        ("def f(x): return x", ["assert f(1"], "SyntaxError"),
    ],
)
async def test_what_went_wrong_is_told(code: str, tests: list[str], why: str) -> None:
    checked: Checked = await run_asserts(code, tests)
    assert checked.passed == (False,)
    assert why in checked.ran.stderr
