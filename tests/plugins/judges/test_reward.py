"""A judge's mark is a reward; one that is slow, wrong or dead is asked again, and then lost."""

from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.plugins.judges.reward import KEY, Judge
from es_cookbook.rl.rewards.base import graded
from tests.chat_server import ChatServer, chat_server

ROW = {"question": "6 * 7?"}


def serving(*replies: object) -> AbstractContextManager[ChatServer]:
    """A server that gives each reply in turn, then the last again; numbers below 300 are marks."""
    made = [f"Mark: {r}" if isinstance(r, int | float) and r < 300 else r for r in replies]
    return chat_server(lambda _: made.pop(0) if len(made) > 1 else made[0])


def judge(url: str, **options: Any) -> Judge:
    return Judge(**{"url": url, "model": "m", "backoff": 0.001, **options})


async def test_a_mark_is_a_share_of_the_best_and_the_question_has_text_and_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, "secret")
    with serving(7.5) as server:
        grade = await graded(judge(server.url), "It is {question} 42.", ROW, "row 1")
    assert grade.reward == 0.75
    (asked,) = server.asked
    assert (asked["model"], asked["temperature"], len(asked["messages"])) == ("m", 0, 1)
    assert "Question:\n6 * 7?\n" in server.prompts[0]
    assert "student:\nIt is {question} 42.\n" in server.prompts[0], "filled in one pass"
    assert server.keys == ["Bearer secret"]


async def test_a_judge_that_fails_at_first_is_asked_again() -> None:
    with serving(503, b"<html>", 11, "none", 429, 4) as server:
        grade = await graded(judge(server.url, attempts=6), "42", ROW, "row 1")
    assert grade.reward == 0.4
    assert len(server.asked) == 6
    assert server.keys == [None] * 6, "no key is sent that was not given"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (503, "HTTP 503 Service Unavailable"),
        (b'{"choices": []}', "a reply that is no chat completion: b'{"),
        (b"[" * 100_000, r"a reply that is no chat completion: b'\[\["),
        (11, "no single mark from 0 to 10 in 'Mark: 11'"),
        (-3, "no single mark from 0 to 10 in 'Mark: -3'"),
    ],
)
async def test_a_judge_that_is_wrong_loses_the_score(reply: object, reason: str) -> None:
    with serving(reply) as server:
        with pytest.raises(
            EnvError, match=rf"row 1: reward 'judge': the judge at {server.url} was asked "
        ):
            await graded(judge(server.url, attempts=2), "42", ROW, "row 1")
        with pytest.raises(EnvError, match=f"was asked once and gave no mark: {reason}"):
            await judge(server.url, attempts=1).grade("42", ROW)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "said"), [(401, "HTTP 401 Unauthorized"), (302, "HTTP 302 Found")]
)
async def test_a_refusal_is_not_repeated_nor_a_redirect_followed(status: int, said: str) -> None:
    with serving((status, {"Location": "/v1/elsewhere"})) as server:
        with pytest.raises(EnvError, match=f"refused the question: {said}"):
            await judge(server.url).grade("42", ROW)
        assert len(server.asked) == 1


async def test_no_more_questions_at_a_time_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, list[int]()

    async def slow(*_: object) -> float:
        nonlocal now
        now += 1
        most.append(now)
        await anyio.sleep(0.01)
        now -= 1
        return 5.0

    monkeypatch.setattr("es_cookbook.plugins.judges.chat.ChatServer.ask", slow)
    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(judge("http://127.0.0.1", max_concurrent=2).grade, "42", ROW)
    assert len(most) == 12 and max(most) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "localhost:8000"}, "url must begin with http:// or https://, found 'localhost"),
        ({"template": "{question}"}, "template must have {text}"),
    ],
)
def test_what_cannot_judge_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Judge(**options)


def test_rows_and_names_are_checked_before_a_run() -> None:
    Judge(model="m").check()
    with pytest.raises(ConfigError, match="needs model="):
        Judge().check()
    with pytest.raises(DataError, match="field 'question' is missing; did you mean 'questions'"):
        Judge().check_row({"questions": "6 * 7?"})
