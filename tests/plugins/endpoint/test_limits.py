"""What a request may cost: it is known, and refused, before anything is made for it."""

import json
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import anyio
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.plugins.endpoint.app import application
from es_cookbook.plugins.endpoint.limits import UnderWay
from es_cookbook.plugins.endpoint.requests import Draw
from es_cookbook.plugins.endpoint.translator import Answer, Begun, Prompt, Translator
from es_cookbook.plugins.endpoint.work import Told
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.types import Action
from tests.byte_tokenizers import byte_tokenizer
from tests.plugins.endpoint.test_application import KEY, QUESTION, OneSpeaker, asked, tool_of

pytestmark = pytest.mark.anyio


async def test_a_key_has_so_many_answers_under_way_and_others_are_told_to_come_later() -> None:
    client, speaker = asked(*("x" for _ in range(9)))
    speaker.under_way, speaker.is_stuck = UnderWay(4), True

    async def ask(**more: Any) -> None:
        await client.completions.create(model="centre", prompt=["a", "b"], **more)

    with pytest.raises(openai.BadRequestError, match="6 answers, and a key may have 4"):
        await ask(n=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while len(speaker.seen) < 2:
            await anyio.sleep(0)
        with pytest.raises(openai.RateLimitError, match="2 answers of this key are under") as told:
            await client.chat.completions.create(model="centre", messages=QUESTION, n=3)
        assert told.value.code == "rate_limit_exceeded" and len(speaker.seen) == 2
        speaker.is_stuck = False
        await client.chat.completions.create(model="centre", messages=QUESTION, n=2)
        tasks.cancel_scope.cancel()
    await ask(n=2)  # Nothing of a request that was given up counts any more.


HUGE = "a b " * 300_000


@pytest.mark.parametrize(
    ("asks", "said", "param"),
    [
        ({"prompt": ["a"] * 3000, "n": 128}, "asks for 384000 answers, and a key", "None"),
        (
            {"prompt": "a", "stop": "b" * 400_000},
            "stop has 400000 characters, and may have",
            "stop",
        ),
        ({"prompt": "a", "stop": ["b" * 600] * 4}, "stop has 2400 characters", "stop"),
        ({"prompt": [[1] * 200] * 2000, "n": 1, "max_tokens": 9999}, "come to 20398000", "max_tok"),
        (
            {"prompt": ["a"] * 400, "max_tokens": 0, "echo": True, "logprobs": 0, "n": 0},
            "n must be from 1",
            "n",
        ),
        (
            {"prompt": [[1] * 599] * 20, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 102},
            "come to 1221960 tokens, and may with logprobs to 65536",
            "max_tokens",
        ),
        (
            {"prompt": HUGE},
            "fewer than 1 text of 1200000 characters come to; shorten the prompt",
            "prompt",
        ),
        (
            {"prompt": HUGE[:9000]},
            "fewer than 1 text of 9000 characters come to; shorten the prompt",
            "prompt",
        ),
        ({"prompt": [HUGE[:9000]] * 2}, "fewer than 1 text of 9000 characters come to", "prompt"),
        (
            {"messages": [{"role": "user", "content": HUGE}]},
            "come to; shorten the messages",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}] * 4000},
            "fewer than 4000 texts of 4000 characters come to; shorten the messages",
            "messages",
        ),
        (
            {"messages": [{"role": "assistant", "content": f"<think>{HUGE}</think>"}, *QUESTION]},
            "come to; shorten the messages",
            "messages",
        ),
        (
            {"messages": QUESTION, "tools": [tool_of(description=HUGE)]},
            "come to; shorten the messages, or descriptions of tools",
            "messages",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value)[:20],
)
async def test_a_request_that_can_never_be_answered_is_refused_before_anything_is_made(
    asks: dict[str, Any], said: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, speaker = asked()
    tokenizer, num_encoded = speaker.translator.tokenizer, 0
    usual = type(tokenizer).encode

    def encode(text: str, **options: Any) -> list[int]:
        nonlocal num_encoded
        num_encoded += len(text)
        return usual(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    ask: Any = client.chat.completions if "messages" in asks else client.completions
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        await ask.create(model="centre", **asks)
    assert str(refused.value.param).startswith(param) and not speaker.seen
    assert num_encoded < 100_000
    assert speaker.under_way.answers == 0


async def test_long_prompts_are_encoded_beside_the_loop_and_short_ones_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, speaker = asked("x", "x", "x", "x")
    speaker.translator = Translator(speaker.translator.tokenizer, 1 << 16)
    tokenizer, encoded = speaker.translator.tokenizer, list[tuple[bool, int]]()
    usual = type(tokenizer).encode

    def encode(text: str, **options: Any) -> list[int]:
        encoded.append((threading.current_thread() is threading.main_thread(), len(text)))
        return usual(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer, "encode", encode)
    for text in ("a", "a b " * 8000):
        encoded.clear()
        await client.completions.create(model="centre", prompt=text)
        await client.chat.completions.create(
            model="centre", messages=[{"role": "user", "content": text}]
        )
        assert max(encoded)[1] < 1000 and max(length for _, length in encoded) >= len(text)
        assert all(on_loop for on_loop, _ in encoded) == (text == "a")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


async def test_what_a_client_does_not_read_of_a_stream_waits_as_one_piece() -> None:
    told, action = Told(), Action((1,), "", "stop")
    for n in range(1000):
        told.tell((n % 2, f"{n} "))
    told.tell((1, Answer("x", (), "stop", action)))
    pieces = told.pieces()
    found = [await anext(pieces) for _ in range(3)]
    assert [number for number, _ in found] == [0, 1, 1]
    assert found[0][1] == "".join(f"{n} " for n in range(0, 1000, 2))
    told.tell((0, "more"))
    told.end()
    assert [piece async for piece in pieces] == [(0, "more")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_whenever_a_client_hangs_up_nothing_is_left_under_way(stream: bool, n: int) -> None:
    async def lasts(num_sent: int) -> int:
        """How many messages are sent to a client that goes after so many of them."""
        _, speaker = asked(*["It is 3, or it is 4."] * n)
        speaker.tells, gone, sent = True, anyio.Event(), list[Any]()
        body = json.dumps({"model": "centre", "prompt": "x", "stream": stream, "n": n}).encode()
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await anyio.sleep(0)
            sent.append(message)
            if len(sent) >= num_sent:
                gone.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        }
        if num_sent == 0:
            gone.set()
        with anyio.fail_after(20):
            await application(OneSpeaker(speaker))(scope, receive, send)
        assert speaker.under_way.answers == 0
        return len(sent)

    whole = await lasts(10_000)
    for num_sent in range(whole + 1):
        assert await lasts(num_sent) <= whole


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that some work takes."""
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@given(
    st.text("ab", max_size=60),
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=3),
    st.lists(st.integers(1, 9), max_size=30),
)
def test_what_is_streamed_is_what_no_stop_string_can_take_back(
    said: str, stops: list[str], steps: list[int]
) -> None:
    """However the text comes: all of it, but for the longest beginning of a stop string."""
    tokenizer = byte_tokenizer()
    tokens_T = tokenizer.encode(said)
    begun, told, count = Begun(AnswerTexts(tokenizer), Prompt((1,)), Draw(stop=(*stops,))), "", 0
    for step in steps:
        count = min(count + step, len(tokens_T))
        told += begun.more(tokens_T[:count])
        text = str(tokenizer.decode(tokens_T[:count]))
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        ends += [at for at in range(len(text)) if any(s.startswith(text[at:]) for s in stops)]
        assert told == text[: min(ends, default=len(text))]


@pytest.mark.parametrize("said", ["a" * 400, "<a" + "a" * 400])
def test_a_stream_costs_no_more_with_a_long_stop_string_than_with_a_short_one(said: str) -> None:
    """Also where all of it looks like the beginning of one, and is held back."""
    tokenizer = byte_tokenizer()
    tokens_T = tokenizer.encode(said)

    def stream(stop: str) -> int:
        begun = Begun(AnswerTexts(tokenizer), Prompt((1,), form="hermes"), Draw(stop=(stop,)))
        parts = [tokens_T[:count] for count in range(1, len(tokens_T) + 1)]
        begun.more(parts[0])  # What is found out of a stop string once.
        return lines_run(lambda: [begun.more(part) for part in parts])

    assert stream("a" * 300 + "b") < 2 * stream("ab")
