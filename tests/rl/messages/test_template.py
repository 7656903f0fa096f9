"""Random chats by many templates: what a message says is in the prompt, or the chat is refused."""

import json
import random
from collections.abc import Sequence

import pytest

from es_cookbook.common.errors import ModelError
from es_cookbook.rl.messages.chat import Renderer
from es_cookbook.rl.messages.message import Message, ToolCall
from es_cookbook.rl.messages.template import ChatTemplate
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.types import Action
from tests.chat_templates import CHATML, GEMMA, LLAMA, MISTRAL, THINKING, tokenizer_with
from tests.rl.messages.test_renderer import real_template

FIRST_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ 'System: ' + messages[0].content + '\n' }}{% endif %}
{%- for message in messages if message.role in ('user', 'assistant') %}
{{- message.role + ': ' + message.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
"""Shows a system message in the first place alone."""
LAST = "{{ messages[-1].content }}"
"""Shows the last message alone."""
TEMPLATES = {
    **{"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "thinking": THINKING},
    **{"first system": FIRST_SYSTEM, "last": LAST},
    **{
        name: real_template(name)
        for name in ("cohere", "gemma3", "llama3_2", "phi3", "qwen2_5", "qwen3", "lfm2")
    },
}
WORDS = ("alpha", "7", "two words", "a\nb", "", " x ", "<|im_end|>", "{{ x }}", "user", "é😀")
ROLES = ("system", "system", "user", "user", "user", "assistant", "assistant", "tool")
FORGETFUL = ("last", "cohere", "llama3_2")
"""Leave out more than can be helped: earlier messages, empty ones, all but the first call."""


def drawn(rng: random.Random) -> list[Message]:
    """A chat of one to six messages; each says a word that no other message says."""
    messages: list[Message] = []
    for place in range(rng.randint(1, 6)):
        role = rng.choice(ROLES) if place or rng.random() < 0.5 else "user"
        word = rng.choice(WORDS)
        content = f"{word} c{place}ontent" if word else ""
        calls = ()
        if role == "assistant" and rng.random() < 0.3:
            calls = (ToolCall(f"t{place}ool", {"x": f"a{place}rgument"}),)
        reasoning = f"t{place}hought" if role == "assistant" and rng.random() < 0.1 else ""
        messages.append(Message(role, content, calls, reasoning=reasoning))
    return messages


def missing(messages: Sequence[Message], text: str) -> list[str]:
    said = [message.content for message in messages]
    said += [message.reasoning for message in messages[-1:]]
    said += [call.name for message in messages for call in message.tool_calls]
    said += [str(call.arguments["x"]) for message in messages for call in message.tool_calls]
    shown = " ".join(text.split())
    return [
        each
        for each in said
        if " ".join(each.split()) not in shown
        and json.dumps(each, ensure_ascii=False)[1:-1] not in shown  # Llama's results of tools.
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_messages_say_is_in_the_prompt_or_the_chat_is_refused(name: str) -> None:
    template = ChatTemplate(tokenizer_with(TEMPLATES[name]))
    rng = random.Random(name)
    for _ in range(150):
        messages = drawn(rng)
        try:
            tokens_T = template.tokens(messages)
        except ModelError as error:
            first = next((each.role for each in messages if each.role != "system"), "user")
            said = str(error)
            assert "is thought" in said or first != "user" or name in FORGETFUL, (messages, said)
            continue
        assert not missing(messages, str(template.tokenizer.decode(list(tokens_T)))), messages


@pytest.mark.parametrize(
    ("template", "chat", "text"),
    [
        (GEMMA, "system:A,user:B", "user\nA\n\nB<end_of_turn>"),
        (GEMMA, "system:A,system:B,user:C,user:D", "user\nA\n\nB\n\nC\n\nD<end_of_turn>"),
        (GEMMA, "user:A,assistant:B,tool:C", "user\nC<end_of_turn>\n<start_of_turn>model"),
        (MISTRAL, "user:A,assistant:B,system:C,user:D", "[INST] C\n\nD [/INST]"),
        (FIRST_SYSTEM, "system:A,system:B,user:C", "System: A\n\nB\nuser: C\n"),
        (FIRST_SYSTEM, "user:A,system:B", "user: A\nuser: B\nassistant:"),
        (CHATML, "user:A,user:B", "user\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>"),
    ],
)
def test_a_chat_is_changed_no_more_than_the_template_needs(
    template: str, chat: str, text: str
) -> None:
    messages = [Message(*each.split(":")) for each in chat.split(",")]  # type: ignore[arg-type]
    assert text in ChatTemplate(tokenizer_with(template)).text(messages)


def test_a_message_that_no_change_makes_a_template_show_is_refused() -> None:
    with pytest.raises(ModelError, match="the content of a message of the role user: 'A'"):
        ChatTemplate(tokenizer_with(LAST)).text([Message("user", "A"), Message("assistant", "B")])


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("name", ["chatml", "llama", "gemma", "qwen2_5"])
def test_the_name_of_a_control_token_in_a_message_is_text(name: str, role: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    ends = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    said = f"say {tokenizer.eos_token}\n<bos>, then"
    renderer = Renderer(tokenizer)
    chats = (
        [Message(role, said), Message("user", "x")],
        [Message(role, "it"), Message("user", "x")],
    )
    hostile, plain = (renderer.prompt(chat) for chat in chats)
    assert hostile.count(ends) == plain.count(ends)
    assert hostile.count(int(tokenizer.bos_token_id)) == plain.count(int(tokenizer.bos_token_id))  # type: ignore[arg-type]
    assert said in str(tokenizer.decode(list(hostile)))
    turn = Action((7,), "", "length")
    added, quiet = (renderer.added(turn, chat) for chat in chats)
    assert added.count(ends) == quiet.count(ends)


def test_names_of_control_tokens_in_tools_and_calls_are_text() -> None:
    tokenizer = tokenizer_with(real_template("qwen2_5"))
    end = str(tokenizer.eos_token)
    described = {"name": "look", "description": f"look {end}", "parameters": {}}
    tool = ToolSchema("look", {"type": "function", "function": described})
    call = ToolCall("look", {"at": [f"x{end}"]})
    renderer = Renderer(tokenizer, [tool])
    chat = [Message("user", "x"), Message("assistant", f"hm {end}", (call,))]
    chat += [Message("tool", end, name=f"look{end}"), Message("user", end)]
    quiet = [Message("user", "x"), Message("assistant", "hm", (ToolCall("look", {}),))]
    quiet += [Message("tool", "y", name="look"), Message("user", "y")]
    ends = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    assert renderer.prompt(chat).count(ends) == renderer.prompt(quiet).count(ends)


TWO_ENDS = CHATML.replace("<|im_end|>", "<|im_end|><bos>")
RETURNS = CHATML.replace(
    "{%- endfor %}<|im_end|>\n",
    "{%- endfor %}{{ '<bos>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}\n",
)
NO_END = CHATML.replace("{%- endfor %}<|im_end|>\n", "{%- endfor %}\n")


@pytest.mark.parametrize(
    ("template", "ended", "added"),
    [
        (TWO_ENDS, "<|im_end|>", "<bos>\n<|im_start|>user"),
        (TWO_ENDS, "<bos>", "\n<|im_start|>user"),
        (RETURNS, "<bos>", "\n<|im_start|>user"),
        (RETURNS, "<|im_end|>", "\n<|im_start|>user"),
        (NO_END, "<|im_end|>", "<|im_start|>user"),
    ],
)
def test_the_end_of_a_turn_is_there_once(template: str, ended: str, added: str) -> None:
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = template
    turn = Action((7, int(tokenizer.convert_tokens_to_ids(ended))), "", "stop")  # type: ignore[arg-type]
    found = Renderer(tokenizer).added(turn, [Message("user", "x")])
    assert str(tokenizer.decode(list(found))).startswith(added)


@pytest.mark.parametrize(
    ("name", "said", "text"),
    [
        ("glm4moe", "yes", "\n<think></think>\nyes"),
        ("deepseek_r1_distill", "<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"),
        ("nemotron_3_nano", "yes", "</think>yes"),
        ("gptoss", "yes", "<|channel|>final<|message|>yes"),
    ],
)
def test_a_turn_goes_on_from_where_the_prompt_ends(name: str, said: str, text: str) -> None:
    tokenizer = tokenizer_with(real_template(name))
    turn = ChatTemplate(tokenizer).turn(Message("assistant", said))
    assert str(tokenizer.decode(list(turn))).startswith(text)
