"""What is read as a call, and what is told to the model instead."""

import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.rl.messages.message import Form, Parsed, ToolCall, call_text, parse_tool_calls

ADD = ToolCall("add", {"a": 1, "b": 2})
JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'

_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # As in JSON text; half surrogates are escaped there.
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_calls = st.builds(
    ToolCall, st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=8), _values)
)


@given(st.lists(_calls, max_size=4), st.sampled_from(get_args(Form)))
def test_calls_that_are_written_are_read_back(calls: list[ToolCall], form: Form) -> None:
    text = "\n".join(call_text(call, form) for call in calls)
    assert parse_tool_calls(text, form) == Parsed("", tuple(calls))


@pytest.mark.parametrize(
    ("text", "form", "parsed"),
    [
        ("It is 3.", "hermes", Parsed("It is 3.")),
        ("It is 3.", "llama", Parsed("It is 3.")),
        (f" So <tool_call>\n{JSON}\n</tool_call> ", "hermes", Parsed("So", (ADD,))),
        (
            f"<think>x</think><tool_call>{JSON}</tool_call><tool_call>{JSON}</tool_call>",
            "hermes",
            Parsed("<think>x</think>", (ADD, ADD)),
        ),
        (f" {LLAMA}\n", "llama", Parsed("", (ADD,))),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "llama", Parsed("", (ADD, ADD))),
        (f"It is {LLAMA}", "llama", Parsed(f"It is {LLAMA}")),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
            "hermes",
            Parsed("", (ADD,)),
        ),
        ('<tool_call>{"name": "now"}</tool_call>', "hermes", Parsed("", (ToolCall("now", {}),))),
    ],
)
def test_calls_are_taken_out_of_the_text(text: str, form: Form, parsed: Parsed) -> None:
    assert parse_tool_calls(text, form) == parsed


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("add(1, 2)", "is no JSON: Expecting value at character 0"),
        ('{"name": "add"', "is no JSON: Expecting ',' delimiter at character 14"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', 'has no "name", which must be the name of a tool'),
        ('{"name": 3}', 'has no "name", which must be the name of a tool'),
        ('{"name": "add", "arguments": [1]}', 'must have a JSON object as "arguments"'),
        ('{"name": "add", "arguments": {"a": NaN}}', "is damaged: NaN is no JSON"),
        ('{"name": "add", "arguments": {"a": [1e999]}}', "has a number that is too large"),
        ('{"name": "a", "arguments": {"a": ' + "9" * 5000 + "}}", "has a number with too many"),
        ("[" * 15_000, "is no JSON" if sys.version_info >= (3, 14) else "is nested too deeply"),
        (" " * 30_000, "has 30000 characters; at most 20000 are read"),
    ],
)
def test_what_is_wrong_with_a_call_is_a_sentence_for_the_model(body: str, problem: str) -> None:
    parsed = parse_tool_calls(f"So <tool_call>{body}</tool_call>!", "hermes")
    assert parsed.content == "So !"
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    assert parsed.problems[0].startswith(f"a tool call {problem}")


def test_a_call_that_is_not_closed_is_told() -> None:
    parsed = parse_tool_calls(f"<tool_call>{JSON}", "hermes")
    assert parsed == Parsed("", (), ("a tool call is not closed: </tool_call> is missing",))
    damaged = parse_tool_calls(f"{LLAMA}; {LLAMA[:-1]}", "llama")
    assert damaged.calls == (ADD,)
    assert damaged.problems[0].startswith("a tool call is no JSON: Expecting ',' delimiter")


@pytest.mark.parametrize("form", get_args(Form))
def test_no_more_calls_are_read_than_a_message_may_have(form: Form) -> None:
    parsed = parse_tool_calls(call_text(ADD, form) * 50, form)
    assert parsed.calls == (ADD,) * 32
    assert parsed.problems == ("only the first 32 tool calls of a message are read",)
