"""Mathematics is compared in a worker process, and what cannot be is 0 or a sentence."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.plugins.math.reward import Math
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.base import graded
from es_cookbook.rl.types import ANSWER

STAND_IN = '''
"""Compares texts between dollars; some of them take for ever."""

class LatexExtractionConfig: pass

def parse(text, *how, parsing_timeout):
    assert parsing_timeout == 0
    while "^" in text:
        pass
    return [text.split("$")[1].replace("z", "y")]

def verify(gold, found, timeout_seconds):
    assert timeout_seconds == 0
    return gold == found
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A math_verify for the workers of a test."""
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))


async def grade(text: str, answer: object, **options: float) -> Grade:
    return await graded(Math(**options), text, {"answer": answer}, "row 1")  # type: ignore[arg-type]


@pytest.mark.usefixtures("stand_in")
async def test_a_comparison_runs_in_a_worker_without_alarms() -> None:
    in_time = {"math_timeouts": 0.0}
    assert await grade(r"so \boxed{x +  1}", "x + 1") == Grade(1.0, in_time, {ANSWER: "x+1"})
    found = await grade("<answer>$x$ it is</answer>", ["y", "x"])
    assert found == Grade(1.0, in_time, {ANSWER: "$x$itis"})
    assert (await grade("<answer>z + 1</answer>", "y + 1")).reward == 1.0, "by the stand-in"
    assert await grade("x", "x") == Grade(1.0, in_time, {ANSWER: "x"})
    assert await grade("<answer>x", "x") == Grade(0.0, in_time)


@pytest.mark.usefixtures("stand_in")
async def test_an_answer_that_takes_for_ever_is_worth_nothing_and_counted() -> None:
    assert await grade(r"\boxed{9^9^9}", "9", timeout=0.2) == Grade(
        0.0, {"math_timeouts": 1.0}, {ANSWER: "9^9^9"}
    )
    assert (await grade(r"\boxed{9}", "9")).reward == 1.0


def test_a_row_whose_answer_states_no_formula_is_refused() -> None:
    with pytest.raises(DataError, match=r"'answer' must state a formula, found 'not \$3\$'"):
        Math().check_row({"answer": "not $3$"})


async def test_the_longest_answers_are_wrong_unread() -> None:
    assert (await grade(rf"\boxed{{{'1' * 1001}}}", "1")).reward == 0.0


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="math-verify is installed")
async def test_without_math_verify_a_sentence_says_how_to_install_it() -> None:
    sentence = (
        "reward=math needs math-verify, which is not installed: pip install 'es-cookbook.math.'"
    )
    with pytest.raises(ConfigError, match=sentence):
        Math().check()
    with pytest.raises(EnvError, match=f"row 1: reward 'math': {sentence}"):
        await grade("1", "1")


@pytest.mark.daily
@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"<answer>$\{2, 1\}$</answer>", r"\{1, 2\}", 1),
        (r"\boxed{\$1,200}", r"\$1{,}200", 1),
        (r"\boxed{43}", "42", 0),
        (r"\boxed{(((((}", "42", 0),
        ("", "42", 0),
    ],
)
async def test_math_verify_itself(text: str, answer: str, score: float) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert (await grade(text, answer, timeout=10)).reward == score


@pytest.mark.slow
async def test_math_verify_itself_with_a_tower_of_powers_is_over_in_time() -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert (await grade(r"\boxed{9^{9^{9^9}}}", "42", timeout=2)).reward == 0.0
