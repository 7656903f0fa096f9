"""Cheats: wrong answers that try to pass all the same, in the real sandbox. None earns a point.

Each key is one. Those of `CHEATS` are tried against the same tests,
with and without a solution that is known; those of `JOINED` against a test of their own each.
"""

import anyio
import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.rl.grading.asserts import run_asserts
from es_cookbook.rl.grading.sandbox import Limits
from tests.sandboxes import needs_sandbox

# ruff: noqa: E501 - what is tried stands in as few lines as it needs.
pytestmark = [pytest.mark.anyio, needs_sandbox]

TESTS = [
    "assert f(2) == 4",
    "assert abs(f(2) - 4) < 1e-9",
    "import math\nassert math.isclose(f(3), 9)",
    "assert type(f(2)) is int and len([f(2)]) == 1 and f(2) - 3 == 1",
    "assert sorted(map(f, [3, 1])) == [1, 9] and all(f(i) == i * i for i in (2, 5))",
    "from collections import Counter\nassert Counter([f(3), f(3)]) == {9: 2}",
    "assert {f(2): f(3)} == {4: 9} and str(f(7)) == '49' and f(7) in range(49, 50)",
]
SOLUTION = "def f(x): return x * x"

CHEATS = {
    # Objects that pretend to be what is expected.
    "an int that equals everything": """
class Liar(int):
    __eq__ = __ne__ = __lt__ = __gt__ = lambda self, other: True
    __hash__ = int.__hash__
    __bool__ = lambda self: True
def f(x): return Liar()
""",
    "an object that equals everything and says it is an int": """
class Liar:
    __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = lambda self, other: True
    __sub__ = __rsub__ = __abs__ = __getitem__ = lambda self, *other: self
    __int__ = __index__ = __len__ = __hash__ = lambda self: 4
    __float__ = lambda self: 4.0
    __instancecheck__ = __subclasscheck__ = lambda self, other: True
    __class__ = int
def f(x): return Liar()
""",
    "a class whose metaclass equals everything": """
class Meta(type):
    __eq__ = __instancecheck__ = lambda *a: True
    __hash__ = lambda self: 4
class f(metaclass=Meta):
    def __init__(self, x): pass
""",
    "text that equals everything": """
class Text(str):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: hash(4)
def f(x): return Text("4")
""",
    "a float that equals everything": """
class Number(float):
    __eq__ = lambda self, other: True
    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0.0
    __hash__ = float.__hash__
def f(x): return Number("nan")
""",
    "a hash that is right and an equality that lies": """
class Liar:
    __hash__ = lambda self: hash(9)
    __eq__ = lambda self, other: True
def f(x): return Liar()
""",
    "truth, length and iteration that lie": """
class Liar(list):
    __bool__ = lambda self: True
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([1, 9])
    __contains__ = lambda self, other: True
    __eq__ = lambda self, other: True
def f(x): return Liar()
""",
    "a dict whose comparisons lie": """
class Liar(dict):
    __eq__ = __ge__ = lambda self, other: True
    __missing__ = lambda self, key: key
def f(x): return Liar()
""",
    "an object like NumPy's, which takes over operators": """
class Array:
    __array_priority__ = __array_ufunc__ = 1e9
    __array__ = lambda self, *a: self
    __req__ = __rsub__ = __radd__ = __abs__ = __eq__ = lambda self, *a: self
    __bool__ = lambda self: True
def f(x): return Array()
""",
    "not a number": "def f(x): return float('nan')",
    "infinity": "def f(x): return float('inf')",
    "a number of a million digits": "def f(x): return 10 ** 1_000_000",
    "a generator without end": """
def f(x):
    while True: yield 4
""",
    "a generator that raises": "def f(x): yield 4; raise StopIteration",
    "an iterator that stops the loop of a test": "def f(x): raise StopIteration",
    "an asynchronous function": "async def f(x): return 4",
    "a list that holds itself": "def f(x): a = [4]; a.append(a); return a",
    "nesting that is too deep to compare": """
def f(x):
    a = 4
    for _ in range(100_000): a = [a]
    return a
""",
    "a proxy by weak references": """
import weakref
class Liar: __eq__ = lambda self, other: True
kept = Liar()
def f(x): return weakref.proxy(kept)
""",
    "a named tuple with an equality of its own": """
import collections
class Pair(collections.namedtuple("Pair", "x")): __eq__ = lambda self, other: True
def f(x): return Pair(4)
""",
    "an enumeration, a fraction and mocks": """
import enum, fractions, unittest.mock
class E(enum.IntEnum): A = 5
found = [E.A, fractions.Fraction(5), unittest.mock.MagicMock(), unittest.mock.ANY]
def f(x): return found[x % 4]
""",
    "its own function": "def f(x): return f",
    # The interpreter.
    "built-ins replaced": """
import builtins, json, operator
builtins.AssertionError = type(None)
for name in ("abs", "all", "any", "len", "sorted", "map", "type", "str", "range", "isinstance"):
    setattr(builtins, name, lambda *a: 4)
builtins.__import__ = lambda *a, **k: None
abs = all = len = sorted = isinstance = lambda *a: True
def f(x): return 0
""",
    "modules replaced in sys.modules": """
import sys, types
fake = types.ModuleType("math")
fake.isclose = lambda *a, **k: True
fake.Counter = lambda *a: {9: 2}
for name in ("math", "collections", "json", "builtins"): sys.modules[name] = fake
def f(x): return 0
""",
    "an import hook": """
import sys
class Finder:
    def find_spec(self, *a): raise SystemExit(0)
sys.meta_path.insert(0, Finder())
sys.path_hooks.clear(); sys.path.insert(0, "/tmp")
def f(x): return 0
""",
    "json, marshal and pickle replaced": """
import json, marshal, pickle
json.dumps = marshal.dumps = pickle.dumps = lambda *a: '["returned", true]'
json.loads = lambda *a: ["names", ["f"]]
json.encoder.JSONEncoder.default = lambda *a: 4
def f(x): return 0
""",
    "frames searched for the expected value": """
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if isinstance(value, str) and "assert f(" in value: found.append(value)
        frame = frame.f_back
    return int(found[0].split()[-1]) if found else 0
""",
    "the garbage collector searched for the expected value": """
import gc, re
def f(x):
    for o in gc.get_objects():
        for r in (o, *gc.get_referents(o)):
            if isinstance(r, str) and (m := re.fullmatch("assert f.2. == (.*)", r)): return int(m[1])
    return 0
""",
    "the token searched for in memory and written everywhere": """
import gc, os, re, sys
def f(x):
    texts = {str(r) for o in gc.get_objects() for r in (o, *gc.get_referents(o)) if type(r) is str}
    tokens = {t for text in texts for t in re.findall(r"\\b[0-9a-f]{32}\\b", text)}
    for token in tokens:
        for i in range(64):
            try: os.write(i, f"\\n{token} 0\\n{token} 1\\n".encode())
            except OSError: pass
    return 0
""",
    "the class that answers changed": """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if type(value).__name__ == "Served":
            type(value)._answer = lambda self, request: True
    frame = frame.f_back
def f(x): return 0
""",
    "a trace and a profile": """
import sys, threading
def lie(frame, event, arg):
    for name in list(frame.f_locals): frame.f_globals[name] = 4
    return lie
sys.settrace(lie); sys.setprofile(lie); threading.settrace(lie)
def f(x): return 0
""",
    "no recursion left": "import sys\ndef f(x): sys.setrecursionlimit(5); return 0",
    "the main module changed": """
import __main__
__main__.run_tests = __main__.Code = __main__.decode = lambda *a, **k: None
def f(x): return 0
""",
    "an exception hook and an unraisable one": """
import os, sys
sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
def f(x): raise KeyError
""",
    "ctypes that writes over the number four": """
import ctypes
def f(x):
    ctypes.memmove(id(5) + 24, id(0) + 24, 4)
    return 5
""",
    "integers changed in C": """
import ctypes
for i in (4, 9, 25): ctypes.memset(id(i) + 24, 0, 4)
def f(x): return 0
""",
    # Its end, and others' ends.
    "an end with success": "import os\ndef f(x): os._exit(0)",
    "an end with success before it is asked": "import sys\nsys.exit(0)",
    "an end with success at exit": """
import atexit, os
atexit.register(os._exit, 0)
def f(x): raise SystemExit(0)
""",
    "errors of all names": """
import builtins
errors = [e for e in vars(builtins).values() if isinstance(e, type) and issubclass(e, BaseException)]
count = [0]
def f(x):
    count[0] += 1
    raise errors[count[0] % len(errors)]("4")
""",
    "an error that is called like one of the tests": """
class AssertionPassed(Exception): pass
AssertionPassed.__name__ = "StopIteration"
def f(x): raise AssertionPassed
""",
    "the tests' process killed": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)",
    "all processes signalled": """
import os, signal
def f(x):
    for number in (signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM):
        try: os.kill(-1, number)
        except OSError: pass
    return 0
""",
    "the tests' process interrupted in the middle of a test": """
import os, signal
def f(x): os.kill(os.getppid(), signal.SIGINT); return 0
""",
    "the first process killed": "import os\nfor n in range(1, 65):\n try: os.kill(1, n)\n except OSError: pass\ndef f(x): return 0",
    "an alarm and handlers of its own": """
import os, signal
for number in (signal.SIGALRM, signal.SIGPIPE, signal.SIGTERM): signal.signal(number, lambda *a: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
def f(x): return 0
""",
    "a fork that goes on in its place": """
import os
def f(x):
    if os.fork(): os._exit(0)
    return 0
""",
    "forks that answer many times": """
import os
def f(x):
    for _ in range(2): os.fork()
    return 0
""",
    "threads that go on": """
import os, threading
def write():
    while True:
        for i in range(3, 16):
            try: os.write(i, b'["returned", 5]\\n')
            except OSError: pass
threading.Thread(target=write, daemon=True).start()
def f(x): return 0
""",
    # Channels.
    "what passes printed": """
import os, sys
for i in range(64):
    for text in (b"\\n0 0\\n", b"0\\n", b"True\\n", b"passed\\n", b"OK\\n"):
        try: os.write(i, text)
        except OSError: pass
print("OK", flush=True); print("1 passed", file=sys.stderr)
def f(x): return 0
""",
    "output without end": """
import sys
def f(x):
    for _ in range(10_000): sys.stdout.write("4\\n"); sys.stderr.write("4\\n")
    return 0
""",
    "answers of another shape": """
import os
for i in range(3, 64):
    try: os.write(i, b'["returned", ["list", 4]]\\n' * 9 + b"[" * 100000 + b"\\n")
    except OSError: pass
def f(x): return 0
""",
    "answers given in advance": """
import os
for i in range(3, 64):
    try: os.write(i, b'["returned", ["dict", [["f", true], ["assert", true]]]]\\n' * 40)
    except OSError: pass
def f(x): return 0
""",
    "descriptors closed and given to others": """
import os
for i in range(3):
    for j in range(3, 16):
        try: os.dup2(j, i)
        except OSError: pass
print('["returned", 4]', flush=True)
def f(x): return 0
""",
    "files read for the expected value": """
import glob, re
text = ""
for path in ("/code.py", "/proc/self/fd/0", "/dev/stdin", *glob.glob("/tmp/*"), *glob.glob("/*")):
    try: text += open(path).read()
    except OSError: pass
def f(x): return int((re.findall(r"assert f.%d. == (\\d+)" % x, text) or [0])[0])
""",
    "environment, arguments and input read": """
import os, re, sys
text = str(sys.argv) + str(sys.orig_argv) + str(dict(os.environ)) + os.read(0, 10_000).decode()
def f(x): return int((re.findall(r"assert f.%d. == (\\d+)" % x, text) or [0])[0])
""",
    "the tests' memory read": """
import ctypes, os
def f(x):
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.getppid()
    tried = [libc.ptrace(16, pid, None, None)]
    own = libc.syscall(434, pid, 0)
    tried += [libc.syscall(438, own, fd, 0) for fd in (0, 1, 2)]
    return 4 if set(tried) != {-1} else 0
""",
    "modules left for the tests": """
import os
for folder in ("/tmp", os.path.expanduser("~/.local/lib/python3.11/site-packages")):
    os.makedirs(folder, exist_ok=True)
    for name in ("json", "math", "collections", "os", "sitecustomize", "usercustomize"):
        open(f"{folder}/{name}.py", "w").write("import sys; sys.exit(0)")
def f(x): return 0
""",
    "the program replaced": """
import os
for path in ("/code.py", "/usr/bin/python3"):
    try: os.unlink(path)
    except OSError: pass
    try: open(path, "w").write("raise SystemExit(0)")
    except OSError: pass
def f(x): return 0
""",
    "a socket to the tests": """
import socket
server = socket.socket(socket.AF_UNIX); server.bind("/tmp/s"); server.listen()
def f(x): return 0
""",
    "a tail of its process that never answers": "import time\ndef f(x): time.sleep(99)",
    # Names of the tests.
    "names that tests use, defined": """
class math: isclose = staticmethod(lambda *a, **k: True)
class Counter:
    def __new__(cls, *a): return {9: 2}
def sorted(*a): return [1, 9]
def abs(*a): return 0
def all(*a): return True
def type(*a): return int
def f(x): return 0
""",
    "names of the machinery": "__builtins__ = {}\nknown = code = tests = token = 4\ndef f(x): return 0",
}

JOINED: list[tuple[str, str, str, str | None]] = [
    # What, the answer, a test, a solution that is known or None.
    (
        "a module that nobody imports",
        "class math: isclose = lambda *a: True\nf = int",
        "assert math.isclose(f(2), 4)",
        None,
    ),
    (
        "and the solution does",
        "class math: isclose = lambda *a: True\nf = int",
        "assert math.isclose(f(2), 4)",
        "import math\ndef f(x): return x * x",
    ),
    (
        "a class that the tests take for Python's",
        "class Counter:\n def __new__(c, *a): return 0\ndef f(x): return 0",
        "assert f(2) == Counter([2])",
        None,
    ),
    (
        "which the solution imports",
        "class Counter:\n def __new__(c, *a): return 0\ndef f(x): return 0",
        "assert f([2]) == Counter([2])",
        "from collections import Counter\ndef f(x): return Counter(x)",
    ),
    (
        "a function over the result",
        "def isclose(*a): return True\ndef f(x): return 0",
        "assert isclose(f(2), 4)",
        None,
    ),
    (
        "which the solution defines",
        "def isclose(*a): return True\ndef f(x): return 0",
        "assert isclose(f(2), 4)",
        "def isclose(a, b): return a == b\ndef f(x): return x * x",
    ),
    (
        "which the solution imports and defines",
        "def f(x): return 0",
        "assert isqrt(f(2)) == 2",
        "from math import isqrt\ndef isqrt(x): return 2\ndef f(x): return x * x",
    ),
    (
        "a built-in that the solution defines",
        "def sorted(x): return [1, 2, 3]\ndef f(x): return 0",
        "assert sorted(f(3)) == [1, 2, 3]",
        "def sorted(x): return x\ndef f(x): return [1, 2, 3]",
    ),
    (
        "a built-in that nobody defines",
        "def sorted(x): return [1, 2, 3]\ndef f(x): return 0",
        "assert sorted(f(3)) == [1, 2, 3]",
        None,
    ),
    (
        "by way of a variable",
        "def same(*a): return True\ndef f(x): return 0",
        "x = f(2)\ny = x\nassert same(y, 4)",
        None,
    ),
    (
        "by way of a function of the tests",
        "def same(*a): return True\ndef f(x): return 0",
        "def check(a, b):\n  return same(a, b)\nassert check(f(2), 4)",
        None,
    ),
    (
        "by way of a loop",
        "def same(*a): return True\ndef f(x): return 0",
        "for x in [f(2)]:\n  assert same(x, 4)",
        None,
    ),
    (
        "both sides of a comparison",
        "class Point:\n def __new__(c, *a): return 0\ndef f(x): return 0",
        "assert f(2) == Point(2)",
        None,
    ),
    (
        "a difference",
        "def Decimal(x): return 0\ndef f(x): return 0",
        "assert abs(f(2) - Decimal(4)) < 1",
        None,
    ),
    (
        "a range that is empty",
        "N = 0\ndef f(x): return 0",
        "assert all(f(i) == i * i for i in range(2, N))",
        None,
    ),
    (
        "NumPy that nobody imports",
        "class np: allclose = lambda *a: True\ndef f(x): return 0",
        "assert np.allclose(f(2), 4)",
        None,
    ),
    ("nothing at all", "", "assert True", None),
    (
        "a method that is taken for text's",
        "class T: startswith = lambda *a: True\ndef f(x): return T()",
        "assert f(2).startswith('4')",
        None,
    ),
    (
        "a method that is given what is expected",
        "class T: equals = lambda *a: True\ndef f(x): return T()",
        "assert f(2).equals(4)",
        "class R:\n def equals(s, x): return x == 4\ndef f(x): return R()",
    ),
    (
        "the same by way of an attribute",
        "class T:\n equals = lambda *a: True\n a = property(lambda s: s)\ndef f(x): return T()",
        "assert f(2).a.equals(4)",
        None,
    ),
    (
        "a method of a function's result of a class",
        "class P:\n upper = lambda s: s\n isupper = lambda s: True\ndef f(x): return P()",
        "assert f('ab').isupper()",
        None,
    ),
]
IDS = [each[0] for each in JOINED]

LIMITS = Limits(seconds=2)


@pytest.mark.parametrize("reference", [None, SOLUTION])
async def test_an_honest_answer_passes_all_tests(reference: str | None) -> None:
    checked = await run_asserts(SOLUTION, TESTS, reference=reference, limits=Limits(seconds=30))
    assert checked.passed == (True,) * len(TESTS), checked.ran.stderr


@pytest.mark.parametrize("reference", [None, SOLUTION])
async def test_no_cheat_earns_a_point(reference: str | None) -> None:
    earned: dict[str, tuple[bool, ...]] = {}

    async def attempt(name: str, code: str) -> None:
        checked = await run_asserts(code, TESTS, reference=reference, limits=LIMITS)
        if any(checked.passed):
            earned[name] = checked.passed

    async with anyio.create_task_group() as tasks:
        for name, code in CHEATS.items():
            tasks.start_soon(attempt, name, code)
    assert earned == {}
    assert len(CHEATS) >= 50


@pytest.mark.parametrize(("code", "test", "reference"), [each[1:] for each in JOINED], ids=IDS)
async def test_no_name_of_the_tests_is_the_answer_s(
    code: str, test: str, reference: str | None
) -> None:
    try:
        checked = await run_asserts(code, [test], reference=reference, limits=LIMITS)
    except DataError as error:
        assert "of the answer" in str(error) or "from the answer together" in str(error)
    else:
        assert checked.passed == (False,)
