"""What a program ends with, and what that earns.

A result is a JSON object, on a line of its own on standard output or alone in the result file. It
has an `answer` for a reward function, or a `reward` of the program's own, and may have `metrics`.

What a program writes may be anything, so there is a limit on its bytes, on the values of a result,
on the lines that could be one, and on metrics.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, EnvError, RunDirectoryError
from es_cookbook.common.files import check_values, in_whole_characters, read_file
from es_cookbook.common.terminal import one_line
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.base import (
    Reward,
    RewardFunction,
    check_arity,
    graded,
    name_of,
    reward_and_metrics,
)
from es_cookbook.rl.types import ANSWER

Result: TypeAlias = Mapping[str, Any]
Form: TypeAlias = Literal["json", "text"]
"""How a program writes its result: as JSON, or all that it prints is the answer."""
MOST_BYTES = 1 << 20
"""Of a program's standard output, a result file, and what a worker writes for a row."""
MOST_LINES = 1000
"""Of those that begin as a result does."""
_MOST_VALUES = 1 << 18
"""Of a result, an object counted as four."""
_MOST_METRICS = 100
"""And characters of their names: each is a column of the run's metrics."""
_TAKEN = "turns", "tool_calls", "turn_limit"
"""Metrics that a rollout has of itself; those of a result are called `result_turns`, and so on."""
_LONGEST_LOG = 2000
_DECODER, _BEGINS = json.JSONDecoder(), re.compile(r"\s*(?=\{)")
_LINES = re.compile(rb"(?:^|\r)[ \t]*\{[^\r\n]*", re.MULTILINE)
"""A carriage return ends a line, too: before it is what a progress bar has shown."""


def result_in(path: Path) -> bytes:
    """What a program has left in the result file; nothing if there is none.

    Raises:
        EnvError: It is too large, or no regular file.
    """
    try:
        return read_file(path, MOST_BYTES, path.parent)
    except FileNotFoundError:
        return b""
    except RunDirectoryError as error:
        raise EnvError(f"the result file cannot be read: {error.strerror}") from error


def read_result(output: bytes, file: bytes, form: Form) -> Result:
    """The result of a program that has ended.

    Args:
        output: all of its standard output.
        file: what is in the result file; nothing if it wrote none.
        form: how it writes.

    Raises:
        EnvError: There is no result, more than one, or one that is too large.
    """
    if file:
        results = objects_of(file)
        if len(results) != 1:
            raise EnvError(
                "the result file holds no JSON object, or more than one; it begins with "
                f"{file[:80].decode(errors='replace')!r}"
            )
        return results[0]
    if form == "text":
        return {"answer": output.decode(errors="replace").strip()}
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
    """The lines that begin as a result does.

    Raises:
        EnvError: They are too many.
    """
    for number, found in enumerate(_LINES.finditer(output)):
        if number == MOST_LINES:
            raise EnvError(f"the program printed more than {MOST_LINES} lines that begin with {{")
        yield found[0]


def objects_of(line: bytes) -> list[Result]:
    """The JSON objects of which a line consists; none if there is anything else in it.

    They are several where threads print at the same time: `print` writes a text and the end of its
    line one after the other.

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
        in_whole_characters(text, found)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"a result holds {error}") from error
    return found


def check_reward(reward: Reward | RewardFunction | None) -> None:
    """Refuse a function that can be called in neither way.

    Raises:
        ConfigError: It cannot; says how it is called.
    """
    if reward is None or _takes_result(reward):
        return
    try:
        check_arity(reward)
    except ConfigError as error:
        raise ConfigError(f"{error}; or with result, messages and row") from error


async def graded_result(
    reward: Reward | RewardFunction | None, result: Result, chat: Sequence[Message], row: Row
) -> Grade:
    """What a result earns.

    Args:
        reward: of (text, row), or of (result, messages, row); None is the program's own.
        result: as the program gave it.
        chat: the last that it had, the model's answer at the end.
        row: of the data set.

    Raises:
        EnvError: The result lacks what is scored, or the reward function failed.
    """
    answer = result.get("answer")
    text = str(answer) if isinstance(answer, str | int | float) else None
    if reward is None:
        grade = _own(result)
    elif _takes_result(reward):
        messages = [message.as_dict() for message in chat]
        function = cast("Callable[..., object]", reward)
        call = functools.partial(function, result, messages, row.fields)
        grade = await graded(function, "", row.fields, row.where, call)
    else:
        if text is None:
            raise EnvError(
                f"reward {name_of(reward)!r} scores the `answer` of a result, and it has none that "
                f"is a text or a number: {shown(result)[:200]}"
            )
        grade = await graded(reward, text, row.fields, row.where)
    metrics = {
        f"result_{name}" if name in _TAKEN else name: value for name, value in grade.metrics.items()
    }
    logs = {"result": shown(result), **({} if text is None else {ANSWER: text}), **grade.logs}
    return Grade(grade.reward, metrics, logs)


def _own(result: Result) -> Grade:
    if "reward" not in result:
        raise EnvError(
            "the result has no `reward` of its own, and dataset.reward is none: "
            f"{shown(result)[:200]}"
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


def _takes_result(reward: RewardFunction) -> bool:
    """Whether it is a function of (result, messages, row)."""
    if isinstance(reward, Reward):
        return False
    try:
        inspect.signature(reward).bind({}, [], {})
    except (TypeError, ValueError):
        return False
    return True


def shown(result: Result) -> str:
    """A result as logs and messages have it."""
    return json.dumps(result)[:_LONGEST_LOG]
