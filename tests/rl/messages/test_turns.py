"""Turns read by response templates, and turns that these cannot read."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.message import Message, Parsed, ToolCall, call_text, read_turn
from es_cookbook.rl.messages.message_env import Reply, Script, ToolEnv
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Action
from tests.chat_templates import CHATML, add, tokenizer_with

ADD = ToolCall("add", {"a": 1, "b": 2})
HERMES = call_text(ADD, "hermes")
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_CHATML = CHATML.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}\n"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>{% endfor %}\n</function>",
)
"""As of Qwen3-Coder."""


def response(calls: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A response template in the style of Qwen3's."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close_pattern": r"</think>\s*"},
            "tool_calls": {"close": "</tool_call>", "repeats": True, **calls},
            "content": {"close_pattern": r"<\|im_end\|>\s*"},
            **fields,
        },
    }


AS_JSON = response(
    {
        "open": "<tool_call>",
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
)
AS_XML = response(
    {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"
        },
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
)


def tokenizer(template: str, reads: object) -> PreTrainedTokenizerFast:
    made = tokenizer_with(template)
    if template == XML_CHATML:
        made.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.response_template = reads
    return made


def read(made: PreTrainedTokenizerFast, text: str, prompt: str = "") -> Parsed:
    prompt_T = made.encode(f"<|im_start|>assistant\n{prompt}", add_special_tokens=False)
    tokens_T = tuple(made.encode(f"{text}<|im_end|>", add_special_tokens=False))
    seen = AnswerTexts(made).text(tokens_T)
    return read_turn(made, "hermes", prompt_T, Action(tokens_T, seen, "stop"), schemas=[add.schema])


@pytest.mark.parametrize(("reads", "call"), [(AS_JSON, HERMES), (AS_XML, XML)], ids=["json", "xml"])
def test_a_response_template_reads_calls_and_leaves_out_thoughts(
    reads: dict[str, Any], call: str
) -> None:
    made = tokenizer(CHATML, reads)
    assert read(made, f"I add.{call}{call}") == Parsed("I add.", (ADD, ADD))
    assert read(made, f"<think>{call}?</think>\n\nI add.{call}") == Parsed("I add.", (ADD,))
    assert read(made, f"{call}?</think>It is 3.", "<think>\n").calls == ()
    assert read(made, f"{call}?", "<think>\n").calls == ()
    whole = "<think>It may be 4.</think>It is 3."
    assert read(made, whole) == Parsed(whole)


def test_a_damaged_call_takes_none_beside_it_and_is_told() -> None:
    made = tokenizer(CHATML, AS_JSON)
    found = read(made, f"{HERMES}<tool_call>{{oops}}</tool_call>")
    assert found.calls == (ADD,) and found.content == "<tool_call>{oops}</tool_call>"
    assert found.problems[0].startswith("a tool call is not JSON")
    strict = response(
        {"open": "<call>", "close": "</call>", "content": "json", "transform": "{content}"}
    )
    found = read(tokenizer(CHATML, strict), "<call>oops</call>")
    assert not found.calls and "cannot be read: json parser could not parse" in found.problems[0]
    found = read(tokenizer(CHATML, strict), '<call>{"name": "add", "arguments": [1]}</call>')
    assert found.problems == ('a tool call must have a JSON object as "arguments"',)


def test_calls_and_thoughts_between_special_tokens_are_found() -> None:
    made = tokenizer_with(CHATML)
    made.add_special_tokens({"extra_special_tokens": ["[THINK]", "[/THINK]"]})
    assert read(made, f"[THINK]{HERMES}[/THINK]It is 3.").calls == ()
    assert read(made, f"[THINK]hm[/THINK]{HERMES}").calls == (ADD,)
    special = response(
        {"open": "<|call|>", "close": "<|/call|>", "content": "json", "transform": "{content}"},
        content={},
    )
    made = tokenizer(CHATML, special)
    made.add_special_tokens({"extra_special_tokens": ["<|call|>", "<|/call|>"]})
    body = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    assert read(made, f"I add.<|call|>{body}<|/call|>") == Parsed("I add.", (ADD,))


class Sum(ToolEnv):
    async def initial_messages(self) -> list[Message]:
        return [Message("user", "1 + 2?")]

    async def answer(self, text: str) -> Reply:
        return Reply(float(text == "3"), done=True)


async def test_a_model_that_writes_calls_as_xml_uses_tools() -> None:
    with pytest.raises(ConfigError, match="in a form that is not read"):
        Chat(tokenizer(XML_CHATML, None), tools=[add])
    chat = Chat(tokenizer(XML_CHATML, AS_XML), ChatOptions(), tools=[add])
    trajectory = await run_rollout(Sum(chat), Script([XML, "3"], chat.tokenizer))
    metrics = trajectory.transitions[-1].metrics
    assert (trajectory.reward, metrics["tool_calls"], metrics["tool_errors"]) == (1.0, 1, 0)
