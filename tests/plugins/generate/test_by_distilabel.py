"""`generate via=distilabel`: the same rows as the plain way, and no process that outlives it."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from es_cookbook.common.errors import ConfigError, ServerError, WorkerError
from es_cookbook.plugins.generate.generate import KEY, GenerateConfig, main
from tests.chat_server import HANG, ChatServer, chat_server, completion

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed() -> None:
    pytest.importorskip("distilabel", reason="distilabel is not installed: see the Makefile")


@pytest.fixture(autouse=True)
def in_a_fresh_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(KEY, raising=False)
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate(server: ChatServer, via: str, **options: Any) -> bytes:
    """Runs the command; gives its output."""
    output = f"{via}.jsonl"
    given = {"source": "rows.jsonl", "output": output, "model": "m", "backoff": 0.001, **options}
    main(GenerateConfig(base_url=server.url, via=via, attempts=2, timeout=60, **given))
    return Path(output).read_bytes()


def pipelines() -> list[psutil.Process]:
    """Processes of distilabel's pipeline that this test has started, and theirs."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "distilabel_pipeline" in " ".join(process.cmdline()) and process.cwd() == str(
                Path.cwd()
            ):
                found.append(process)
    return found


def wait_until(holds: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


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
    assert [part.count(b"\n") for part in written["openai"]] == [3, 5]
    assert pipelines() == []


@pytest.mark.slow
def test_a_refusal_ends_the_pipeline_at_once(installed: None) -> None:
    with (
        chat_server(lambda _: 401) as server,
        pytest.raises(ServerError, match="refuses to answer: HTTP 401"),
    ):
        generate(server, "distilabel", concurrency=1)
    assert len(server.asked) == 1
    assert pipelines() == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_keeps_what_came(installed: None) -> None:
    with chat_server(lambda body: HANG if "2+" in str(body) else "x") as server:
        command = subprocess.Popen(
            [
                *(sys.executable, "-m", "es_cookbook", "generate", "source=rows.jsonl", "model=m"),
                *(f"base_url={server.url}", "output=out.jsonl", "via=distilabel"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        parts = Path("out.jsonl.parts")
        wait_until(lambda: parts.exists() and parts.read_bytes().count(b"\n") == 4)
        assert len(pipelines()) > 1
        command.send_signal(signal.SIGINT)
        said = command.communicate(timeout=60)[1]
    assert command.returncode == 130 and said.endswith("interrupted\n")
    assert pipelines() == []
    assert Path("out.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.slow
def test_a_process_of_the_pipeline_that_dies_is_not_waited_for(installed: None) -> None:
    def reply(_: object) -> object:
        threading.Thread(target=kill_whoever_asked).start()
        return HANG

    def kill_whoever_asked() -> None:
        for process in pipelines():
            with contextlib.suppress(psutil.Error):
                if any(each.raddr for each in process.net_connections("tcp")):
                    process.kill()

    with (
        chat_server(reply) as server,
        pytest.raises(WorkerError, match="distilabel's pipeline ended with 4 questions left"),
    ):
        generate(server, "distilabel", concurrency=1)
    assert pipelines() == []


def test_a_pipeline_that_cannot_begin_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("distilabel.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with (
        chat_server(lambda _: "x") as server,
        pytest.raises(WorkerError, match=r"4 questions left; it said last: RuntimeError: broken$"),
    ):
        generate(server, "distilabel")
    assert server.asked == []


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distilabel", None)
    with (
        chat_server(lambda _: "x") as server,
        pytest.raises(ConfigError, match=r"via=distilabel needs distilabel, .*es-cookbook\[distil"),
    ):
        generate(server, "distilabel")
    assert not Path("distilabel.jsonl.parts").exists()
