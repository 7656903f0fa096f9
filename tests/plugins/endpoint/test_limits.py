"""What a request may cost: it is known, and refused, before anything is made for it."""

import json
import threading
from typing import Any

import anyio
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.plugins.endpoint.app import application
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.requests import Draw
from es_cookbook.plugins.endpoint.translator import Prompt, StreamedText, Translator
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from tests.byte_tokenizers import byte_tokenizer
from tests.plugins.endpoint.test_application import KEY, QUESTION, OneModel, asked, tool_of


async def test_pending_answers_of_a_key_are_limited() -> None:
    client, speaker = asked(*("x" for _ in range(9)))
    speaker.pending, speaker.is_stuck = PendingAnswers(4), True

    async def ask(**more: Any) -> None:
        await client.completions.create(model="centre", prompt=["a", "b"], **more)

    with pytest.raises(openai.BadRequestError, match="6 answers, and a key may have 4"):
        await ask(n=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while len(speaker.seen) < 2:
            await anyio.sleep(0)
        with pytest.raises(openai.RateLimitError, match="of which 2 are; send it again") as told:
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
            "stop must have up to 2048 characters, found 400000",
            "stop",
        ),
        ({"prompt": [[1] * 200] * 2000, "n": 1, "max_tokens": 9999}, "come to 20398000", "max_tok"),
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
            {"messages": [{"role": "user", "content": "a"}] * 4000},
            "fewer than 4000 texts of 4000 characters come to; shorten the messages",
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
async def test_too_large_requests_are_refused_before_they_are_encoded(
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
    assert speaker.pending.answers == 0


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_at_any_time_leaves_nothing_pending(stream: bool) -> None:
    async def lasts(num_sent: int) -> int:
        """How many messages are sent to a client that goes after so many of them."""
        _, speaker = asked(*["It is 3, or it is 4."] * 2)
        gone, sent = anyio.Event(), list[Any]()
        body = json.dumps({"model": "centre", "prompt": "x", "stream": stream, "n": 2}).encode()
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
            await application(OneModel(speaker))(scope, receive, send)
        assert speaker.pending.answers == 0
        return len(sent)

    whole = await lasts(10_000)
    for num_sent in range(whole + 1):
        assert await lasts(num_sent) <= whole


@given(
    st.text("ab", max_size=60),
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=3),
    st.lists(st.integers(1, 9), max_size=30),
)
def test_streamed_text_cannot_be_cut_by_a_later_stop_string(
    said: str, stops: list[str], steps: list[int]
) -> None:
    """However the text comes: all but as many characters as a stop string may have begun with."""
    tokenizer = byte_tokenizer()
    tokens_T = tokenizer.encode(said)
    begun, told, count = (
        StreamedText(AnswerTexts(tokenizer), Prompt((1,)), Draw(stop=(*stops,))),
        "",
        0,
    )
    for step in steps:
        count = min(count + step, len(tokens_T))
        told += begun.more(tokens_T[:count])
        text = str(tokenizer.decode(tokens_T[:count]))
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        certain = min([*ends, len(text) + 1 - max(map(len, stops), default=1)])
        assert told == text[: max(certain, 0)]
