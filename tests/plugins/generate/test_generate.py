"""Rows of another model's answers: each question once, kept as they come, gone on with."""

import json
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import ConfigError, DataError, ServerError
from es_cookbook.plugins.generate.asking import KEY, GenerateConfig
from es_cookbook.plugins.generate.generate import HOPELESS, PARTS, main
from es_cookbook.plugins.judges.chat import LONGEST_WAIT
from es_cookbook.rl.data.sources import load_rows
from tests.chat_server import CUT, ChatServer, Reply, chat_server, completion
from tests.said import refused

ROWS = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


@pytest.fixture(autouse=True)
def in_a_fresh_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KEY, raising=False)
    write(ROWS)


def write(rows: Sequence[object]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate(server: ChatServer, **options: Any) -> list[dict[str, Any]]:
    """Runs the command; gives the rows of its output."""
    quick = {"backoff": 0.001, "attempts": 3, "timeout": 10}
    given = {"source": "rows.jsonl", "output": "out.jsonl", "model": "m", **quick, **options}
    main(GenerateConfig(base_url=server.url, **given))
    return written(given["output"])


def written(path: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def right(body: dict[str, Any]) -> str:
    """An answer that follows from the question and the seed."""
    first = body["messages"][-1]["content"].partition("+")[0]
    return f"{int(first) + 1} ({body['seed']})"


def failing(times: int, reply: object) -> Reply:
    """Fails at first with every question, and answers it then."""
    asked: dict[str, int] = {}

    def replied(body: dict[str, Any]) -> object:
        prompt = body["messages"][-1]["content"]
        asked[prompt] = asked.get(prompt, 0) + 1
        return reply if asked[prompt] <= times else right(body)

    return replied


def test_a_row_is_asked_by_the_template_and_its_answer_stands_beside_its_fields() -> None:
    with chat_server(lambda _: completion("2", "length")) as server:
        rows = generate(
            server, prompt="What is {question}?", system="Be short.", top_p=0.9, max_tokens=5
        )
    assert rows[0] == {
        "question": "0+1=",
        "answer": "1",
        "prompt": "What is 0+1=?",
        "completion": "2",
        "generated": {
            "model": "m",
            "system": "Be short.",
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 5,
            "seed": 0,
            "replica": 0,
            "finish_reason": "length",
        },
    }
    assert [row["question"] for row in rows] == [row["question"] for row in ROWS]
    asked = next(each for each in server.asked if "0+1" in each["messages"][1]["content"])
    assert asked["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "What is 0+1=?"},
    ]
    assert (asked["model"], asked["temperature"], asked["top_p"], asked["max_tokens"]) == (
        *("m", 0.7, 0.9, 5),
    )
    assert len({asked["seed"] for asked in server.asked}) == len(ROWS)
    assert all(0 <= asked["seed"] < 2**31 for asked in server.asked)


def test_a_key_comes_from_its_own_variable_alone_and_gets_into_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for somebody else")
    with chat_server(lambda _: "2") as server:
        generate(server, num_rows=1)
        monkeypatch.setenv(KEY, "secret")
        generate(server, num_rows=2)
    assert server.keys == [None, "Bearer secret"]
    assert not any("secret" in path.read_text() for path in Path().iterdir())


def test_equal_prompts_are_asked_once_and_equal_answers_kept_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write([*ROWS[:2], {"question": "0+1=", "answer": "one"}])
    texts = iter(["1", "2", " 1\n", "two and", "one", "two  and "])  # replica by replica
    with chat_server(lambda _: next(texts)) as server:
        rows = generate(server, replicas=3, concurrency=1)
    assert len(server.asked) == 6
    assert [(row["answer"], row["completion"]) for row in rows] == [
        *(("1", "1"), ("1", "one"), ("2", "2"), ("2", "two and"), ("one", "1"), ("one", "one"))
    ], "a row of its own for every row that asks, in their order"
    assert "6 rows in out.jsonl, of 3 rows of the source; equal answers left out: 3;" in (
        capsys.readouterr().out
    )


def test_no_more_questions_at_a_time_than_allowed() -> None:
    with chat_server(right) as server:
        generate(server, replicas=3, concurrency=2)
    assert len(server.asked) == 18 and server.most <= 2


@pytest.mark.parametrize("reply", [503, 429, CUT, b'{"choices": []}', completion("  ")])
def test_what_may_be_better_the_next_time_is_asked_again_and_is_no_row(reply: object) -> None:
    with chat_server(failing(2, reply)) as server:
        rows = generate(server, num_rows=2)
    assert len(server.asked) == 6
    assert [row["completion"].split()[0] for row in rows] == ["1", "2"]


def test_a_server_says_itself_when_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    late = "Fri, 31 Dec 9999 23:59:59 GMT"
    replies = iter(["7", "0", "soon", "-5", "inf", late, "Fri, 31 Dec 1999 23:59:59 GMT"])
    with chat_server(
        lambda body: (429, {"Retry-After": after}) if (after := next(replies, "")) else right(body)
    ) as server:
        generate(server, num_rows=1, attempts=8, backoff=0.5)
    assert waits == [7, 1, 2, 4, LONGEST_WAIT, LONGEST_WAIT, 32]


@pytest.mark.parametrize(
    ("reply", "said", "asked"), [(CUT, "6 x RemoteProtocolError: ", 18), (400, "6 x HTTP 400", 6)]
)
def test_what_stays_without_an_answer_is_counted_by_its_reason(
    reply: object, said: str, asked: int
) -> None:
    with chat_server(lambda body: reply if "0+1" not in str(body) else "1") as server:
        write([*ROWS, {"question": "7+1=", "answer": "8"}])
        with pytest.raises(ServerError, match=r"^6 questions without an answer \(") as caught:
            generate(server)
    assert said in str(caught.value) and "the same command asks again" in str(caught.value)
    assert len(server.asked) == asked + 1
    assert [row["completion"] for row in written()] == ["1"]


@pytest.mark.parametrize("status", [401, 302])
def test_a_refusal_that_concerns_every_question_ends_it_at_once(status: int) -> None:
    with (
        chat_server(lambda _: (status, {"Location": "/v1/elsewhere"})) as server,
        pytest.raises(ServerError, match=f"refuses to answer: HTTP {status}"),
    ):
        generate(server, concurrency=1)
    assert len(server.asked) == 1 and not Path("out.jsonl").exists()
    with chat_server(right) as server:
        assert len(generate(server, model="another")) == 6, "nothing was begun"


def test_a_dead_server_is_not_asked_for_ever() -> None:
    write([{"question": f"{i}+1="} for i in range(100)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = ChatServer(right)
        dead.url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(ServerError, match=f"answers nothing: {HOPELESS} questions in a row"):
            generate(dead, attempts=1)


def test_what_was_cut_in_the_middle_goes_on_with_what_is_missing() -> None:
    with chat_server(right) as server:
        generate(server, replicas=2, output="whole.jsonl")
    left = iter(range(5))
    with (
        chat_server(lambda body: 401 if next(left, None) is None else right(body)) as server,
        pytest.raises(ServerError, match="refuses"),
    ):
        generate(server, replicas=2, concurrency=1)
    assert len(written()) == 5
    with chat_server(right) as server:
        generate(server, replicas=2)
    assert len(server.asked) == 7
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    with chat_server(lambda _: 500) as server:
        generate(server, replicas=2)
    assert server.asked == []
    with chat_server(right) as server:
        assert len(generate(server, replicas=3)) == 18, "more replicas are asked for alone"
    assert len(server.asked) == 6


@pytest.mark.parametrize("left", (1, 59))
def test_a_torn_line_at_the_end_is_dropped(left: int) -> None:
    with chat_server(right) as server:
        before = generate(server, concurrency=1)
    parts = Path("out.jsonl" + PARTS)
    *lines, last = parts.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join(lines) + last[:left])
    with chat_server(right) as server:
        assert generate(server) == before
    assert server.prompts == ["5+1="]


def test_other_settings_do_not_get_into_the_same_rows() -> None:
    with chat_server(right) as server:
        generate(server)
        generate(server, concurrency=1, timeout=5)
        assert len(server.asked) == 6
        generate(server, temperature=0.5)
        assert len(server.asked) == 12 and {
            row["generated"]["temperature"] for row in written()
        } == {0.5}


def test_a_file_of_others_is_neither_written_nor_read() -> None:
    Path("out.jsonl").write_text("mine\n")
    with chat_server(right) as server:
        with pytest.raises(ConfigError, match=r"'out.jsonl' is there already, without 'out.jsonl."):
            generate(server)
        assert Path("out.jsonl").read_text() == "mine\n"
        for content in ("[]\n", "{}\n", "{\n"):
            Path("out.jsonl" + PARTS).write_text(content)
            with pytest.raises(DataError, match="line 1: not a line of `generate`;"):
                generate(server)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "rows.jsonl: there are no rows"),
        ([{"query": "1"}], "line 1: field 'question' is missing; the row has: query"),
        ([{"question": " "}], "line 1: prompt='{question}' makes an empty text of it"),
        ([{"question": "1", "completion": "x"}], "field 'completion' is one that the output adds;"),
        ([{"question": "1", "prompt": "x"}], "line 1: field 'prompt' is one that the output adds;"),
        ([{"question": "1", "generated": "x"}], "'generated' is one that the output adds$"),
    ],
)
def test_rows_that_cannot_be_used_are_named(rows: list[object], said: str) -> None:
    write(rows)
    with (
        chat_server(right) as server,
        pytest.raises(DataError, match=re.escape(said).replace(r"\$", "$")),
    ):
        generate(server)
    assert server.asked == []


def test_fields_of_other_names_and_a_prompt_of_its_own() -> None:
    write([{"prompt": "0+1=", "completion": "gold"}])
    with chat_server(lambda _: "1") as server:
        (row,) = generate(server, prompt="{prompt}", completion_field="answer")
    assert (row["prompt"], row["completion"], row["answer"]) == ("0+1=", "gold", "1")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("prompt={question!r}", "in braces stands the name of one field"),
        ("output=out.json", "output must be a file that ends in .jsonl, found 'out.json'"),
        ("base_url=127.0.0.1:8000", "base_url must begin with http:// or https:// and a host"),
        ("base_url=http://me:key@host/v1", "base_url must begin with http:// or https://"),
        ("source=nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("completion_field=generated", "completion_field=generated must differ, and from"),
        ("completion_field=prompt", "prompt_field=prompt and completion_field=prompt must differ"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(option: str, said: str) -> None:
    given = ("source=rows.jsonl", "output=out.jsonl", "model=m", option)
    assert said in refused("generate", *given)


def test_the_rows_are_data_to_train_on() -> None:
    with chat_server(right) as server:
        generate(server)
    rows = list(load_rows("out.jsonl"))
    assert len(rows) == len(ROWS)
    assert all(row.text("prompt") and row.text("completion") for row in rows), "what sft reads"
