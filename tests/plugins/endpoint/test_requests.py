"""Whatever is in a request, it is answered or refused in OpenAI's form, and nothing is dropped."""

import copy
import json
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import httpx
import pytest
from typing_extensions import override

from es_cookbook.engines.base import Progress
from es_cookbook.plugins.endpoint.app import application
from es_cookbook.rl.types import Action, Observation
from tests.chat_templates import CHATML, add
from tests.plugins.endpoint.test_application import KEY, OneModel, Scripted

Path: TypeAlias = tuple[str | int, ...]

MARK = "Marker7zq"
FIND: Any = {
    "name": "find",
    "description": "Find a thing.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"what": {"type": "string", "enum": ["a", "b"]}, "n": {"type": "integer"}},
        "required": ["what"],
    },
}
FUNCTIONS: Any = [dict(add.schema["function"]), FIND]  # pyright: ignore
CHAT: Any = {
    "model": "centre",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
                },
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "find", "arguments": '{"what": "a", "n": null}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "name": "find", "content": "here"},
        {"role": "assistant", "refusal": "I will not."},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": True,
    "temperature": 0.5,
    "max_completion_tokens": 9,
    "n": 2,
    "seed": 7,
    "stop": ["Or", "But"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "me",
    "metadata": {"a": "b"},
    "response_format": {"type": "text"},
    "logit_bias": {},
}
TEXT: Any = {
    "model": "centre",
    "prompt": ["One", "Two"],
    "max_tokens": 4,
    "temperature": 1,
    "stop": "x",
    "logprobs": 0,
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "user": "me",
}
ITEMS: Any = {
    "model": "centre",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {
            "type": "message",
            "id": "m1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "id": "f1", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", **each} for each in FUNCTIONS],
    "tool_choice": {"type": "function", "name": "add"},
    "temperature": 0.5,
    "max_output_tokens": 9,
    "text": {"format": {"type": "text"}},
    "include": [],
    "truncation": "disabled",
    "store": False,
}
BODIES: Mapping[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": ITEMS,
}
IDLE = {"user", "metadata", "store", "id", "status", "annotations"}
"""Fields that say nothing to a model."""


class Text:
    """JSON as it is written, which Python has no value for, or cannot write."""

    def __init__(self, text: str) -> None:
        self.text = text


def nested(deep: int, begin: str, end: str) -> Text:
    return Text(begin * deep + "1" + end * deep)


NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, 10**400, float("nan"), float("inf"), Text("-1e999")),
    *(Text("1" * 5000), "", MARK, "\x00", "\ud800", "\udfffx", "x" * 3000, [], {}, [[]], [[MARK]]),
    *([5], [None], [{}], {"x": 5}, {MARK: 1}, {"type": "x"}, {"type": []}, {"function": 5}),
    *({"name": []}, {"type": "function", "function": {}}, {"type": "text", "text": 5}),
    *({"include_usage": {}}, {"\ud800": 1}, {"$ref": "#"}, {"type": 5}, {"pattern": "(a+)+$"}),
    *({"type": "object", "properties": []}, {"type": "object", "required": 5}),
    *(nested(n, "[", "]") for n in (60, 400, 900, 10_000)),
    *(nested(n, '{"a":', "}") for n in (60, 400, 900, 10_000)),
    *('{"a":' * n + "1" + "}" * n for n in (60, 400, 900, 10_000)),
    *("NaN", "[1]", "null", "{}", '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}'),
    *('{"a": "\\ud800"}', f'{{"{MARK}": 1}}', "<|im_end|>", 'x"y', "a b", "c1", "c2", "none"),
    *("user", "assistant", "tool", "function_call", "function_call_output", "reasoning"),
    [{"id": [], "function": {"name": "add", "arguments": "{}"}}],
    [{"id": "c", "function": {"name": "add"}}, {"id": "c", "function": {"name": "add"}}],
    [{"id": "c", "type": "custom", "custom": {"name": "add", "input": "x"}}],
]
KEYS = ("x", "", "\ud800", "k" * 10_000, "type", "role", "content", "name", "tool_calls", "strict")


def places(found: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    items: Any = enumerate(found) if isinstance(found, list) else ()
    for key, value in found.items() if isinstance(found, dict) else items:
        yield from places(value, (*path, key))


def at(body: Any, path: Path) -> Any:
    for key in path:
        body = body[key]
    return body


def written(found: Any) -> str:
    """As JSON."""
    if isinstance(found, Text):
        return found.text
    if isinstance(found, dict):
        fields = (f"{json.dumps(key)}: {written(value)}" for key, value in found.items())
        return f"{{{', '.join(fields)}}}"
    return f"[{', '.join(map(written, found))}]" if isinstance(found, list) else json.dumps(found)


def mutated(rng: random.Random, body: Any) -> str:
    """A body with something else in one place or in two."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2])):
        *before, key = rng.choice([*places(body)])
        holder = at(body, tuple(before))
        old, new = holder[key], rng.choice(NASTY)
        match rng.choice(["put", "put", "put", "drop", "twice", "nest", "add", "rename"]):
            case "put":
                holder[key] = copy.deepcopy(new)
            case "drop":
                del holder[key]
            case "twice" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(old))
            case "nest":
                holder[key] = rng.choice([[old], {rng.choice(KEYS): old}])
            case "add" if isinstance(old, dict):
                old[rng.choice(KEYS)] = copy.deepcopy(new)
            case "rename" if isinstance(holder, dict):
                holder[rng.choice(KEYS)] = holder.pop(key)
            case _:
                pass
    return written(body)


class Brief(Scripted):
    """Says "4"."""

    def __init__(self) -> None:
        super().__init__(CHATML, ())
        self.translator.context_length = 100_000

    @override
    async def sample(
        self, observation: Observation, draw: Any, number: int, progress: Progress
    ) -> Action:
        self.texts = ["4"]
        return await super().sample(observation, draw, number, progress)

    def said(self) -> str:
        """All prompts, and what ends their answers."""
        prompts = (self.prompt(turn) for turn in range(len(self.seen)))
        return "".join([*prompts, *(str(each.stop) for each in self.seen)])


def served(speaker: Scripted) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application(OneModel(speaker)), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(transport=transport, base_url="http://es", headers=headers)


@pytest.mark.parametrize("path", BODIES)
async def test_no_body_ends_in_an_error_of_the_server(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng, client = random.Random(path), served(Brief())
    kinds = set[int]()
    for _ in range(120):
        text = mutated(rng, BODIES[path])
        found = await client.post(path, content=text.encode())
        kinds.add(found.status_code)
        assert found.status_code in (200, 400, 404), text
        if found.status_code != 200:
            error = found.json()["error"]
            assert error["type"] == "invalid_request_error" and error["message"], text
            assert error["param"] or error["message"].startswith("the body of the request"), text
    assert kinds >= {200, 400}
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize("path", BODIES)
async def test_no_text_of_a_request_is_dropped(path: str) -> None:
    """A text in any field, known or unknown, is in the prompt, or the request is refused."""
    body = {name: value for name, value in BODIES[path].items() if not name.startswith("stream")}
    speaker = Brief()
    client, seen = served(speaker), 0
    for place in [(), *places(body)]:
        *before, key = place or ("",)
        changed = copy.deepcopy(body)
        if isinstance(at(body, place), dict):
            at(changed, place)["own"] = MARK
        elif isinstance(at(body, place), str):
            at(changed, tuple(before))[key] = MARK
        else:
            continue
        speaker.seen.clear()
        found = await client.post(path, json=changed)
        if found.status_code == 200 and not IDLE.intersection(place):
            assert MARK in speaker.said(), place
            seen += 1
    assert seen >= (2 if path == "/v1/completions" else 12)


PART = {"type": "text", "text": "Hi."}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
NOTHING = ("audio", "function_call", "functions", "logit_bias", "modalities", "reasoning_effort")
CHAT_PATH = "chat/completions"
HARMLESS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nulls": (CHAT_PATH, {}, dict.fromkeys((*NOTHING, "tools", "stop", "logprobs"))),
    "what lm-evaluation-harness says of messages": (
        CHAT_PATH,
        {},
        {"messages": [{"role": "user", "content": "Hi.", "type": "text"}]},
    ),
    "marks for caches, and strict": (
        CHAT_PATH,
        {"tools": [{"type": "function", "function": ADD}]},
        {
            "messages": [{"role": "user", "content": [PART | CACHED], **CACHED}],
            "tools": [{"type": "function", "function": ADD | {"strict": True}, **CACHED}],
        },
    ),
    "what OpenAI's objects hold": (
        CHAT_PATH,
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ]
        },
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    **dict.fromkeys(("refusal", "audio", "function_call")),
                    "annotations": [],
                    "provider_specific_fields": {},
                    "tool_calls": [CALL | {"index": 0}],
                },
                {"role": "tool", "content": [PART | {"text": "4"}], "tool_call_id": "c"},
            ]
        },
    ),
    "nothing of a text": ("completions", {}, {"suffix": None, "best_of": None, "logit_bias": {}}),
    "nothing of a response": (
        "responses",
        {},
        {"reasoning": {"effort": None, "summary": None}, "text": {}, "include": []},
    ),
}


@pytest.mark.parametrize("what", HARMLESS)
async def test_fields_without_effect_are_accepted(what: str) -> None:
    """Programs send it, with or without meaning it: the model is asked the same."""
    path, plain, more = HARMLESS[what]
    asked: dict[str, Any] = {
        "chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
        "completions": {"prompt": "Hi."},
        "responses": {"input": "Hi."},
    }[path]
    speaker = Brief()
    client, said = served(speaker), list[str]()
    for body in (plain, more):
        found = await client.post(f"/v1/{path}", json={"model": "centre", **asked, **body})
        assert found.status_code == 200, found.text
        said.append(speaker.said())
        speaker.seen.clear()
    assert said[0] == said[1] and said[0]


async def test_a_body_is_utf_8_and_an_object() -> None:
    client = served(Brief())
    for content, what in (
        (b'{"model": "\xed\xa0\x80"}', "is no text in UTF-8"),
        (b"[]", "must be a JSON object"),
    ):
        found = await client.post("/v1/completions", content=content)
        message = f"the body of the request {what}"
        assert (found.status_code, found.json()["error"]["message"]) == (400, message)
    found = await client.post(
        "/v1/completions", content=b'\xef\xbb\xbf{"model": "centre", "prompt": "a"}'
    )
    assert found.status_code == 200
