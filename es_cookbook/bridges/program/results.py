"""What a program ends with, and what that earns.

A result is a JSON object, on a line of its own on standard output or alone in the result file. It
has an `answer` for a reward function, or a `reward` of the program's own, and may have `metrics`.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, EnvError
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
_LONGEST_LOG = 2000
_DECODER, _BEGINS = json.JSONDecoder(), re.compile(r"\s*(?=\{)")


def read_result(output: bytes, file: bytes, form: Form) -> Result:
    """The result of a program that has ended.

    Args:
        output: all of its standard output.
        file: what is in the result file; nothing if it wrote none.
        form: how it writes.

    Raises:
        EnvError: There is no result, or more than one.
    """
    if file:
        found = json_object(file)
        if found is None:
            raise EnvError("the result file holds no JSON object")
        return found
    text = output.decode(errors="replace")
    if form == "text":
        return {"answer": text.strip()}
    results = [found for line in text.split("\n") for found in objects_of(line)]
    if len(results) != 1:
        said = one_line(text.strip())[-80:]
        raise EnvError(
            f"the program printed {len(results)} results, and must print one, a JSON object on a "
            f"line of its own; its output ends in {said!r}"
        )
    return results[0]


def json_object(text: bytes) -> Result | None:
    """The object that a text is in JSON; None if it is none."""
    if text.lstrip()[:1] != b"{":
        return None
    try:
        return cast(Result, json.loads(text))
    except (ValueError, RecursionError):
        return None


def objects_of(line: str) -> list[Result]:
    """The JSON objects of which a line consists; none if there is anything else in it.

    They are several where threads print at the same time: `print` writes a text and the end of its
    line one after the other.
    """
    found: list[Result] = []
    end = 0
    while begins := _BEGINS.match(line, end):
        try:
            each, end = _DECODER.raw_decode(line, begins.end())
        except (ValueError, RecursionError):
            return []
        found.append(each)
    return [] if line[end:].strip() else found


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
    logs = {"result": shown(result), **({} if text is None else {ANSWER: text}), **grade.logs}
    return Grade(grade.reward, grade.metrics, logs)


def _own(result: Result) -> Grade:
    if "reward" not in result:
        raise EnvError(
            f"the result has no `reward` of its own, and dataset.reward is none: {shown(result)}"
        )
    try:
        return Grade(*reward_and_metrics((result["reward"], result.get("metrics", {}))))
    except EnvError as error:
        raise EnvError(f"the program's own reward {error}") from error


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
