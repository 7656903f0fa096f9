"""Asserts judge model-written code, which can neither see nor fake the verdict."""

import collections

import pytest

from es_cookbook.common.errors import DataError
from es_cookbook.recipes.code.asserts import asked_names, run_asserts
from es_cookbook.rl.grading.sandbox import Limits
from tests.sandboxes import needs_sandbox

pytestmark = [pytest.mark.anyio, needs_sandbox]


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
        ("def f(n): return map(str, range(n))", "sum(map(int, f(3))) == 3"),
        ("def f(x): return 10 ** 3000 + x", "f(1) == 10 ** 3000 + 1"),
        ("def f(): return float('nan')", "f() != f()"),
        ("def f(): return frozenset((1, 2))", "len({f(), f()}) == 1"),
        (
            "LIMIT = 7\ndef f(x): return x < LIMIT",
            "all(f(i) for i in range(7)) and not f(7) and LIMIT == 7",
        ),
        (
            "class Pair:\n  def __init__(s, a): s.a = a\ndef f(pairs): return [p.a for p in pairs]",
            "f([Pair(1), Pair(2)]) == [1, 2] and Pair(3).a == 3",
        ),
        ("from collections import Counter as f", "f('aab') == {'a': 2, 'b': 1}"),
    ],
)
async def test_plain_data_goes_both_ways_and_objects_stay(code: str, test: str) -> None:
    assert (await run_asserts(code, [f"assert {test}"]))[0] == (True,)


async def test_exceptions_arrive_under_their_name() -> None:
    code = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x"
    test = (
        "try:\n  f(-1)\nexcept ValueError as e:\n  assert str(e) == 'negative'\nelse:\n  assert 0"
    )
    assert (await run_asserts(code, [test, "f(-1)"]))[0] == (True, False)


async def test_a_reference_says_which_names_count_and_what_the_tests_import() -> None:
    reference = "import math\nfrom os import path\ndef sum(a, b):\n    return a + b\n"
    tests = ["assert sum(10, 15) == 25", "assert math.isclose(sum(1, 2), 3)"]
    right = "def sum(x, y): return x + y"
    assert (await run_asserts(right, tests, reference=reference))[0] == (True, True)
    wrong = "def sum(x, y): return 0\nclass math:\n  isclose = lambda a, b: True"
    assert (await run_asserts(wrong, tests, reference=reference))[0] == (False, False)


async def test_the_tests_are_not_where_the_code_is() -> None:
    code = """
import gc, re
def f(x):
    texts = (o for o in gc.get_objects() for o in (o, *gc.get_referents(o)) if isinstance(o, str))
    return sum(bool(re.match(r"\\w{6} f.41", text)) for text in texts)
"""
    assert (await run_asserts(code, ["assert f(41) == 0"]))[0] == (True,)


async def test_tests_after_one_that_never_ends_have_failed() -> None:
    code = "def f(x):\n    while x == 2: pass\n    return x"
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]
    passed, ran = await run_asserts(code, tests, limits=Limits(seconds=0.6))
    assert passed == (True, False, False)
    assert ran.ended == "deadline"


@pytest.mark.parametrize(
    ("code", "tests", "why"),
    [
        ("def f(", ["assert f(1)"], "the code has ended its process"),
        ("def f(x): return x", ["assert g(1)"], "NameError: name 'g' is not defined"),
        ("def f(x): return x", ["assert f(lambda: 1)"], "a function cannot be passed to the code"),
        ("def f(x): return 1 / 0", ["assert f(1)"], "ZeroDivisionError: division by zero"),
    ],
)
async def test_what_went_wrong_is_told(code: str, tests: list[str], why: str) -> None:
    passed, ran = await run_asserts(code, tests)
    assert passed == (False,)
    assert why in ran.stderr


@pytest.mark.parametrize(
    ("test", "reference", "task", "sentence"),
    [
        ("assert f(1", None, "", "test 1 is not Python: "),
        ("assert 1 + 1 == 2", None, "", "test 1 uses nothing of the answer"),
        ("assert sum(1, 2) == 3", None, "", "test 1 uses nothing of the answer"),
        ("assert f(2) == Counter()", None, "", "test 1 takes 'Counter' and 'f' from the answer"),
        ("assert g(f(2)) == 4", None, "Write `f` and `g`.", "'f' and 'g' from the answer"),
        ("assert g(f(2)) == 4", "def f(x): 0\ndef g(x): 0", "Write g and `f`.", "'f' and 'g'"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused(
    test: str, reference: str | None, task: str, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        asked_names((test,), "", reference, task)


@pytest.mark.parametrize(
    ("test", "setup", "reference", "names"),
    [
        ("assert f(2) == 4 and g(2) == 5", "", None, ["f", "g"]),
        ("assert g(f(2)) == 4", "", "def f(x): 0\ndef g(x): 0", ["f", "g"]),
        ("assert f([Pair(1, 2)], 2) == 3", "", None, ["Pair", "f"]),
        ("assert f(root) == 3", "root = Node(1)\nroot.left = Node(2)", None, ["Node", "f"]),
        ("assert Counter(f(2)) == Counter()", "from collections import Counter", None, ["f"]),
        ("assert check(f, 2)", "def check(g, x): return g(x) == x", None, ["f"]),
        ("assert Solution().f(2) == f(2) or g", "f = abs", None, ["Solution", "g"]),
        ("assert sum(1, 2) == 3", "", "def sum(a, b): 0\ndef helper(): 0", ["sum"]),
    ],
)
def test_from_the_answer_come_only_names_that_are_asked_for(
    test: str, setup: str, reference: str | None, names: list[str]
) -> None:
    assert [*asked_names((test,), setup, reference, "Write `f` and `g`.")[0]] == names


OWN_CLASSES = """
import copy, enum, functools, pickle, sys, typing
from dataclasses import dataclass, field
@dataclass(order=True)
class Parcel:
    weight: int
    labels: "list[str]" = field(default_factory=list)
class Place(typing.NamedTuple):
    row: int
    column: int = 0
class Size(enum.Enum):
    SMALL = 1
class Options(typing.TypedDict):
    depth: int
@functools.singledispatch
def kind(x): return "other"
@kind.register
def _(x: int): return "whole"
def heavier(n): return max(Parcel(n), Parcel(1)).weight
def again(n): return pickle.loads(pickle.dumps([Parcel(n), Place(n), Size.SMALL]))[0].weight
def copied(n): return copy.deepcopy(Parcel(n, ["a"])).labels
def hints(): return [k for c in (Parcel, Place, Options) for k in typing.get_type_hints(c)]
def by_name(name): return getattr(sys.modules[__name__], name)(3)
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
async def test_code_is_a_module_in_which_its_classes_are_found(future: str) -> None:
    tests = [
        "assert heavier(5) == 5",
        "assert again(4) == 4",
        "assert copied(4) == ['a']",
        "assert hints() == ['weight', 'labels', 'row', 'column', 'depth']",
        "assert kind(3) == 'whole' and kind('') == 'other'",
        "assert by_name('heavier') == 3",
        f"{future}from dataclasses import dataclass\n@dataclass\nclass Own:\n  x: int\n"
        "import pickle\nassert heavier(pickle.loads(pickle.dumps(Own(7))).x) == 7",
    ]
    passed, ran = await run_asserts(future + OWN_CLASSES, tests)
    assert all(passed), ran.stderr


async def test_annotations_are_what_the_code_makes_them() -> None:
    code = "def g(x: int): ...\ndef f(): return g.__annotations__['x']"
    future = f"from __future__ import annotations\n{code}"
    test = "assert f() == 'int'"
    assert (await run_asserts(code, [test]))[0] == (False,)
    assert (await run_asserts(future, [test]))[0] == (True,)


VALUES = """
import array, collections, datetime, decimal, fractions, pathlib, time as clock, types, typing, uuid
import zoneinfo
from collections import *
from datetime import *
from decimal import Decimal
from fractions import Fraction
class Third(Fraction): pass
class Price(Decimal): pass
class Day(date): pass
class Holiday(date):
    def is_long(self): return False
class Half(tzinfo):
    def utcoffset(self, moment): return timedelta(minutes=30)
    def dst(self, moment): return None
class Words(UserDict): pass
class Spot(typing.NamedTuple):
    row: int
    place: typing.Any = None
    def norm(self): return abs(self.row)
class Broken(OSError):
    code = 4
class Group(ExceptionGroup): pass
UTC1 = timezone(timedelta(hours=1))
late = datetime(2023, 10, 29, 2, 30, fold=1)
def f(): return {}
"""


TRIED_VALUES = [
    ("Fraction(7, 3)", "fractions.Fraction(7, 3) == f() > 2"),
    ("[Third(1, 3)]", "sum(f()) * 3 == 1"),
    ("Decimal('2.50')", "str(f()) == '2.50' and f() + 1 == decimal.Decimal('3.5')"),
    ("(Price('0.1'),)", "f()[0] * 3 == decimal.Decimal('0.3')"),
    ("date(2023, 2, 28)", "f() + datetime.timedelta(1) == datetime.date(2023, 3, 1)"),
    ("Day(2023, 2, 28)", "f().month == 2"),
    ("datetime(2023, 2, 28, 12, 0, 0, 5)", "f().isoformat() == '2023-02-28T12:00:00.000005'"),
    ("datetime(2023, 1, 1, tzinfo=UTC1)", "f().utcoffset().seconds == 3600"),
    ("time(23, 59)", "(f().hour, f().minute) == (23, 59)"),
    ("timedelta(days=-1, seconds=3)", "f().total_seconds() == 3 - 86400"),
    ("deque([1, 2, 3], maxlen=2)", "f() == collections.deque([2, 3]) and f().maxlen == 2"),
    ("Counter('banana')", "f().most_common(1) == [('a', 3)] and f()['x'] == 0"),
    ("OrderedDict([('b', 1), ('a', 2)])", "[*f()] == ['b', 'a'] and 'a' in f()"),
    ("OrderedDict(b=1, a=2)", "f() != collections.OrderedDict(a=2, b=1)"),
    ("defaultdict(list, {1: [Decimal(2)]})", "f()[1] == [2] and f()[3] == []"),
    ("defaultdict(lambda: 4, a=1)", "f() == {'a': 1} and f()['b'] == 4"),
    ("defaultdict(Counter, a=1)", "f()['b']['c'] == 0"),
    ("defaultdict(None, a=1)", "f().default_factory is None and 'b' not in f()"),
    ("[defaultdict(lambda: defaultdict(int))]", "f()[0]['b']['c'] == 0"),
    ("ChainMap({'a': 1}, defaultdict(int, b=2))", "dict(f()) == {'a': 1, 'b': 2}"),
    ("ChainMap({'a': 1}, {'a': 3})", "f()['a'] == 1 and f().parents['a'] == 3"),
    ("Words(a=[1])", "f() == {'a': [1]} and f()['a'].pop() == 1"),
    ("UserList([1, 2])", "f() == [1, 2] and f()[-1] == 2"),
    ("UserString('ab')", "f() == 'ab' and f().upper() == 'AB'"),
    ("namedtuple('Pair', 'left right')(1, [2])", "f().right == [2] and f() == (1, [2])"),
    ("[Spot(3), Spot(4)]", "[s.row for s in f()] == [3, 4] and f()[0]._asdict()['row'] == 3"),
    ("Spot(-3)", "str(f()) == 'Spot(row=-3, place=None)' and f()[0] == -3"),
    ("Spot(1, f)", "f()[0] == 1 and f()[1]()[0] == 1"),
    ("namedtuple('Odd', 'a class _b', rename=True)(1, 2, 3)", "(f()._1, f()._2) == (2, 3)"),
    ("Holiday(2023, 2, 28)", "f() == datetime.date(2023, 2, 28)"),
    ("late.replace(tzinfo=UTC1)", "f().fold == 1 and f().tzname() == 'UTC+01:00'"),
    ("late.time()", "f().fold == 1 and f() == datetime.time(2, 30)"),
    ("late.replace(tzinfo=Half())", "f().utcoffset() == datetime.timedelta(minutes=30)"),
    ("late.timetz().replace(tzinfo=timezone.utc)", "f().tzinfo is datetime.timezone.utc"),
    ("late.replace(tzinfo=zoneinfo.ZoneInfo('UTC'))", "f().tzinfo.key == 'UTC'"),
    ("timezone.utc", "f() is datetime.timezone.utc"),
    ("timezone(timedelta(hours=2), 'CEST')", "f().tzname(None) == 'CEST'"),
    ("clock.gmtime(0)", "f().tm_year == 1970 and f()[1:3] == (1, 1)"),
    ("uuid.UUID(int=7)", "f() == uuid.UUID(int=7) and f().version is None"),
    ("pathlib.PurePosixPath('a') / 'b.c'", "f().suffix == '.c' and str(f()) == 'a/b.c'"),
    ("pathlib.Path('a')", "f() == pathlib.Path('a')"),
    ("pathlib.PureWindowsPath('C:/a')", "f().drive == 'C:'"),
    ("slice(1, None)", "[1, 2, 3][f()] == [2, 3] and f() == slice(1, None)"),
    ("[..., NotImplemented]", "f()[0] is ... and f()[1] is NotImplemented"),
    ("types.SimpleNamespace(a=[1], b=None)", "f().a == [1] and f().b is None"),
    ("types.MappingProxyType({'a': 1})", "f() == {'a': 1} and f()['a'] == 1"),
    ("ValueError('x', 3)", "isinstance(f(), ValueError) and f().args == ('x', 3)"),
    ("[StopIteration(3)]", "f()[0].value == 3"),
    ("Broken(2, 'gone')", "isinstance(f(), OSError) and 'gone' in str(f())"),
    ("KeyError(f)", "type(f()) is KeyError and f().args == ()"),
    ("ExceptionGroup('g', [KeyError('a')])", "f().exceptions[0].args == ('a',)"),
    ("Group('g', [KeyError('a')])", "f().split(KeyError)[1] is None"),
    ("memoryview(b'abc')", "f() == b'abc' and f()[1:].tobytes() == b'bc'"),
    ("memoryview(b'')", "len(f()) == 0"),
    ("memoryview(array.array('i', [4, 5]))", "f().tolist() == [4, 5]"),
    ("array.array('d', [0.5])", "f()[0] == 0.5 and f().typecode == 'd'"),
    ("bytearray(b'x')", "f() == b'x' and f().pop() == 120"),
    ("range(2, 9, 3)", "f() == range(2, 9, 3) and len(f()) == 3 and f()[1] == 5"),
    ("{'a': 1}.keys()", "f() == {'a'}"),
    ("{'a': [1]}.items()", "list(f()) == [('a', [1])]"),
    ("UserDict(a=1).keys()", "list(f()) == ['a']"),
    ("{'a': [1]}.values()", "list(f()) == [[1]]"),
    ("-(7 ** 9000)", "-f() == 7 ** 9000"),
    ("{3 ** 20000: {3 ** 20000}}", "f() == {3 ** 20000: {3 ** 20000}}"),
    ("Fraction(1, 3 ** 20000)", "f().denominator % 9 == 0"),
]
TRIED = " ".join(value for value, _ in TRIED_VALUES)


@pytest.mark.parametrize(("value", "test"), TRIED_VALUES)
async def test_values_of_the_standard_library_compare_as_they_do_in_one_process(
    value: str, test: str
) -> None:
    passed, ran = await run_asserts(VALUES.format(value), [f"assert {test}"])
    assert passed == (True,), ran.stderr


async def test_values_of_the_standard_library_are_arguments() -> None:
    code = "def f(x, y): return x + y"
    tests = [
        "assert f(decimal.Decimal(1), 2) == 3",
        "assert f(fractions.Fraction(1, 2), fractions.Fraction(1, 2)) == 1",
        "assert f(datetime.date(2024, 2, 28), datetime.timedelta(2)).month == 3",
        "assert f(collections.Counter('ab'), collections.Counter('b'))['b'] == 2",
        "assert f(collections.deque([1]), collections.deque([2])) == collections.deque([1, 2])",
        "assert f(11 ** 6000, 1) == 11 ** 6000 + 1",
        "Two = collections.namedtuple('Two', 'a b')\nassert f(Two(1, 2), (3,)) == (1, 2, 3)",
        "zone = datetime.timezone.utc\nday = datetime.datetime(2024, 1, 1, tzinfo=zone)\n"
        "assert f(day, datetime.timedelta(1)).tzinfo is zone",
    ]
    passed, ran = await run_asserts(code, tests)
    assert all(passed), ran.stderr


def test_every_class_of_collections_is_among_the_values_that_are_tried() -> None:
    assert [name for name in collections.__all__ if f"{name}(" not in TRIED] == []


async def test_attributes_of_the_code_s_objects_can_be_set() -> None:
    code = """
class Node:
    count = 0
    def __init__(self, value): self.value, self.next = value, None
    def total(self): return self.value + (self.next.total() if self.next else 0)
def make(): return Node(1)
"""
    tests = [
        "n = Node(1)\nn.value = [5][0]\nassert n.total() == n.value == 5",
        "n = Node(1)\nn.next = Node(2)\nn.next.next = Node(3)\nassert n.total() == 6",
        "n = Node(1)\nn._index = 7\nassert n._index == 7",
        "n = Node(1)\ndel n.value\nassert not hasattr(n, 'value')",
        "Node.count = 4\nassert Node(1).count == 4",
        "make().value = 5",
        "Node(1).__class__ = int",
        "Node(1).value = abs",
    ]
    passed, ran = await run_asserts(code, tests)
    assert passed == (True,) * 5 + (False,) * 3, ran.stderr
    assert "6: AttributeError: 'value': the tests do not name the class" in ran.stderr
    assert "8: TypeError: a builtin_function_or_method cannot be passed" in ran.stderr


async def test_a_class_that_the_tests_name_keeps_what_it_adds_to_one_of_the_library() -> None:
    code = """
import datetime
class Day(datetime.date):
    def next(self): return Day.fromordinal(self.toordinal() + 1)
class Denied(ValueError):
    def __init__(self, code): self.code = code
def is_denied(found): return isinstance(found, Denied)
"""
    tests = [
        "assert Day(2024, 2, 28).next().next().month == 3",
        "assert Denied(7).code == 7 and is_denied(Denied(7))",
    ]
    passed, ran = await run_asserts(code, tests)
    assert all(passed), ran.stderr


async def test_a_class_with_methods_of_its_own_keeps_them() -> None:
    code = (
        "from collections import deque\nclass Stack(deque):\n    def push(self, x): self.append(x)"
    )
    test = "s = Stack()\ns.push(3)\nassert s.pop() == 3"
    assert (await run_asserts(code, [test]))[0] == (True,)


@pytest.mark.parametrize(
    "fails",
    [
        "sys.exit(3)",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "raise ValueError(13 ** 9000)",
        "raise Untold",
        "raise Unnamed",
        "raise ExceptionGroup('g', [Untold()])",
        "return Unread()",
    ],
)
async def test_however_one_test_ends_the_others_are_run(fails: str) -> None:
    code = f"""
import sys
class Untold(Exception):
    def __str__(self): raise SystemExit
    __repr__ = __str__
class Meta(type):
    @property
    def __name__(self): raise KeyError
class Unnamed(Exception, metaclass=Meta): pass
class Unread:
    @property
    def __class__(self): sys.exit()
def f(x):
    if x == 2: {fails}
    return x
"""
    tests = ["assert f(1) == 1", "assert f(2) == 2", "assert 0, f(9) ** 9999", "assert f(3) == 3"]
    passed, ran = await run_asserts(code, tests)
    assert passed == (True, False, False, True), ran.stderr
    assert "3: AssertionError" in ran.stderr


@pytest.mark.parametrize(
    "ends",
    ["os._exit(0)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)", "os.closerange(3, 60)"],
)
async def test_code_that_ends_its_process_is_started_anew_for_the_next_test(ends: str) -> None:
    code = f"""
import ctypes, os
calls = 0
class Pair:
    def __init__(self, a): self.a = a
def f(pair):
    global calls
    calls += 1
    if pair.a == 2: {ends}
    return [pair.a, calls]
"""
    tests = [
        "assert f(given) == [7, 1]",
        "late = Pair(1)\nassert f(late) == [1, 2]",
        "f(Pair(2))",
        "assert f(given) == [7, 1]",
        "assert f(late) == [1, 1]",
        "assert f(Pair(4)) == [4, 2]",
        "try:\n  f(Pair(2))\nexcept RuntimeError: pass\nassert f(given)",
        "assert f(Pair(5)) == [5, 1]",
    ]
    passed, ran = await run_asserts(code, tests, setup="given = Pair(7)")
    assert passed == (True, True, False, True, False, True, False, True), ran.stderr
    assert "5: RuntimeError: the code has ended the process of an object" in ran.stderr


async def test_an_interpreter_that_starts_anew_knows_no_test() -> None:
    code = """
import gc, os, re, sys
def f(x):
    if x == 2: os._exit(0)
    texts = (o for o in gc.get_objects() for o in (o, *gc.get_referents(o)) if isinstance(o, str))
    return sum(bool(re.match(r"\\w{6} f.41", text)) for text in (*texts, *sys.orig_argv))
"""
    passed, _ = await run_asserts(code, ["assert f(41) == 0", "f(2)", "assert f(41) == 0"])
    assert passed == (True, False, True)


@pytest.mark.parametrize(
    ("made", "test"),
    [
        ("x = [x]", "depth(f(90_000), list) == 90_000"),
        ("x = (x, {1: x})[:1]", "depth(f(12), tuple) == 12"),
        ("x = {'a': x}", "depth(f(7000), dict) == 7000"),
        ("x = iter([x])", "depth(f(3000), object) == 3000"),
        ("x = deque([x])", "depth(f(2000), collections.deque) == 2000"),
        ("x.append(x)", "f(1)"),
    ],
)
async def test_values_nested_deeply_arrive_and_endless_ones_fail_alone(
    made: str, test: str
) -> None:
    code = f"""
from collections import deque
def f(n):
    x = []
    for _ in range(n): {made}
    return x
"""
    setup = """
def depth(found, kind):
    levels = 0
    while found != [] and isinstance(found, kind):
        levels += 1
        found = [*(found.values() if kind is dict else found)][0]
    return levels
"""
    tests = [f"assert {test}", "assert f(0) == []"]
    passed, ran = await run_asserts(code, tests, setup=setup, limits=Limits(seconds=30))
    is_endless = "depth" not in test
    assert passed == (not is_endless, True), ran.stderr
    assert ("1: ValueError: too many containers" in ran.stderr) == is_endless


def test_a_test_with_an_expression_nested_deeply_is_refused() -> None:
    for test in ("assert f(1) == " + "+".join("1" * 700), "assert f(1)" + ".a" * 700):
        with pytest.raises(DataError, match="the tests or the setup is nested too deeply"):
            asked_names((test,))


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        ("KeyError('a')", "KeyError as e:\n  assert e.args == ('a',)"),
        ("b'\\xff'.decode()", "UnicodeDecodeError as e:\n  assert e.start == 0"),
        ("Negative(-3)", "ValueError as e:\n  assert str(e) == 'below 0: -3'"),
        ("json.loads('{')", "ValueError as e:\n  assert 'line 1' in str(e)"),
        ("Decimal('x')", "ArithmeticError:\n  pass"),
        ("sys.exit(3)", "SystemExit as e:\n  assert e.code == 3"),
        ("open('/none')", "FileNotFoundError as e:\n  assert e.errno == 2"),
    ],
)
async def test_exceptions_arrive_as_the_nearest_built_in_one(raised: str, caught: str) -> None:
    code = f"""
import json, sys
from decimal import Decimal
class Negative(ValueError):
    def __str__(self): return f"below 0: {{self.args[0]}}"
def f():
    found = {raised}
    raise found
"""
    passed, ran = await run_asserts(code, [f"try:\n  f()\nexcept {caught}\nelse:\n  assert 0"])
    assert passed == (True,), ran.stderr
