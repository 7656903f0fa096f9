"""Whatever a server does, there is an answer or one sentence, in bounded time and memory.

Each behaviour is tried against `generate`; judges ask through the same client.
"""

import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.plugins.generate.generate import GenerateConfig
from es_cookbook.plugins.generate.generate import main as generate
from tests.bad_servers import BEHAVIOURS, fails, serving

SECONDS = 0.2
"""For one attempt; there is one, but where the server says when to ask again."""
BUGS = ("AttributeError", "TypeError", "KeyError", "IndexError", "AssertionError")
PATIENCE = 4.0
"""Seconds after which a client is called hanging: two cores may be busy."""
MOST_MEMORY = 200 << 20
LARGE = {"a body without end", "chunks without end", "an error without end", "200 MB"}
"""Given more time, in which they would fill the memory."""


def by_generate(url: str, attempts: int, seconds: float = SECONDS) -> None:
    generate(
        GenerateConfig(
            source="rows.jsonl",
            output="out.jsonl",
            model="m",
            base_url=f"{url}/v1",
            timeout=seconds,
            attempts=attempts,
            backoff=0.001,
        )
    )


def others() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name != "server"}


def peak_memory() -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return int(line.split()[1]) << 10


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("es_cookbook.plugins.judges.chat.LONGEST_WAIT", 0.05)
    Path("rows.jsonl").write_text('{"question": "6 * 7?"}\n')


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_there_is_an_answer_or_a_sentence(behaviour: str) -> None:
    before, children = others(), psutil.Process().children()
    Path("/proc/self/clear_refs").write_text("5")  # Peaks are counted from now on.
    memory, began = peak_memory(), time.perf_counter()
    with serving(BEHAVIOURS[behaviour]) as url:
        try:
            attempts = 2 if behaviour.startswith("429") else 1
            by_generate(url, attempts, 3.0 if behaviour in LARGE else SECONDS)
        except ESCookbookError as error:
            sentence = str(error)
            assert 10 < len(sentence) < 500 and "\n" not in sentence
            assert not any(word in sentence for word in ("Traceback", "root:", *BUGS)), sentence
        assert time.perf_counter() - began < PATIENCE
        assert peak_memory() - memory < MOST_MEMORY
        while not others() <= before and time.perf_counter() - began < 2 * PATIENCE:
            time.sleep(0.05)  # A question that nobody waits for any more ends by itself.
        assert others() <= before and psutil.Process().children() == children


@pytest.mark.parametrize("address", ["nobody", "https of a plain server", "elsewhere"])
def test_a_wrong_address_is_a_sentence_and_another_host_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("ES_COOKBOOK_GENERATE_KEY", "secret")
    before, asked = others(), list[bytes]()
    with socket.socket() as free, serving(lambda other: asked.append(b"")) as elsewhere:
        free.bind(("127.0.0.1", 0))
        moved = fails("307 Moved", f"Location: {elsewhere}/v1/chat/completions\r\n")
        with serving(moved) as server:
            url = {
                "nobody": f"http://127.0.0.1:{free.getsockname()[1]}",
                "https of a plain server": server.replace("http:", "https:"),
                "elsewhere": server,
            }[address]
            with pytest.raises(ESCookbookError) as caught:
                by_generate(url, 1, SECONDS)
            assert "\n" not in str(caught.value) and others() <= before
    assert asked == []
