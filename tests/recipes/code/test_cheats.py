"""Cheats of `cheats.toml`: wrong answers that try to pass all the same. None earns a point."""

import tomllib
from pathlib import Path

import anyio

from es_cookbook.recipes.code.asserts import run_asserts
from es_cookbook.rl.grading.sandbox import Limits
from tests.sandboxes import needs_sandbox

pytestmark = needs_sandbox

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
CHEATS: dict[str, str] = tomllib.loads(
    Path(__file__).with_name("cheats.toml").read_text(encoding="utf-8")
)


async def test_an_honest_answer_passes_all_tests() -> None:
    passed, ran = await run_asserts(SOLUTION, TESTS, limits=Limits(seconds=30))
    assert passed == (True,) * len(TESTS), ran.stderr


async def test_no_cheat_earns_a_point() -> None:
    earned: dict[str, tuple[bool, ...]] = {}

    async def attempt(name: str, code: str) -> None:
        passed, _ = await run_asserts(code, TESTS, reference=SOLUTION, limits=Limits(seconds=2))
        if any(passed):
            earned[name] = passed

    async with anyio.create_task_group() as tasks:
        for name, code in CHEATS.items():
            tasks.start_soon(attempt, name, code)
    assert earned == {}
