"""Mutants: one operator or number of a module is another, and some test ought to fail.

    python -m benchmarks.mutants es_cookbook/evolution/fitness.py     # a module
    python -m benchmarks.mutants HEAD~3                               # lines changed since then
    python -m benchmarks.mutants es_cookbook/evolution/genome.py tests/engines/test_wire.py

Prints each mutant that no test notices: a test is missing, or the mutant is the same function, or a
test that takes longer than `LONGEST` would notice.
Tests are those of the room of the module, its doctests, and those given, but none that is slow or
starts programs. A mutant meets those that reach its lines, those of its own file first, up to one
that fails.

Everything is imported once, and each mutant (`mutations`) is a fork of that process in which a
function has another code object. Where a constant differs, the fork imports the package again. So
code in separate processes (workers, commands), and what numba or Triton compile, is not mutated.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from benchmarks.mutations import Mutant, mutants

ROOT = Path(__file__).parents[1]
LONGEST, MOST_SECONDS, LIMIT = 1.0, 5.0, 30.0
"""Seconds of a test that mutants meet, and of all that one of them meets, both of processor time;
by the clock, a mutant that takes longer is noticed."""
_CACHED: Any = type(functools.cache(len))


class Reached:
    """The lines of some files that each test reaches, and each test's seconds.

    What a fixture reaches that several tests share counts for all of them.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = paths
        self.lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self._now = ""

    def by(self, path: str, lines: range | None) -> tuple[str, ...]:
        """Return beginnings of the names of tests that reach these lines; of all lines if None."""
        pairs = self.lines.items()
        of = [tests for (of, line), tests in pairs if of == path and (not lines or line in lines)]
        return tuple(set[str]().union(*of))

    def chosen(
        self, path: str, items: Sequence[pytest.Item], tests: tuple[str, ...]
    ) -> list[pytest.Item]:
        """Return the tests of these names, as many as there is time for.

        Those of the module's own file come first, and then the quickest.
        """
        some = [i for i in items if i.nodeid.startswith(tests) and i.nodeid in self.seconds]
        own = f"/test_{Path(path).stem}.py::"
        some.sort(key=lambda item: (own not in item.nodeid, self.seconds[item.nodeid]))
        so_far = itertools.accumulate(self.seconds[item.nodeid] for item in some)
        return [item for item, seconds in zip(some, so_far, strict=True) if seconds < MOST_SECONDS]

    def run(self, items: Sequence[pytest.Item]) -> tuple[Any, dict[str, float]]:
        """Run these tests; returns what is reached, and the seconds."""
        for item, after in zip(items, [*items[1:], None], strict=True):
            self._now, began = item.nodeid, time.process_time()
            threading.settrace(self._trace)
            sys.settrace(self._trace)
            is_failed = fails(item, after)
            sys.settrace(None)
            self.seconds[item.nodeid] = math.inf if is_failed else time.process_time() - began
        return self.lines, self.seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, request: pytest.FixtureRequest) -> Iterator[None]:
        before, self._now = self._now, request.node.nodeid
        try:
            return (yield)
        finally:
            self._now = before

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._paths:
            return None
        if event == "line":
            self.lines[frame.f_code.co_filename, frame.f_lineno].add(self._now)
        return self._trace


def fails(item: pytest.Item, after: pytest.Item | None) -> bool:
    """Run a test that another one follows."""
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=after))


class Session:
    """A pytest session in which mutants meet the tests, once these are collected."""

    def __init__(self, lines: Mapping[str, set[int] | None], tests: Sequence[str]) -> None:
        self._lines, self._tests = lines, tests
        self.counts = Counter[str]()

    def pytest_sessionstart(self) -> None:
        """Run before pytest imports the tests, which would rewrite their assertions."""
        for path in self._lines:
            importlib.import_module(dotted(path))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        reached = Reached(self._lines)
        self._items = [i for i in session.items if "programs" not in getattr(i, "fixturenames", ())]
        gc.unfreeze()
        objects = gc.get_objects()
        functions = [each for each in objects if type(each) is FunctionType]
        self._functions = [f for f in functions if f.__code__.co_filename in self._lines]
        for each in objects:  # What was computed before is what no mutant would compute.
            if type(each) is _CACHED and each.__wrapped__ in self._functions:
                each.cache_clear()
        gc.freeze()
        session.config.pluginmanager.register(reached)
        reached.lines, seconds = forked(lambda: reached.run(self._items))
        reached.seconds = {test: each for test, each in seconds.items() if each <= LONGEST}
        for test in seconds.keys() - reached.seconds.keys():
            print(f"left out: {test}, {seconds[test]:.1f} s")
        for path in self._lines:
            print(Path(path).relative_to(ROOT), flush=True)
            for mutant in mutants(path, Path(path).read_text("utf-8")):
                self._meet(mutant, reached)
        return True

    def _meet(self, mutant: Mutant, reached: Reached) -> None:
        wanted = self._lines[mutant.path]
        if wanted is not None and wanted.isdisjoint(mutant.lines):
            return
        tests = reached.by(mutant.path, mutant.lines if mutant.functions else None)
        result = "noticed"
        if not tests:
            result = "not reached"
        elif forked(functools.partial(self._survives, mutant, tests, reached), LIMIT):
            result = "survives"
        self.counts[result] += 1
        if result != "noticed":
            print(f"  {result}: {mutant.change}", flush=True)

    def _survives(self, mutant: Mutant, tests: tuple[str, ...], reached: Reached) -> bool:
        if not mutant.functions:
            become_module(mutant)
            code = run(self._tests, Chosen(mutant.path, tests, reached))
            return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        for function in self._functions:
            function.__code__ = mutant.functions.get(function.__code__, function.__code__)
        items = reached.chosen(mutant.path, self._items, tests)
        return not any(map(fails, items, [*items[1:], None]))


@dataclass(frozen=True)
class Chosen:
    """Select only these tests of a pytest session."""

    path: str
    tests: tuple[str, ...]
    reached: Reached

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = self.reached.chosen(self.path, items, self.tests)


def become_module(mutant: Mutant) -> None:
    """Import the package again, with this mutant."""

    class Loader(SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            return mutant.module

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> ModuleSpec | None:
            loader = Loader(name, mutant.path)
            return spec_from_loader(name, loader) if name == dotted(mutant.path) else None

    sys.meta_path.insert(0, Finder)  # pyright: ignore[reportArgumentType]
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("es_cookbook", "tests"):
            del sys.modules[name]
    importlib.import_module(dotted(mutant.path))


def dotted(path: str) -> str:
    return ".".join(Path(path).relative_to(ROOT).with_suffix("").parts)


def forked(work: Callable[[], Any], seconds: float = 3600.0) -> Any:  # noqa: ANN401
    """Run work in a fork of this process; None if it dies or takes too long."""
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with contextlib.suppress(BaseException), os.fdopen(writable, "wb") as file:
            file.write(pickle.dumps(work()))
        os._exit(0)
    os.close(writable)
    timer = threading.Timer(seconds, lambda: os.killpg(child, signal.SIGKILL))
    timer.start()
    with os.fdopen(readable, "rb") as file:
        found = file.read()
    timer.cancel()
    os.waitpid(child, 0)
    return pickle.loads(found) if found else None


def run(tests: Sequence[str], plugin: object) -> int:
    options = ("-x", "-q", "-s", "-p", "no:cacheprovider", "-m", "not slow")
    return int(pytest.main([*options, *tests], plugins=[plugin]))


def changed_lines(revision: str) -> dict[str, set[int]]:
    """Return changed lines of the package's modules, since a revision."""
    command = ["git", "diff", "-U0", "--diff-filter=d", revision, "--", "es_cookbook/*.py"]
    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.split("\n"):
        if line.startswith("+++ b/"):
            path = line[6:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            found[path] |= set(range(start, start + count))
    return found


def main(arguments: Sequence[str]) -> int:
    lines: dict[str, set[int] | None] = {}
    for argument in arguments:
        if argument.startswith("es_cookbook/"):
            lines[argument] = None
        elif not (ROOT / argument).exists():
            lines |= changed_lines(argument)
    more = [each for each in arguments if each.startswith("tests/")]
    rooms = {f"tests/{path.split('/')[1]}" for path in lines}
    session = Session({str(ROOT / path): of for path, of in lines.items()}, [*lines, *rooms, *more])
    run([*lines, *sorted(rooms), *more], session)
    print(", ".join(f"{count} {result}" for result, count in session.counts.items()))
    return 0 if session.counts.keys() <= {"noticed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
