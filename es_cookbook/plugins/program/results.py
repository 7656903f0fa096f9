"""Reads and scores the result of a program.

A result is a JSON object on a line of standard output. It has an `answer` for a reward function, or
a `reward`, and may have `metrics`. Other lines are ignored.

Programs are untrusted: bytes, JSON values, lines that could be a result, and metrics are limited.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from es_cookbook.common.errors import EnvError
from es_cookbook.common.files import check_characters, check_values
from es_cookbook.common.terminal import one_line
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.base import Reward, RewardFunction, graded, name_of, reward_and_metrics
from es_cookbook.rl.types import ANSWER

Result: TypeAlias = Mapping[str, Any]
MOST_BYTES = 1 << 20
"""Limit on a program's standard output, and on what a worker writes per row."""
MOST_LINES = 1000
"""Limit on lines that begin like a result."""
_MOST_VALUES = 1 << 18
"""JSON values in a result; an object counts as four."""
_MOST_METRICS = 100
"""Limit on their number and on the length of a name: each becomes a metric of the run."""
_LONGEST_LOG = 2000
_DECODER, _BEGINS = json.JSONDecoder(), re.compile(r"\s*(?=\{)")
_LINES = re.compile(rb"(?:^|\r)[ \t]*\{[^\r\n]*", re.MULTILINE)
"""A carriage return also ends a line, as progress bars use it."""


def read_result(output: bytes) -> Result:
    """Read the result in a program's whole standard output.

    Raises:
        EnvError: There is none, more than one, or one that is too large.
    """
    results: list[Result] = []
    for line in lines_of(output):
        results += objects_of(line)
        if len(results) > 1:
            raise EnvError(
                "the program printed more than one result, and must print one; a line that is a "
                "JSON object is a result"
            )
    if not results:
        said = one_line(output[-400:].decode(errors="replace").strip())[-80:]
        raise EnvError(
            "the program printed no result, and must print one, a JSON object on a line of its "
            f"own; its output ends in {said!r}"
        )
    return results[0]


def lines_of(output: bytes) -> Iterator[bytes]:
    """Yield the lines that begin like a result.

    Raises:
        EnvError: They are too many.
    """
    for number, found in enumerate(_LINES.finditer(output)):
        if number == MOST_LINES:
            raise EnvError(f"the program printed more than {MOST_LINES} lines that begin with {{")
        yield found[0]


def objects_of(line: bytes) -> list[Result]:
    """Return the JSON objects of a line that holds nothing else.

    Threads that print at the same time may put several on a line, because `print` writes the text
    and the end of the line separately.

    Raises:
        EnvError: It holds too many values, or half a character.
    """
    try:
        check_values(line, _MOST_VALUES)
    except ValueError as error:
        raise EnvError(f"a result is too large: {error}") from error
    text = line.decode(errors="replace")
    found: list[Result] = []
    end = 0
    while begins := _BEGINS.match(text, end):
        try:
            each, end = _DECODER.raw_decode(text, begins.end())
        except (ValueError, RecursionError):
            return []
        found.append(each)
    if text[end:].strip():
        return []
    try:
        check_characters(text, found)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"a result {error}") from error
    return found


async def graded_result(reward: Reward | RewardFunction | None, result: Result, row: Row) -> Grade:
    """Score a result.

    Args:
        reward: scores its answer; None takes the program's own reward.
        result: the program's.
        row: its problem.

    Raises:
        EnvError: The result lacks what is scored, or the reward function failed.
    """
    answer = result.get("answer")
    text = str(answer) if isinstance(answer, str | int | float) else None
    if reward is None:
        grade = _own(result)
    elif text is not None:
        grade = await graded(reward, text, row.fields, row.where)
    else:
        raise EnvError(
            f"reward {name_of(reward)!r} scores the `answer` of a result, and it has none that "
            f"is a text or a number: {shown(result)[:200]}"
        )
    logs = {"result": shown(result), **({} if text is None else {ANSWER: text}), **grade.logs}
    return Grade(grade.reward, grade.metrics, logs)


def _own(result: Result) -> Grade:
    if "reward" not in result:
        raise EnvError(
            f"the result has no `reward`, and dataset.reward is none: {shown(result)[:200]}"
        )
    try:
        grade = Grade(*reward_and_metrics((result["reward"], result.get("metrics", {}))))
    except EnvError as error:
        raise EnvError(f"the program's own reward {error}") from error
    longest = max(map(len, grade.metrics), default=0)
    if len(grade.metrics) > _MOST_METRICS or longest > _MOST_METRICS:
        raise EnvError(
            f"a result may have {_MOST_METRICS} metrics, with names of {_MOST_METRICS} characters, "
            f"and has {len(grade.metrics)}, with names of up to {longest}"
        )
    return grade


def shown(result: Result) -> str:
    """Return a result as JSON, for logs and messages."""
    return json.dumps(result)[:_LONGEST_LOG]
