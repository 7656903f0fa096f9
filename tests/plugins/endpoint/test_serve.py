"""Everything that a run ever consisted of answers over OpenAI's API."""

import asyncio
import json
import signal
import socket
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from openai import AsyncOpenAI, NotFoundError

from es_cookbook.engines.base import Progress, SampleRequest
from es_cookbook.plugins.endpoint.app import application
from es_cookbook.plugins.endpoint.requests import Draw
from es_cookbook.plugins.endpoint.serve import Served, ServedRun
from es_cookbook.rl.types import Action, Observation, SamplingParams
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import open_run, rebuild
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.programs import Programs
from tests.said import refused
from tests.tiny_run import TinyConfig, write_tiny_model

NAMES = [
    "centre",
    "base",
    *(f"generation-{t}" for t in range(4)),
    *(f"genome-{g}" for g in range(4)),
]


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three generations."""
    path = tmp_path_factory.mktemp("serve")
    model, log_path = write_tiny_model(path / "model"), path / "run"
    fields: dict[str, Any] = {"num_generations": 3, "trackers": JsonlTrackerBuilder()}
    anyio.run(train, TinyConfig(model_name=str(model), log_path=str(log_path), **fields))
    return log_path


def _client(served: Served) -> AsyncOpenAI:
    web = httpx.AsyncClient(transport=httpx.ASGITransport(application(served)))
    return AsyncOpenAI(api_key="key", base_url="http://es/v1", http_client=web, max_retries=0)


async def _answers(
    client: AsyncOpenAI, names: Sequence[str], turns: int, prompt_T: Sequence[int]
) -> dict[tuple[str, int], str]:
    """What each model answers, so many times, all asked at once."""

    async def ask(name: str) -> str:
        found = await client.completions.create(
            model=name, prompt=list(prompt_T), max_tokens=8, seed=7
        )
        return found.choices[0].text

    asked = [(name, turn) for turn in range(turns) for name in names]
    return dict(zip(asked, await asyncio.gather(*(ask(name) for name, _ in asked)), strict=True))


@pytest.mark.slow
async def test_each_model_gives_its_own_answers_to_concurrent_requests(log_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0)
    rebuilt = await rebuild(open_run(log_path, trust=["tests"]))
    tokenizer = rebuilt.engine.tokenizer
    prompt_T = tuple(tokenizer.encode("A"))
    where = {"centre": (2, "centre"), "base": (0, "base")}
    where |= {f"generation-{t}": (t, "centre") for t in range(4)}
    where |= {f"genome-{g}": (2, g) for g in range(4)}
    expected: dict[str, str] = {}
    for name, (generation, who) in where.items():
        await rebuilt.go_to(generation)
        action = await rebuilt.answer(who, Observation(prompt_T), params, 7)  # pyright: ignore[reportArgumentType]
        expected[name] = action.text
    assert len(set(expected.values())) > 4, "there is something to mistake"
    async with AsyncExitStack() as resident:
        served = Served(rebuilt.engine, ServedRun(rebuilt, 2), "run", "key", params, resident)
        client = _client(served)
        assert [model.id for model in (await client.models.list()).data] == NAMES
        alone = Served(rebuilt.engine, None, ".", "key", params, resident)
        assert alone.names("key") == [Path.cwd().name]

        answers = await _answers(client, NAMES, 3, prompt_T)
        more: Any = {"max_tokens": 8, "seed": 7, "stream": True}
        for name in ("centre", "genome-1"):
            stream = await client.completions.create(model=name, prompt=list(prompt_T), **more)
            pieces = [piece.choices[0].text async for piece in stream]
            assert "".join(pieces) == expected[name]
        told: Any = {"prompt": [*prompt_T, *prompt_T], "echo": True, "logprobs": 1, "max_tokens": 1}
        for name in ("base", "genome-1"):
            scored = (await client.completions.create(model=name, **told)).choices[0].logprobs
            assert scored and scored.top_logprobs and scored.token_logprobs
            most = [max(top.values()) for top in scored.top_logprobs[1:]]
            pairs = zip(scored.token_logprobs[1:], most, strict=True)
            assert all(own <= top <= 0 for own, top in pairs)
        with pytest.raises(NotFoundError, match="'genome-9' is not served"):
            await _answers(client, ["genome-9"], 1, prompt_T)
    assert answers == {(name, turn): expected[name] for name in NAMES for turn in range(3)}
    await rebuilt.close()


async def test_a_disconnect_does_not_interrupt_a_change_of_weights(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0)
    rebuilt = await rebuild(open_run(log_path, trust=["tests"]))
    go_to, begun, ended = rebuilt.go_to, list[int](), list[int]()
    asked, seen = anyio.CancelScope(), Observation((1, 2), max_tokens=8)

    async def hung_up(generation: int) -> None:
        asked.cancel()
        begun.append(generation)
        await go_to(generation)
        ended.append(generation)

    async def ask(name: str) -> str:
        model = served.model("key", name)
        action = await model.sample(seen, Draw(seed=7), 0, Progress())
        return action.text

    async with AsyncExitStack() as resident:
        served = Served(rebuilt.engine, ServedRun(rebuilt, 2), "run", "key", params, resident)
        names = ("centre", "genome-1", "generation-1", "genome-0", "genome-1")
        expected = {name: await ask(name) for name in names}
        monkeypatch.setattr(rebuilt, "go_to", hung_up)
        for hangs_up, asks in zip(names, reversed(names), strict=True):
            with anyio.CancelScope() as asked:
                await ask(hangs_up)
            assert begun == ended and await ask(asks) == expected[asks]
        assert len(begun) > 5
    await rebuilt.close()


@pytest.mark.parametrize(
    ("of_run", "asked", "ends"),
    [(None, None, ("\n",)), (None, [], ()), (("#",), None, ("#",)), (("#",), "?", ("?",))],
)
async def test_plain_prompts_use_the_stop_strings_of_the_run(
    of_run: tuple[str, ...] | None,
    asked: Any,
    ends: tuple[str, ...],
    log_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebuilt = await rebuild(open_run(log_path, trust=["tests"]))
    sample, seen = rebuilt.engine.sample, list[SampleRequest]()

    async def seen_sample(request: SampleRequest) -> Action:
        seen.append(request)
        return await sample(request)

    async def usual_stop() -> tuple[str, ...]:
        return ("\n",)

    monkeypatch.setattr(rebuilt.engine, "sample", seen_sample)
    monkeypatch.setattr(rebuilt, "usual_stop", usual_stop)
    async with AsyncExitStack() as resident:
        run = ServedRun(rebuilt, 1, await rebuilt.usual_stop())
        params = SamplingParams(stop=of_run)
        served = Served(rebuilt.engine, run, "run", "key", params, resident)
        given: Any = {} if asked is None else {"stop": asked}
        for model in ("centre", "base"):
            await _client(served).completions.create(model=model, prompt="A", max_tokens=4, **given)
    assert [request.stop for request in seen] == [ends, ends]
    await rebuilt.close()


@pytest.mark.slow
def test_the_command_says_where_it_serves_and_ends_when_it_is_told_to(
    log_path: Path, programs: Programs, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("in", "out", "err")]
    for file in files:
        file.touch()
    command = ["-m", "es_cookbook", "serve", log_path, "trust=tests", "host=127.0.0.1", "port=0"]
    process = programs.start(command, files)
    with anyio.from_thread.start_blocking_portal() as portal:
        address, key = portal.call(_address, files[1], process)
    body = json.dumps({"model": "centre", "prompt": "A", "max_tokens": 3}).encode()
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] <= 3
    psutil.Process(process).send_signal(signal.SIGTERM)
    programs.exit_code()
    assert "Traceback" not in files[2].read_text()


async def _address(said: Path, process: int) -> Sequence[str]:
    with anyio.fail_after(60):
        while "OPENAI_API_KEY=" not in said.read_text():
            assert psutil.pid_exists(process)
            await anyio.sleep(0.05)
    line = said.read_text().splitlines()[-1]
    return [word.partition("=")[2] for word in line.split()]


def test_what_cannot_be_served_is_refused(log_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", str(log_path), "trust=tests", f"port={port}")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; give another" in said
    assert "nothing to serve: give log_path=RUN or model_name=MODEL" in refused("serve")
    assert "port must be in [0, 65535], found 99999" in refused("serve", "port=99999")
    assert "key must consist of ASCII characters" in refused("serve", str(log_path), "key=a b")
    said = refused("serve", str(log_path), "trust=tests", "generation=9", "port=0")
    assert "there is no generation 9" in said
