r"""100,000 hostile texts for every parser of what models write: no exception, none above 10 ms.

    python -m benchmarks.parsers
    python -m benchmarks.parsers 2000

Hypothesis makes the texts: tags and boxes opened, closed and nested, digits, brackets, controls,
characters of other scripts, half surrogates; a part of it repeated up to a megabyte, or put into
tags. Each text is given to one parser, the number of texts (all parsers together) is the argument.
A parser may refuse by the error that it documents, and raise nothing else.

Time is the thread's own processor time, so that a loaded machine is no failure, and the least of
up to 20 tries where the first was above the limit.

What is no model's text but data or an option (boards, a row, a template, a judge's reply) is as
long as that may be, at most 10,000 characters here.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.harness import report, row
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.plugins.judges.chat import AskAgainError, completion_in
from es_cookbook.plugins.judges.judges import verdict_in
from es_cookbook.plugins.judges.reward import mark_in
from es_cookbook.plugins.math.reward import Math
from es_cookbook.plugins.objectives.length import Length
from es_cookbook.recipes.arithmetic.dataset import ArithmeticEnv
from es_cookbook.recipes.code.dataset import extract_code
from es_cookbook.recipes.code.dataset import read_problem as read_code_problem
from es_cookbook.recipes.conciseness.reward import Conciseness
from es_cookbook.recipes.countdown.arithmetic import CountdownReward, evaluate, grade_countdown
from es_cookbook.recipes.crossword.reward import Crossword, canonical, letters
from es_cookbook.recipes.math.dataset import read_problem as read_math_problem
from es_cookbook.recipes.rush_hour.boards import parse_board, parse_moves
from es_cookbook.recipes.rush_hour.dataset import RushHourReward, grade_rush_hour
from es_cookbook.recipes.tic_tac_toe.game import read_move
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.messages.message import parse_tool_calls
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.rewards.answers import boxed, extracted, last_number
from es_cookbook.rl.rewards.format import Format, extract_answer
from es_cookbook.rl.rewards.matching import Choice, Exact, Number, Regex
from es_cookbook.rl.types import Observation

CASES = 100_000
LIMIT = 0.01
"""Seconds for a text."""
TRIES = 20


class Parser(NamedTuple):
    """A parser, its documented errors, and the longest text that it is given."""

    read: Callable[[str], object]
    refuses: tuple[type[Exception], ...] = ()
    longest: int = 1_000_000


_BOARD = parse_board("ooBo AABo oooo oooo")
_CHOICES = {"answer": "B", "choices": ["12", "deep"]}
_completion = '{{"choices": [{{"message": {{"content": {}}}}}]}}'.format


def _task(template: str) -> Task:
    return Task(source="rows.jsonl", prompt=template, reward=Exact())


def _mark(text: str) -> float:
    return mark_in(completion_in(_completion(json.dumps(text)).encode()).text, 10)


def _reply(text: str) -> float:
    return mark_in(completion_in(text.encode("utf-8", "replace")).text, 10)


def _math(text: str) -> list[str]:
    """Read the input of math-verify, which itself runs in a separate process with a deadline."""
    return Math().golds_and_answers(text, {"answer": "1"})[1]


def _code_rows(text: str) -> None:
    """Return a row of tests and solutions, which are JSON."""
    rows = {"input_output": text, "solutions": text}, {"input_output": '{"inputs": []', "x": text}
    for fields in rows:
        read_code_problem(Row("row 1", {"question": "?", **fields}), 8)


PARSERS: Mapping[str, Parser] = {
    "extracted": Parser(partial(extracted, extract="auto")),
    "extract_answer": Parser(extract_answer),
    "spoken": Parser(spoken),
    "boxed": Parser(boxed),
    "evaluate": Parser(evaluate),
    "grade_countdown": Parser(
        partial(grade_countdown, numbers=[1, 2, 3], target=6, reward=CountdownReward())
    ),
    "last_number": Parser(last_number),
    "number": Parser(lambda text: Number()(text, {"answer": 12})),
    "exact": Parser(lambda text: Exact()(text, {"answer": "deep"})),
    "choice": Parser(lambda text: Choice()(text, _CHOICES)),
    "regex": Parser(lambda text: Regex(pattern=r"\d{4}")(text, {})),
    "math": Parser(_math),
    "format tags": Parser(lambda text: Format()(text, {})),
    "format paper": Parser(lambda text: Format(form="paper")(text, {})),
    "conciseness": Parser(lambda text: Conciseness()(text, {"answer": ["deep", "x"]})),
    "arithmetic": Parser(ArithmeticEnv(Observation(()), (347, 285), "words").grade),
    "length": Parser(lambda text: Length()(text, {"answer": "deep"})),
    "moves": Parser(parse_moves),
    "move of tic-tac-toe": Parser(read_move),
    "grade_rush_hour": Parser(
        partial(grade_rush_hour, board=_BOARD, optimal=2, reward=RushHourReward())
    ),
    "code": Parser(extract_code),
    "calls of hermes": Parser(partial(parse_tool_calls, form="hermes")),
    "calls of llama": Parser(partial(parse_tool_calls, form="llama")),
    "board": Parser(parse_board, (ValueError,), 10_000),
    "crossword": Parser(lambda text: Crossword()(text, {"answer": "deep", "enumeration": "(4)"})),
    "crossword solution": Parser(lambda text: (canonical(text), letters(text)), (), 2000),
    "template": Parser(_task, (ConfigError,), 2000),
    "judge's mark": Parser(_mark, (AskAgainError,), 10_000),
    "judge's verdict": Parser(partial(verdict_in, verdicts=("A", "B")), (AskAgainError,)),
    "judge's reply": Parser(_reply, (AskAgainError,), 10_000),
    "number in a row": Parser(lambda text: Number()("1", {"answer": text}), (DataError,), 10_000),
    "math row": Parser(
        lambda text: read_math_problem(Row("row 1", {"problem": "?", "solution": text})),
        (DataError,),
    ),
    "code row": Parser(_code_rows, (DataError,), 10_000),
}
"""All parsers of unchecked text."""

_PIECES = st.sampled_from(
    [
        *"0123456789,./-+*eE(){}[]<>%rn^_=:;|?! \n\t\0AB",
        *(
            "\\",
            "\\boxed{",
            "\\boxed",
            "\\frac{",
            "$",
            "\\$",
            "\\(",
            "####",
            "</",
            "```",
            "```py\n",
        ),
        *("<answer>", "</answer>", "<think>", "</think>", "deep", "A>1,", "Bv2", "AABo", "o", "x"),
        *("<tool_call>", "</tool_call>", '{"name": "f", "parameters": {', "<|python_tag|>", "};"),
        *('{"', '"}', "{question}", "{{", "}}", '"choices"', "\\u00e9", "null", "e9", "**"),
        *("\ud800", "\N{SUPERSCRIPT TWO}", "\N{VULGAR FRACTION ONE HALF}", "\ufdfa", "e\u0301"),
        *(
            "\N{LATIN SMALL LETTER SHARP S}",
            "\N{HANGUL SYLLABLE HAN}",
            "\u202e",
            "\u0663",
            "\u2028",
        ),
    ]
)
_SHORT = st.one_of(st.lists(_PIECES, max_size=30).map("".join), st.text(max_size=40))
_AROUND = st.sampled_from(
    [
        ("", ""),
        ("<answer>", "</answer>"),
        ("\\boxed{", "}"),
        ("<think>", ""),
        ("```\n", "\n```"),
        ("<tool_call>", "</tool_call>"),
        ('{"name": "', '", "parameters": {}}'),
    ]
)
_TIMES = st.sampled_from([*[1] * 24, 10, 100, 1000, 10_000, 100_000, 1_000_000])


@st.composite
def texts(draw: st.DrawFn, longest: int) -> str:
    """Return texts of many pieces, or of few that are repeated, in tags or not."""
    opening, closing = draw(_AROUND)
    short = draw(_SHORT)
    times = draw(_TIMES)
    middle = short * min(times, longest // max(len(short), 1) + 1)
    room = longest - len(opening) - len(closing)
    return f"{opening}{middle[:room]}{closing}{draw(_SHORT) if times == 1 else ''}"[:longest]


def seconds_of(parser: Parser, text: str) -> float:
    """Return processor time of reading a text, the least of some tries if the first is long.

    Raises:
        Exception: What the parser does not document.
    """
    least = math.inf
    for _ in range(TRIES):
        began = time.thread_time()
        with contextlib.suppress(*parser.refuses):
            parser.read(text)
        least = min(least, time.thread_time() - began)
        if least < LIMIT:
            break
    return least


def slowest(parser: Parser, cases: int) -> tuple[float, int]:
    """Return the longest time of any text in seconds, and how many texts were tried.

    Raises:
        Exception: A parser raised what it does not document; Hypothesis prints the text.
    """
    found: list[float] = []

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts(parser.longest))
    def try_all(text: str) -> None:
        found.append(seconds_of(parser, text))

    seconds_of(parser, "12")  # What is compiled or imported at the first call.
    try_all()
    return max(found), len(found)


def main(cases: int = CASES) -> None:
    """Try all parsers on as many texts each, and report."""
    each = -(-cases // len(PARSERS))
    rows = []
    tried = 0
    for name, parser in PARSERS.items():
        worst, count = slowest(parser, each)
        tried += count
        rows.append(row(f"{name}: slowest text", [worst * 1000], "ms", at_most=LIMIT * 1000))
    rows.append(row("texts tried", [float(tried)], "texts", at_least=cases))
    rows.append(row("exceptions that no parser documents", [0.0], "", at_most=0))
    report("parsers", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
