"""Whatever a server does, there is an answer or one sentence, in bounded time and memory.

The table has what servers do, each against `generate` and the question to the Hub, and a judge's
share of it; `tests/plugins/hub/test_bad_hubs.py` has it against pushes. A check before a push asks
in a process of its own, which is tried with the worst of them.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import psutil
import pytest
from huggingface_hub import constants

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.servers.hub import repository_files
from es_cookbook.plugins.generate.generate import GenerateConfig
from es_cookbook.plugins.generate.generate import main as generate
from es_cookbook.plugins.hub.client import check_push
from es_cookbook.plugins.judges.reward import Judge
from tests.bad_servers import BEHAVIOURS, fails, serving

SETTING = "HF_HUB_ETAG_TIMEOUT"
"""The environment variable with the Hub's time, which the others take too."""
SECONDS = 0.2
"""For one attempt; there is one, but where the server says when to ask again."""
BUGS = ("AttributeError", "TypeError", "KeyError", "IndexError", "AssertionError")
PATIENCE = 4.0
"""Seconds after which a client is called hanging: two cores may be busy."""
MOST_MEMORY = 200 << 20
LARGE = {"a body without end", "chunks without end", "an error without end", "200 MB"}
"""Given more time, in which they would fill the memory."""


def by_generate(url: str, attempts: int) -> None:
    generate(
        GenerateConfig(
            source="rows.jsonl",
            output="out.jsonl",
            model="m",
            base_url=f"{url}/v1",
            timeout=float(os.environ[SETTING]),
            attempts=attempts,
            backoff=0.001,
        )
    )


def by_judge(url: str, attempts: int) -> None:
    judge = Judge(
        url=f"{url}/v1",
        model="m",
        timeout=float(os.environ[SETTING]),
        attempts=attempts,
        backoff=0.001,
    )
    anyio.run(judge.grade, "42", {"question": "6 * 7?"})


def by_hub(url: str, attempts: int) -> None:
    del url, attempts
    repository_files("me/model")


CLIENTS: dict[str, Callable[[str, int], None]] = {
    "generate": by_generate,
    "judge": by_judge,
    "hub": by_hub,
}


def others() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name != "server"}


def peak_memory() -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return int(line.split()[1]) << 10


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv(SETTING, str(SECONDS))
    monkeypatch.setattr("es_cookbook.plugins.judges.chat.LONGEST_WAIT", 0.05)
    Path("rows.jsonl").write_text('{"question": "6 * 7?"}\n')


OF_JUDGES = (
    "a body without end",
    "content of NUL bytes",
    "content of lone surrogates",
    "status 401",
    "429 and soon",
)
"""A judge asks as `generate` does, by `completion`: what it makes of answers and of errors."""


@pytest.mark.parametrize(
    ("behaviour", "client"),
    [(b, c) for b in BEHAVIOURS for c in CLIENTS if c != "judge" or b in OF_JUDGES],
)
def test_there_is_an_answer_or_a_sentence(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, client: str
) -> None:
    if behaviour in LARGE:
        monkeypatch.setenv(SETTING, "3")
    before, children = others(), psutil.Process().children()
    Path("/proc/self/clear_refs").write_text("5")  # Peaks are counted from now on.
    memory, began = peak_memory(), time.perf_counter()
    with serving(BEHAVIOURS[behaviour]) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        try:
            CLIENTS[client](url, 2 if behaviour.startswith("429") else 1)
        except ESCookbookError as error:
            sentence = str(error)
            assert 10 < len(sentence) < 500 and "\n" not in sentence
            assert not any(word in sentence for word in ("Traceback", "root:", *BUGS)), sentence
        assert time.perf_counter() - began < PATIENCE
        assert peak_memory() - memory < MOST_MEMORY
        while not others() <= before and time.perf_counter() - began < 2 * PATIENCE:
            time.sleep(0.05)  # A question that nobody waits for any more ends by itself.
        assert others() <= before and psutil.Process().children() == children


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("address", ["nobody", "https of a plain server", "elsewhere"])
def test_a_wrong_address_is_a_sentence_and_another_host_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, address: str, client: str
) -> None:
    monkeypatch.setenv("ES_COOKBOOK_JUDGE_KEY", "secret")
    before, asked = others(), list[bytes]()
    with socket.socket() as free, serving(lambda other: asked.append(b"")) as elsewhere:
        free.bind(("127.0.0.1", 0))
        moved = fails("307 Moved", f"Location: {elsewhere}/api/models/me/model\r\n")
        with serving(moved) as server:
            url = {
                "nobody": f"http://127.0.0.1:{free.getsockname()[1]}",
                "https of a plain server": server.replace("http:", "https:"),
                "elsewhere": server,
            }[address]
            monkeypatch.setattr(constants, "ENDPOINT", url)
            with pytest.raises(ESCookbookError) as caught:
                CLIENTS[client](url, 1)
            assert "\n" not in str(caught.value) and others() <= before
    assert asked == []


WORST = ("drips headers", "informs without end", "a body without end")


@pytest.mark.slow
def test_a_check_before_a_push_outlives_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv(SETTING)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # The library keeps what servers say there.
    before, memory = others(), [0]
    children = psutil.Process().children()
    for behaviour in WORST:
        with serving(BEHAVIOURS[behaviour]) as url, ThreadPoolExecutor(1) as pool:
            monkeypatch.setenv("HF_ENDPOINT", url)
            asking = pool.submit(check_push, "me/model", True, 0.5)
            while not asking.done():
                time.sleep(0.02)
                with contextlib.suppress(psutil.Error):
                    memory += [
                        child.memory_info().rss
                        for child in psutil.Process().children()
                        if child not in children  # What earlier tests left running.
                    ]
            sentence = asking.result(0) or ""
        assert sentence.startswith("cannot push to me/model on 127.0.0.1"), behaviour
        assert "\n" not in sentence and "hf_secret" not in sentence
        assert others() <= before and psutil.Process().children() == children
    assert max(memory) < 300 << 20  # Of which Python and its libraries have 70 MB.
