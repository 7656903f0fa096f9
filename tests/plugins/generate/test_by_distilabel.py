"""`generate via=distilabel`: the same rows as the plain way."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.common.errors import ConfigError, ServerError
from es_cookbook.plugins.generate.asking import KEY, GenerateConfig
from es_cookbook.plugins.generate.generate import main
from tests.chat_server import ChatServer, chat_server, completion

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed() -> None:
    pytest.importorskip("distilabel", reason="distilabel is not installed: see the Makefile")


@pytest.fixture(autouse=True)
def in_a_fresh_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(KEY, raising=False)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate(server: ChatServer, via: str, **options: Any) -> bytes:
    """Runs the command; gives its output."""
    output = f"{via}.jsonl"
    given = {"source": "rows.jsonl", "output": output, "model": "m", "backoff": 0.001, **options}
    main(GenerateConfig(base_url=server.url, via=via, attempts=2, timeout=60, **given))
    return Path(output).read_bytes()


@pytest.mark.slow
def test_both_ways_write_the_same_of_the_same_replies_and_go_on_alike(installed: None) -> None:
    """Retries, a long answer, equal answers, a question without an answer, and the next call."""
    texts = {"0": "same", "1": "\N{GREEK SMALL LETTER ALPHA} " * 50_000, "3": 'quote " \n'}

    def replied() -> Callable[[dict[str, Any]], object]:
        asked: dict[str, int] = {}

        def reply(body: dict[str, Any]) -> object:
            question, seed = body["messages"][-1]["content"][0], body["seed"]
            key = f"{question} {seed}"
            asked[key] = asked.get(key, 0) + 1
            if asked[key] <= {"0": 1, "2": 2}.get(question, 0):
                return 500
            text = texts.get(question, "") or str(seed)
            return completion(text, "length" if question == "3" else "stop")

        return reply

    written: dict[str, list[bytes]] = {}
    said: dict[str, str] = {}
    asked: dict[str, list[str]] = {}
    for via in ("openai", "distilabel"):
        with chat_server(replied()) as server:
            with pytest.raises(ServerError) as caught:
                generate(server, via, replicas=2, concurrency=3, system="Be short.")
            said[via] = str(caught.value)
            part = Path(f"{via}.jsonl").read_bytes()
            again = generate(server, via, replicas=2, concurrency=3, system="Be short.")
            assert server.most <= 3
        written[via] = [part, again]
        asked[via] = sorted(json.dumps(body, sort_keys=True) for body in server.asked)
    assert "2 questions without an answer (2 x HTTP 500 Internal Server Error)" in said["openai"]
    assert said["distilabel"] == said["openai"]
    assert written["distilabel"] == written["openai"]
    assert asked["distilabel"] == asked["openai"]


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distilabel", None)
    with (
        chat_server(lambda _: "x") as server,
        pytest.raises(ConfigError, match=r"via=distilabel needs distilabel, .*es-cookbook\[distil"),
    ):
        generate(server, "distilabel")
    assert not Path("distilabel.jsonl.parts").exists()
