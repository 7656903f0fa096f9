"""The endpoint, asked by OpenAI's own client."""

from collections.abc import Sequence
from typing import Any

import anyio
import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typing_extensions import override

from es_cookbook.common.errors import EngineError
from es_cookbook.engines.base import Progress, Top
from es_cookbook.plugins.endpoint.app import MOST_BYTES, application
from es_cookbook.plugins.endpoint.endpoint import Endpoint, ServedModel, check_name, wrong_key
from es_cookbook.plugins.endpoint.limits import PendingAnswers
from es_cookbook.plugins.endpoint.replies import raw_bytes
from es_cookbook.plugins.endpoint.requests import Draw, RefusedRequest
from es_cookbook.plugins.endpoint.translator import Prompt, StreamedText, Translator
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.chat import KeptTurns
from es_cookbook.rl.types import Action, Observation
from tests.chat_templates import CHATML, GEMMA, LLAMA, add, tokenizer_with

KEY, CONTEXT = "sesame", 600
QUESTION: Any = [{"role": "user", "content": "How much is 1 + 2?"}]
TOOLS: Any = [dict(add.schema)]


class Scripted(ServedModel):
    """Says given texts, one a request."""

    def __init__(self, template: str, texts: Sequence[str]) -> None:
        self.translator = Translator(tokenizer_with(template), CONTEXT)
        self.kept, self.pending = KeptTurns(), PendingAnswers()
        self.texts = list(texts)
        self.seen: list[Observation] = []
        self.draws: list[Draw] = []
        self.is_stuck = self.fails = False

    @override
    async def sample(
        self, observation: Observation, draw: Draw, number: int, progress: Progress
    ) -> Action:
        self.seen.append(observation)
        self.draws.append(draw)
        if self.is_stuck:
            await anyio.sleep_forever()
        text = self.texts.pop(0)
        tokens_T = tuple(self.translator.tokenizer.encode(text, add_special_tokens=False))
        is_cut = len(tokens_T) > (observation.max_tokens or 0)
        tokens_T = tokens_T[: observation.max_tokens]
        text = str(self.translator.tokenizer.decode(list(tokens_T)))
        logprobs_T = (-0.5,) * len(tokens_T) if draw.logprobs else None
        for length in range(1, len(tokens_T)) if progress.follows else ():
            progress.sampled(tokens_T[:length])
            await anyio.sleep(0)
        if self.fails:
            raise EngineError("the engine has failed")
        progress.cached_tokens = 7
        return Action(tokens_T, text, "length" if is_cut else "stop", logprobs_T)

    @override
    async def tops(self, tokens_T: tuple[int, ...]) -> Sequence[Top]:
        """The second token is not the most probable one."""
        return [Top(-2.0, 70, -0.25), *(Top(-0.5, token, -0.5) for token in tokens_T[2:])]

    def prompt(self, turn: int = -1) -> str:
        return str(self.translator.tokenizer.decode(list(self.seen[turn].tokens_T)))


class OneModel(Endpoint):
    def __init__(self, model: ServedModel) -> None:
        self._model = model

    @override
    def check(self, key: str) -> None:
        if key != KEY:
            raise wrong_key()

    @override
    def names(self, key: str) -> Sequence[str]:
        return ["centre"]

    @override
    def model(self, key: str, name: str) -> ServedModel:
        check_name(name, self.names(key))
        return self._model


def asked(*texts: str, template: str = CHATML, key: str = KEY) -> tuple[AsyncOpenAI, Scripted]:
    """A client of an endpoint that says these texts."""
    speaker = Scripted(template, texts)
    transport = httpx.ASGITransport(application(OneModel(speaker)))
    client = httpx.AsyncClient(transport=transport)
    base_url = "http://es/v1"
    return AsyncOpenAI(api_key=key, base_url=base_url, http_client=client, max_retries=0), speaker


async def test_a_chat_is_answered() -> None:
    client, speaker = asked("It is 3. Or 4.", "It is 3 or")
    draw: Any = {"temperature": 0.5, "top_p": 0.9, "seed": 7}
    found = await client.chat.completions.create(
        model="centre", messages=QUESTION, stop="Or", user="me", **draw
    )
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 3. ", "stop")
    assert found.usage and found.usage.prompt_tokens == len(speaker.seen[0].tokens_T)
    said_T = speaker.translator.tokenizer.encode("It is 3. Or 4.", add_special_tokens=False)
    assert found.usage.completion_tokens == len(said_T)
    assert speaker.prompt().endswith("How much is 1 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert speaker.seen[0].stop == ("Or",)
    assert speaker.draws[0] == Draw(None, 0.5, 0.9, ("Or",), 7)
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}]
    cut = await client.chat.completions.create(
        model="centre", messages=[*messages, *QUESTION], max_completion_tokens=2
    )
    assert (cut.choices[0].finish_reason, speaker.seen[1].max_tokens) == ("length", 2)
    assert "Be brief." in speaker.prompt()


async def test_a_stream_comes_as_it_is_sampled() -> None:
    text = "It is 3, über alles: € 3.50 — 三. Or else"
    client, _ = asked(text, text, "Two", "1 < 2")
    more: Any = {"stop": " Or", "stream": True, "stream_options": {"include_usage": True}}
    stream = await client.chat.completions.create(model="centre", messages=QUESTION, **more)
    *pieces, last = [piece async for piece in stream]
    said = [piece.choices[0].delta.content or "" for piece in pieces]
    assert "".join(said) == "It is 3, über alles: € 3.50 — 三."
    assert len([each for each in said if each]) > 10 and not any("\ufffd" in each for each in said)
    assert len({piece.id for piece in pieces}) == 1
    assert last.usage and last.usage.prompt_tokens_details
    assert last.usage.prompt_tokens_details.cached_tokens == 7
    texts = await client.completions.create(model="centre", prompt="A", max_tokens=60, stream=True)
    found = [piece.choices[0] async for piece in texts]
    assert "".join(each.text for each in found) == text and len(found) > 10
    assert [each.finish_reason for each in found[-2:]] == [None, "stop"]
    # Several at once, each whole.
    stream = await client.chat.completions.create(
        model="centre", messages=QUESTION, tools=TOOLS, n=2, stream=True
    )
    choices = [piece.choices[0] async for piece in stream]
    for at, text in enumerate(("Two", "1 < 2")):
        assert "".join(each.delta.content or "" for each in choices if each.index == at) == text


def test_the_text_of_a_stream_takes_time_in_proportion_to_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tokenizer_with(CHATML)
    tokens_T = tokenizer.encode("It is 3, über alles: € 3.50 — 三. " * 20, add_special_tokens=False)
    lengths: list[int] = []

    def decode(tokens: Sequence[int], **options: Any) -> str:
        lengths.append(len(tokens))
        return str(type(tokenizer).decode(tokenizer, tokens, **options))

    monkeypatch.setattr(tokenizer, "decode", decode)
    begun = StreamedText(AnswerTexts(tokenizer), Prompt((1,)), Draw(stop=("4",)))
    pieces = [begun.more(tokens_T[:length]) for length in range(1, len(tokens_T) + 1)]
    assert "".join(pieces) == "It is 3, über alles: € 3.50 — 三. " * 20
    assert sum(lengths) < 10 * len(tokens_T) < len(tokens_T) ** 2 / 20


def test_a_stop_text_that_is_a_special_token_cuts_answers() -> None:
    translator = Translator(tokenizer_with(GEMMA), CONTEXT)
    tokens_T = tuple(translator.tokenizer.encode("I see\nnext<end_of_turn>"))
    action = Action(tokens_T, translator.texts.text(tokens_T), "stop")
    draw = Draw(stop=("nowhere", "<end_of_turn>"))
    assert translator.answer(Prompt((1,)), draw, action).content == "I see\nnext"


def test_a_prompt_of_tokens_has_those_that_the_tokenizer_knows() -> None:
    """Which are not all below their number, where the tokenizer has holes."""
    vocabulary = {"<unk>": 0, "a": 1, "b": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        unk_token="<unk>",
    )
    translator = Translator(tokenizer, CONTEXT)
    assert translator.of_text((1, 4, 0)).tokens_T == (1, 4, 0)
    for token in (2, 5, -1):
        with pytest.raises(RefusedRequest, match=f"the 3 that the tokenizer knows, found {token}"):
            translator.of_text((1, token))


async def test_a_stream_that_fails_says_so_at_its_end() -> None:
    client, speaker = asked(*["It is 3, or it is 4."] * 2)
    speaker.fails = True
    said: list[str] = []
    with pytest.raises(openai.APIError, match="the engine has failed"):
        async for piece in await client.chat.completions.create(
            model="centre", messages=QUESTION, stream=True
        ):
            said.append(piece.choices[0].delta.content or "")
    assert "".join(said).startswith("It is 3")
    with pytest.raises(openai.APIError, match="the engine has failed"):
        async for _ in await client.responses.create(model="centre", input="1?", stream=True):
            pass
    with pytest.raises(openai.NotFoundError):  # before it begins, with a status
        await client.chat.completions.create(model="other", messages=QUESTION, stream=True)


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (CHATML, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}'),
        # Its template knows no tools: they stand in the message of the user.
        (GEMMA, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    ],
    ids=["chatml", "llama", "gemma"],
)
async def test_a_chat_continues_from_the_sampled_tokens(template: str, call: str) -> None:
    client, speaker = asked(call, "It is 2.", "It is 2.", template=template)
    first = await client.chat.completions.create(model="centre", messages=QUESTION, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    chat: Any = [*QUESTION, message.model_dump(exclude_none=True), result]
    second = await client.chat.completions.create(model="centre", messages=chat, tools=TOOLS)
    assert second.choices[0].message.content == "It is 2."
    tokenizer = speaker.translator.tokenizer
    said_T = tuple(tokenizer.encode(call, add_special_tokens=False))
    before_T = speaker.seen[0].tokens_T + said_T
    assert speaker.seen[1].tokens_T[: len(before_T)] == before_T
    # A chat that was not had here is rendered as a whole.
    chat[0] = {"role": "user", "content": "And 1 + 1?"}
    await client.chat.completions.create(model="centre", messages=chat, tools=TOOLS)
    assert "And 1 + 1?" in speaker.prompt()
    assert call.split('"name"')[1].removesuffix("</tool_call>").strip() in speaker.prompt()


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "cut", "finish", "calls", "content"),
    [
        (CALL, False, "tool_calls", 1, None),
        (f"{CALL} and then", True, "length", 1, "and then"),
        (f'So. {CALL}<tool_call>{{"na', True, "length", 1, 'So. <tool_call>{"na'),
        (f"<tool_call>add</tool_call>{CALL}", False, "tool_calls", 1, "<tool_call>add</tool_call>"),
        ("<tool_call>add</tool_call>", False, "stop", 0, "<tool_call>add</tool_call>"),
        (f"<think>{CALL}?</think>{CALL}", False, "tool_calls", 1, f"<think>{CALL}?</think>"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_why_an_answer_ends(
    text: str, cut: bool, finish: str, calls: int, content: str | None, stream: bool
) -> None:
    client, speaker = asked(f"{text} and more" if cut else text)
    length = len(speaker.translator.tokenizer.encode(text, add_special_tokens=False))
    most: Any = {"max_tokens": length} if cut else {}
    found: Any = await client.chat.completions.create(
        model="centre", messages=QUESTION, tools=TOOLS, stream=stream, **most
    )
    if stream:
        choices = [piece.choices[0] async for piece in found]
        said = "".join(choice.delta.content or "" for choice in choices) or None
        made = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert (choices[-1].finish_reason, len(made), said) == (finish, calls, content)
        return
    (choice,) = found.choices
    assert (choice.finish_reason, choice.message.content) == (finish, content)
    assert len(choice.message.tool_calls or ()) == calls


@pytest.mark.parametrize("opened", ["", "<think>\n"])
async def test_a_tool_that_is_demanded_is_called_outside_of_thoughts(opened: str) -> None:
    client, speaker = asked('add", "arguments": {}}</tool_call>', template=CHATML + opened)
    found = await client.chat.completions.create(
        model="centre", messages=QUESTION, tools=TOOLS, tool_choice="required"
    )
    assert found.choices[0].message.tool_calls and not found.choices[0].message.content
    assert speaker.prompt().count("</think>\n\n<tool_call>") == bool(opened)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_token_of_a_chat_has_its_log_probability_and_bytes(stream: bool) -> None:
    text = "It is 3, über alles: € 三 🎈."
    client, speaker = asked(text)
    found: Any = await client.chat.completions.create(
        model="centre", messages=QUESTION, logprobs=True, top_logprobs=0, stream=stream
    )
    choices = [each.choices[0] async for each in found] if stream else found.choices
    (logprobs,) = [each.logprobs.content for each in choices if each.logprobs]
    tokens_T = speaker.translator.tokenizer.encode(text, add_special_tokens=False)
    assert len(logprobs) == len(tokens_T) and {each.logprob for each in logprobs} == {-0.5}
    assert bytes(byte for each in logprobs for byte in each.bytes).decode() == text
    assert any("\ufffd" in each.token for each in logprobs)
    assert speaker.draws[0].logprobs


def test_the_bytes_of_a_part_of_a_character_are_read_from_its_tokens_name() -> None:
    assert raw_bytes("\ufffd", "<0xE2>") == [0xE2]
    assert raw_bytes(" \ufffd", "Ġâ") == [0x20, 0xE2]
    assert raw_bytes("\ufffd", "三?") is None


async def test_a_tool_may_be_asked_for_by_its_name_or_forbidden() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    client, speaker = asked('{"a": 5}}\n</tool_call>', 'add", "arguments": {}}</tool_call>', call)
    chosen: Any = {"type": "function", "function": {"name": "add"}}
    choices: list[Any] = [chosen, "required", "none"]
    found = [
        await client.chat.completions.create(
            model="centre", messages=QUESTION, tools=TOOLS, tool_choice=choice
        )
        for choice in choices
    ]
    calls = [each.choices[0].message.tool_calls for each in found]
    assert [each[0].to_dict()["function"] for each in calls[:2] if each] == [
        {"name": "add", "arguments": '{"a": 5}'},
        {"name": "add", "arguments": "{}"},
    ]
    # With "none" the prompt still lists the tools, and calls in the answer stay text.
    assert calls[2] is None and found[2].choices[0].message.content == call
    assert all("add" in speaker.prompt(turn) for turn in range(3))


async def test_several_answers_and_prompts_have_their_own_numbers() -> None:
    client, speaker = asked(*"abcdef")
    found = await client.completions.create(
        model="centre", prompt=["One", "Two", "Three"], n=2, logprobs=0, max_tokens=9
    )
    assert [(each.index, each.text) for each in found.choices] == [*enumerate("abcdef")]
    assert [speaker.prompt(turn) for turn in range(6)] == [
        *["One"] * 2,
        *["Two"] * 2,
        *["Three"] * 2,
    ]
    assert found.choices[0].logprobs and found.choices[0].logprobs.token_logprobs == [-0.5]
    tokens = list(speaker.seen[0].tokens_T)
    speaker.texts = ["g"]
    await client.completions.create(model="centre", prompt=[tokens])
    assert speaker.seen[-1].tokens_T == tuple(tokens)
    assert speaker.seen[-1].max_tokens == 16  # as OpenAI's default


async def test_a_prompt_is_echoed_with_what_harnesses_read_of_it() -> None:
    client, speaker = asked("4", "4", "4")
    tokenizer = speaker.translator.tokenizer
    prompts = [tokenizer.encode("2 + 2 ="), tokenizer.encode("so 2")]
    most: Any = {"model": "centre", "prompt": prompts, "echo": True, "logprobs": 1}
    found = await client.completions.create(**most, max_tokens=1)  # As lm-evaluation-harness asks.
    for choice, prompt_T in zip(found.choices, prompts, strict=True):
        texts = [tokenizer.decode([token]) for token in prompt_T]
        assert choice.text == "".join(texts) + "4" and (told := choice.logprobs)
        assert told.tokens == [*texts, "4"] and told.token_logprobs and told.top_logprobs
        assert told.token_logprobs == [None, -2.0, *[-0.5] * (len(texts) - 1)]
        other = tokenizer.decode([70])
        assert told.top_logprobs[:3] == [None, {texts[1]: -2.0, other: -0.25}, {texts[2]: -0.5}]
        assert told.text_offset == [len("".join(told.tokens[:at])) for at in range(len(texts) + 1)]
    # Without an answer, and without numbers.
    most["prompt"] = "2 + 2 ="
    alone = await client.completions.create(**most, max_tokens=0)
    (choice,) = alone.choices
    assert choice.text == "2 + 2 =" and choice.logprobs and choice.logprobs.tokens
    assert len(choice.logprobs.tokens) == len(prompts[0]) and alone.usage
    assert (choice.finish_reason, alone.usage.completion_tokens) == ("length", 0)
    plain = await client.completions.create(model="centre", prompt="2 + 2 =", echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("2 + 2 =4", None)
    for wrong, said in (
        ({"logprobs": 2}, "logprobs must be 0, or 1 with echo=true"),
        ({"echo": False}, "logprobs must be 0, or 1 with echo=true"),
        ({"stream": True}, "stream must be false with echo or logprobs"),
        ({"echo": False, "logprobs": None}, "max_tokens must be from 1 to"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.completions.create(**most | {"max_tokens": 0} | wrong)


def tool_of(**fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "min", **fields}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": True}, "seed must be an integer, and is true or false"),
        ({"stop": [""]}, "stop must be a string or an array"),
        ({"messages": [{"role": "owner", "content": ""}]}, "role is unknown; accepted: assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\].content\[0\].type must be text or input_text or .*, found 'image_url'",
        ),
        (
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]},
            "must be that of a call before it",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format cannot be kept here"),
        ({"logit_bias": {"5": 1}}, r"logit_bias is not read here"),
        (
            {"extra_body": {"guided": 1}},
            "guided is not read here; accepted: logprobs, max_completion_tokens, ",
        ),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be function, found 'web_"),
        ({"tool_choice": "required"}, "tool_choice must be none or auto where there are no tools"),
        ({"max_tokens": CONTEXT}, f"the context has {CONTEXT} tokens, fewer than"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_unsupported_fields_are_refused_in_the_form_of_openai(
    wrong: dict[str, Any], said: str
) -> None:
    client, speaker = asked()
    options = {"model": "centre", "messages": QUESTION, **wrong}
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        await client.chat.completions.create(**options)
    assert refused.value.type == "invalid_request_error" and not speaker.seen


async def test_a_wrong_key_model_or_path_and_a_large_body() -> None:
    stranger, speaker = asked("x", key="wrong")
    with pytest.raises(openai.AuthenticationError, match="the key is wrong") as refused:
        await stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    client, _ = asked()
    assert [model.id for model in (await client.models.list()).data] == ["centre"]
    with pytest.raises(openai.NotFoundError, match="'center' is not served; did you mean") as lost:
        await client.chat.completions.create(model="center", messages=QUESTION)
    assert lost.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings"):
        await client.embeddings.create(model="centre", input="x")
    with pytest.raises(openai.APIStatusError, match="larger than 8 MiB") as large:
        await client.completions.create(model="centre", prompt="x" * MOST_BYTES)
    assert large.value.status_code == 413
    bare = httpx.AsyncClient(transport=httpx.ASGITransport(application(OneModel(speaker))))
    for headers in ({}, {"Authorization": KEY}):
        reply = await bare.post("http://es/v1/completions", headers=headers, content=b"{")
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = await bare.post("http://es/v1/completions", headers=headers, content=b"{")
    assert (reply.status_code, "is not JSON" in reply.json()["error"]["message"]) == (400, True)


async def test_the_responses_api_is_answered_as_chats_are() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    client, speaker = asked(call, "It is 3.", "Too long to")
    tools: Any = [{"type": "function", **add.schema["function"]}]
    chat: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
    first = await client.responses.create(
        model="centre", instructions="Be brief.", input=chat, tools=tools, temperature=0.5
    )
    (item,) = first.output
    assert item.type == "function_call" and (item.name, item.arguments) == (
        "add",
        '{"a": 1, "b": 2}',
    )
    assert (first.status, first.temperature) == ("completed", 0.5)
    assert first.usage and first.usage.input_tokens == len(speaker.seen[0].tokens_T)
    assert "Be brief." in speaker.prompt() and "1 + 2?" in speaker.prompt()
    chat += [item, {"type": "function_call_output", "call_id": item.call_id, "output": "3"}]
    second = await client.responses.create(
        model="centre", instructions="Be brief.", input=chat, tools=tools
    )
    assert second.output_text == "It is 3."
    # The chat goes on from the tokens that were sampled.
    tokenizer = speaker.translator.tokenizer
    before_T = speaker.seen[0].tokens_T + tuple(tokenizer.encode(call, add_special_tokens=False))
    assert speaker.seen[1].tokens_T[: len(before_T)] == before_T
    cut = await client.responses.create(model="centre", input="Hello", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details
    assert cut.incomplete_details.reason == "max_output_tokens"


async def test_the_responses_api_streams_items() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    client, _ = asked(f"Well. {call}")
    tools: Any = [{"type": "function", **add.schema["function"]}]
    async with client.responses.stream(model="centre", input="1 + 2?", tools=tools) as stream:
        kinds = [event.type async for event in stream]
        whole = await stream.get_final_response()
    assert [item.type for item in whole.output] == ["message", "function_call"]
    assert whole.output_text == "Well."
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") == 1
    assert kinds.count("response.function_call_arguments.delta") == 1
    # As it is sampled, without tools.
    client, _ = asked("Well, it is 3.")
    async with client.responses.stream(model="centre", input="1 + 2?") as stream:
        pieces = [event.type async for event in stream]
        whole = await stream.get_final_response()
    assert whole.output_text == "Well, it is 3." and whole.usage
    assert whole.usage.input_tokens_details.cached_tokens == 7
    assert pieces.count("response.output_text.delta") > 3
    assert set(pieces) < set(kinds)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not read"),
        ({"input": [{"type": "reasoning", "summary": []}]}, r"input\[0\].type must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "must be text"),
        (
            {"input": [{"type": "function_call", "arguments": "{}"}]},
            r"input\[0\].name must be a string",
        ),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be function, found 'web_"),
        ({"text": {"format": {"type": "json_object"}}}, "text cannot be kept"),
        ({"extra_body": {"mood": "good"}}, "mood is not read here; did you mean 'model'"),
    ],
)
async def test_unsupported_fields_of_the_responses_api_are_refused(
    wrong: dict[str, Any], said: str
) -> None:
    client, _ = asked()
    with pytest.raises(openai.BadRequestError, match=said):
        await client.responses.create(**{"model": "centre", "input": "Hello", **wrong})


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_pydantic_ai_asks_for_responses(stream: bool) -> None:
    pydantic_ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai")
    client, speaker = asked(CALL.replace("}}", ', "b": 2}}'), "It is 3.")
    provider = providers.OpenAIProvider(openai_client=client)
    agent = pydantic_ai.Agent(models.OpenAIResponsesModel("centre", provider=provider))

    @agent.tool_plain
    def add(a: int, b: int) -> int:  # pyright: ignore[reportUnusedFunction]
        return a + b

    if stream:
        async with agent.run_stream("1 + 2?") as found:
            assert [text async for text in found.stream_text(delta=True)] == ["It is 3."]
    else:
        assert (await agent.run("1 + 2?")).output == "It is 3."
    assert "\n3\n" in speaker.prompt()
