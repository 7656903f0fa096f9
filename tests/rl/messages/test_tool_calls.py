"""What is read as a call, and what is told to the model instead."""

import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.rl.messages.message import Form, Parsed, ToolCall, call_text, parse_tool_calls

ADD = ToolCall("add", {"a": 1, "b": 2})
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'

TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>")

_text = st.text(st.characters(exclude_characters="<>[]|◁▷"), max_size=8)  # No tags of thoughts.
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # As in JSON text; half surrogates are escaped there.
    | _text
    | st.lists(st.sampled_from([*TAGS, '"', "\\", "{", "; ", "é"]), max_size=4).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner),
    max_leaves=6,
)
_calls = st.builds(ToolCall, _text.filter(bool), st.dictionaries(_text, _values))


@given(st.lists(_calls, max_size=4), st.sampled_from(get_args(Form)))
def test_calls_that_are_written_are_read_back(calls: list[ToolCall], form: Form) -> None:
    text = "\n".join(call_text(call, form) for call in calls)
    assert parse_tool_calls(text, form) == Parsed("", tuple(calls))
    thought = parse_tool_calls(f"<think>\n{text}\n</think>\n{text}", form)
    assert thought.calls == tuple(calls) and not thought.problems


@given(_calls, _calls)
def test_a_call_that_is_cut_or_damaged_takes_none_beside_it(good: ToolCall, bad: ToolCall) -> None:
    written, cut = call_text(good, "hermes"), call_text(bad, "hermes").removesuffix("</tool_call>")
    for damaged in ("<tool_call>{oops}</tool_call>", "<tool_call>[1]</tool_call>"):
        for text in (f"{written} {damaged}", f"{damaged} {written}"):
            read = parse_tool_calls(text, "hermes")
            assert (read.content, read.calls, len(read.problems)) == (damaged, (good,), 1)
    for text in (f"{written}{cut}", f"{cut}{written}"):
        read = parse_tool_calls(text, "hermes")
        assert (read.content, read.calls) == (cut.strip(), (good,))
        assert read.problems == ("a tool call is not closed: </tool_call> is missing",)


@pytest.mark.parametrize(
    ("text", "form", "names"),
    [
        ("<think>{call}</think>{other}", "hermes", ["other"]),
        ("{call}</think>{other}", "hermes", ["other"]),
        ("{call}</think>It is 3.", "hermes", []),
        ("{call}<think>or</think>{other}", "hermes", ["call", "other"]),
        ("<think>{call}</think>\n\n{other}", "llama", ["other"]),
    ],
)
def test_a_call_that_is_thought_is_none(text: str, form: Form, names: list[str]) -> None:
    written = {name: call_text(ToolCall(name, {"a": "x"}), form) for name in ("call", "other")}
    read = parse_tool_calls(text.format(**written), form)
    assert [call.name for call in read.calls] == names
    assert not read.problems
    thoughts = [text.format(**written).partition("</think>")[0]] if "call" not in names else []
    assert all(thought.strip() in read.content for thought in thoughts)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("add(1, 2)", "is not JSON: Expecting value at character 0"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', 'has no "name", which must be the name of a tool'),
        ('{"name": "add", "arguments": [1]}', 'must have a JSON object as "arguments"'),
        ('{"name": "add", "arguments": {"a": NaN}}', "has a number that is not finite: NaN"),
        ("[" * 15_000, "is not JSON" if sys.version_info >= (3, 14) else "is nested too deeply"),
        ('{"name": "add", "id": 3}', 'may have "name" and "arguments" alone, found "id" as well'),
        ("x" * 30_000, "has 30000 characters; at most 20000 are read"),
    ],
)
def test_what_is_wrong_with_a_call_is_a_sentence_for_the_model(body: str, problem: str) -> None:
    parsed = parse_tool_calls(f"So <tool_call>{body}</tool_call>!", "hermes")
    assert parsed.content == f"So <tool_call>{body}</tool_call>!"
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
    assert parsed.problems[0].startswith(f"a tool call {problem}")


@pytest.mark.parametrize(
    "text", ['{"name": "Ann", "age": 4}', '{"answer": 4}', '{"parameters": {}}', "{}"]
)
def test_a_json_object_that_is_nothing_like_a_call_is_an_answer(text: str) -> None:
    assert parse_tool_calls(text, "llama") == Parsed(text)
    assert parse_tool_calls(f"So {LLAMA}", "llama") == Parsed(f"So {LLAMA}")
    assert parse_tool_calls(f"<think>So.</think>{text}", "llama").problems == ()
    assert len(parse_tool_calls(f"<|python_tag|>{text}", "llama").problems) == 1
    assert len(parse_tool_calls(f"{LLAMA}; {text}", "llama").problems) == 1
    near = '{"name": "add", "parameters": {}, "why": "x"}'
    assert len(parse_tool_calls(near, "llama").problems) == 1


def test_arguments_may_be_a_string_of_json() -> None:
    quoted = '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'
    text = f"So <tool_call>{quoted}</tool_call> "
    assert parse_tool_calls(text, "hermes") == Parsed("So", (ADD,))


def test_a_damaged_call_behind_another_is_told() -> None:
    damaged = parse_tool_calls(f"{LLAMA}; {LLAMA[:-1]}", "llama")
    assert damaged.calls == (ADD,)
    assert damaged.problems[0].startswith("a tool call is not JSON: Expecting ',' delimiter")


@pytest.mark.parametrize("form", get_args(Form))
def test_no_more_calls_are_read_than_a_message_may_have(form: Form) -> None:
    parsed = parse_tool_calls(call_text(ADD, form) * 50, form)
    assert parsed.calls == (ADD,) * 32
    assert parsed.problems == ("only the first 32 tool calls of a message are read",)
