"""A judge's mark is a reward; one that is slow, wrong or dead is asked again, and then lost."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.rl.rewards.base import graded
from es_cookbook.rl.rewards.judge import KEY, Judge
from es_cookbook.rl.rewards.weighted_sum import WeightedSum

pytestmark = pytest.mark.anyio
ROW = {"question": "6 * 7?"}


class Server:
    """Answers with each reply in turn, then with the last again.

    A reply is a mark, a status, bytes that are no completion, or None for none until it ends.
    """

    def __init__(self, replies: Sequence[object]) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.ending = threading.Event()
        self.most = self.now = 0
        self.lock = threading.Lock()


@contextlib.contextmanager
def serving(*replies: object) -> Iterator[tuple[str, Server]]:
    server = Server(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with server.lock:
                server.now += 1
                server.most = max(server.most, server.now)
                length = int(self.headers["Content-Length"])
                server.asked.append(json.loads(self.rfile.read(length)) | {"path": self.path})
                server.keys.append(self.headers["Authorization"])
                reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
            if reply is None:
                server.ending.wait()
                return
            body = {"choices": [{"message": {"content": f"Mark: {reply}"}}]}
            sent = reply if isinstance(reply, bytes) else json.dumps(body).encode()
            with server.lock:
                server.now -= 1
            self.send_response(reply if isinstance(reply, int) and reply >= 300 else 200)
            self.send_header("Location", "/v1/elsewhere")
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/v1", server
    finally:
        server.ending.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def judge(url: str, **options: Any) -> Judge:
    return Judge(**{"url": url, "model": "m", "backoff": 0.001, **options})


async def test_a_mark_is_a_share_of_the_best_and_the_question_has_text_and_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, "secret")
    with serving(7.5) as (url, server):
        grade = await graded(judge(url), "It is {question} 42.", ROW, "row 1")
    assert grade.reward == 0.75
    (asked,) = server.asked
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "m", 0)
    (message,) = asked["messages"]
    assert "Question:\n6 * 7?\n" in message["content"]
    assert "student:\nIt is {question} 42.\n" in message["content"], "filled in one pass"
    assert server.keys == ["Bearer secret"]


async def test_a_judge_that_fails_at_first_is_asked_again() -> None:
    with serving(503, b"<html>", 11, "none", 429, 4) as (url, server):
        grade = await graded(judge(url, attempts=6), "42", ROW, "row 1")
    assert grade.reward == 0.4
    assert len(server.asked) == 6
    assert server.keys == [None] * 6, "no key is sent that was not given"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (503, r"HTTP 503 Service Unavailable: "),
        (b'{"choices": []}', "a reply that is no chat completion: b'{"),
        (b"[" * 100_000, r"a reply that is no chat completion: b'\[\["),
        (11, "no mark from 0 to 10 in 'Mark: 11'"),
        ("-3", "no mark from 0 to 10 in 'Mark: -3'"),
    ],
)
async def test_a_judge_that_is_wrong_loses_the_score(reply: object, reason: str) -> None:
    with serving(reply) as (url, server):
        with pytest.raises(
            EnvError, match=rf"row 1: reward 'judge': the judge at {url} was asked "
        ):
            await graded(judge(url, attempts=2), "42", ROW, "row 1")
        with pytest.raises(EnvError, match=f"was asked once and gave no mark: {reason}"):
            await judge(url, attempts=1).grade("42", ROW)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("status", "said"), [(401, "HTTP 401 Unauthorized"), (302, "HTTP 302 Found")]
)
async def test_a_refusal_is_not_repeated_and_a_redirect_not_followed(
    status: int, said: str
) -> None:
    with serving(status) as (url, server):
        with pytest.raises(EnvError, match=f"refused the question: {said}"):
            await judge(url).grade("42", ROW)
        assert len(server.asked) == 1


async def test_a_slow_judge_is_given_up_after_its_time() -> None:
    with serving(None) as (url, server):
        with pytest.raises(EnvError, match=r"was asked 2 times and gave no mark: .*(0\.05 s|time)"):
            await judge(url, timeout=0.05, attempts=2).grade("42", ROW)
        assert len(server.asked) == 2


async def test_a_dead_judge_is_told_in_a_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(
            EnvError, match="asked 3 times and gave no mark: ConnectionRefusedError"
        ):
            await judge(url).grade("42", ROW)


async def test_no_more_questions_at_a_time_than_allowed() -> None:
    with serving(5) as (url, server):
        async with anyio.create_task_group() as group:
            for _ in range(12):
                group.start_soon(judge(url, max_concurrent=2).grade, "42", ROW)
    assert len(server.asked) == 12
    assert server.most <= 2


async def test_a_judge_can_be_one_of_several_rewards() -> None:
    with serving(5) as (url, _):
        reward = WeightedSum(rewards=("judge", "number"), weights=(0.5, 1.0), judge=judge(url))
        grade = await graded(reward, "42", {**ROW, "answer": 42}, "row 1")
    assert (grade.reward, grade.metrics) == (1.25, {"judge": 0.5, "number": 1.0})


def test_it_can_be_called_where_no_loop_runs() -> None:
    with serving(10) as (url, _):
        assert judge(url)("42", ROW) == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "localhost:8000"}, "url must begin with http:// or https://, found 'localhost"),
        ({"url": "file:///etc/passwd"}, "url must begin with http:// or https://, found 'file"),
        ({"template": "{question}"}, "template must have {text}"),
        ({"best": 0.0}, "best must be above 0"),
        ({"attempts": 0}, "attempts must be at least 1"),
    ],
)
def test_what_cannot_judge_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Judge(**options)


def test_rows_and_names_are_checked_before_a_run() -> None:
    Judge(model="m").check()
    with pytest.raises(ConfigError, match="reward=judge needs a model"):
        Judge().check()
    with pytest.raises(DataError, match="field 'question' is missing; did you mean 'questions'"):
        Judge().check_row({"questions": "6 * 7?"})
