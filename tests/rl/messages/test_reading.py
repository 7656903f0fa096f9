"""What messages and tools say is read whole, or refused by the name of the field."""

import pickle
from typing import Any

import pytest

from es_cookbook.rl.messages.message import ToolCall
from es_cookbook.rl.messages.reading import FieldError, JsonObject, read_messages, read_tools

ASKED: Any = {"role": "user", "content": "Well?"}


def calling(*ids: str) -> dict[str, Any]:
    """A turn that calls a tool of the name of each id."""
    calls = [{"id": each, "function": {"name": f"of_{each}", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(of: str, **more: object) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": f"result {of}", **more}


def told(messages: list[Any]) -> list[tuple[str, str | None]]:
    return [
        (message.content, message.name)
        for message in read_messages(messages)
        if message.role == "tool"
    ]


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_results_come_in_the_order_of_their_calls(order: str) -> None:
    """By which templates that show no ids tell whose they are."""
    messages = [ASKED, calling("a", "b", "c"), *map(result, order), ASKED]
    assert told(messages) == [(f"result {each}", f"of_{each}") for each in "abc"]


def test_calls_without_results_wait_for_them_only_in_their_turn() -> None:
    late = [ASKED, calling("a", "b"), result("a"), ASKED, result("b")]
    assert [name for _, name in told(late)] == ["of_a", "of_b"]
    apart = [ASKED, calling("a"), calling("b"), result("b"), result("a")]
    assert [name for _, name in told(apart)] == ["of_a", "of_b"]
    never = [ASKED, calling("a"), ASKED, calling("b"), result("b")]
    assert told(never) == [("result b", "of_b")]
    again = [ASKED, calling("a"), result("a"), calling("a"), result("a")]
    assert told(again) == [("result a", "of_a")] * 2
    unsaid = {"role": "tool", "content": "3", "name": "look"}
    assert told([ASKED, calling("a"), unsaid, unsaid]) == [("3", "look")] * 2


@pytest.mark.parametrize(
    ("messages", "where", "what"),
    [
        ([calling("a"), result("b")], "messages[1].tool_call_id", "that of a call before it"),
        ([calling("a"), result("a"), result("a")], "messages[2].tool_call_id", "without a result"),
        (
            [calling("a"), result("a", name="x")],
            "messages[1].tool_call_id",
            "'of_a', and not of 'x'",
        ),
        ([calling("a", "a")], "messages[0].tool_calls[1].id", "must be its own"),
        ([{"content": "x"}], "messages[0].role", "is missing; accepted: assistant"),
        ([{"role": "assistant"}], "messages[0].content", "and is missing"),
        (
            [{"role": "assistant", "content": "x", "refusal": "No."}],
            "messages[0].refusal",
            "must stand alone",
        ),
        (
            [{**ASKED, "content": [{"type": "text", "text": "x", "own": {"a": 1}}]}],
            "messages[0].content[0].own",
            "is not read here; accepted: text, type",
        ),
        ([{**ASKED, "k" * 10**6: 1}], f"messages[0].{'k' * 60}", "in a message of the role user"),
    ],
)
def test_a_field_of_a_message_is_refused_by_its_name(messages: Any, where: str, what: str) -> None:
    with pytest.raises(FieldError) as refused:
        read_messages(messages)
    assert refused.value.where == where and what in str(refused.value)
    assert len(str(refused.value)) < 400
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("[1]", "must be the JSON of an object, and is that of an array"),
        ('{"a": NaN}', "not finite: NaN"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "is nested too deeply"),
        ('{"a":' * 65 + "1" + "}" * 65, "is nested more than 64 deep"),
        ('{"a": "\\ud83d"}', None),  # As models write it.
        ('{"a":' * 64 + "1" + "}" * 64, None),
        (7, "must be a string or an object, and is an integer"),
    ],
)
def test_arguments_are_the_json_of_an_object(arguments: object, what: str | None) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    if what is None:
        ((found,),) = [message.tool_calls for message in read_messages(messages)]
        assert arguments != {"a": None} or found == ToolCall("look", {"a": None})
        return
    with pytest.raises(
        FieldError, match=r"messages\[0\].tool_calls\[0\].function.arguments "
    ) as no:
        read_messages(messages)
    assert what in str(no.value)


@pytest.mark.parametrize("name", ["größer", "a.b/c-d:e", "Get Earnings", "x" * 128])
def test_a_tool_may_have_any_name_that_json_writes_as_it_is(name: str) -> None:
    for described in ({"name": name}, {"type": "function", "function": {"name": name}}):
        (tool,) = read_tools([JsonObject(described, "tools[0]")])
        empty = {"type": "object", "properties": {}}
        function = {"name": name, "description": "", "parameters": empty}
        assert tool.schema == {"type": "function", "function": function}


def nested(deep: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(deep):
        schema = {"x": schema}
    return schema


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ({"name": "x" * 129}, "function.name must have 1 to 128 characters"),
        ({"name": 'a"b'}, "none of which JSON escapes, found 'a\"b'"),
        ({"name": "\ud800"}, "none of which JSON escapes"),
        ({"name": "x", "parameters": []}, "function.parameters must be an object"),
        ({"name": "x", "parameters": nested(64)}, "is nested more than 64 deep"),
    ],
)
def test_a_tool_is_refused_by_the_name_of_its_field(function: object, what: str) -> None:
    with pytest.raises(FieldError) as refused:
        read_tools([JsonObject({"type": "function", "function": function}, "tools[0]")])
    assert str(refused.value).startswith("tools[0].function") and what in str(refused.value)
