"""The tokens of a chat: the template's own, and the model's as they were sampled."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.rl.messages.chat import Chat, ChatOptions, Renderer
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.types import Action, Tokenizer
from tests.chat_templates import CHATML, GEMMA, LLAMA, MISTRAL, add, tokenizer_with

FAITHFUL = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA}
SILENT = CHATML.replace("message.role == 'tool'", "false").replace(
    "message.role != 'system'", "message.role in ('user', 'assistant')"
)
"""Leaves out results of tools."""


def user(text: str) -> Message:
    return Message("user", text)


def sampled(tokenizer: Tokenizer, text: str, end: str | None = None) -> Action:
    """A turn of one-letter tokens, which the tokenizer itself would never write."""
    tokens_T = tuple(token for letter in text for token in tokenizer.encode(letter))
    assert len(tokens_T) > len(tokenizer.encode(text))
    if end is None:
        return Action(tokens_T, text, "length")
    return Action((*tokens_T, int(tokenizer.convert_tokens_to_ids(end))), text, "stop")  # type: ignore[arg-type]


def rendered(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    return str(
        tokenizer.apply_chat_template(
            [message.as_dict() for message in messages],  # type: ignore[misc]
            tokenize=False,
            add_generation_prompt=True,
        )
    )


@pytest.mark.parametrize("name", FAITHFUL)
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut"])
def test_over_five_turns_the_tokens_are_those_sampled_and_the_text_the_templates(
    name: str, ends: bool
) -> None:
    tokenizer = tokenizer_with(FAITHFUL[name])
    stream = Chat(tokenizer).begin([user("What is the message?")], 4096)
    messages = [user("What is the message?")]
    assert list(stream.tokens_T) == tokenizer.encode(
        rendered(tokenizer, messages), add_special_tokens=False
    )
    for turn in range(5):
        before_T = stream.observation.tokens_T
        # Mistral's template has the blank before a turn in the turn.
        text = f"{' ' * (name == 'mistral')}template content {turn}"
        end = tokenizer.eos_token if ends else None
        action = sampled(tokenizer, text, str(end) if end else None)
        reply = user(f"message {turn}")
        assert stream.add(action, [reply]) is None
        after_T = stream.observation.tokens_T
        assert after_T[: len(before_T) + len(action.tokens_T)] == before_T + action.tokens_T
        messages += [Message("assistant", text.strip()), reply]
        whole = rendered(tokenizer, messages)
        assert tokenizer.decode(after_T) == whole
        assert list(after_T) != tokenizer.encode(whole, add_special_tokens=False)


def test_the_template_ends_a_turn_that_a_stop_string_has_ended() -> None:
    tokenizer = tokenizer_with(CHATML)
    stopped = Action(tuple(tokenizer.encode("so</tool_call>")), "so</tool_call>", "stop")
    added = Renderer(tokenizer).added(stopped, [user("x")])
    assert str(tokenizer.decode(added)).startswith("<|im_end|>\n<|im_start|>user\nx<|im_end|>")


@pytest.mark.parametrize(
    ("template", "with_tools", "sentence"),
    [
        (None, False, "has no chat template, which chats need"),
        ("hello", False, "leaves out messages after a turn"),
        (CHATML.replace("{{ tool | tojson }}", ""), True, "does not show the tool 'add': set"),
        (SILENT, True, "leaves out results of tools: set tools_in=system"),
    ],
)
def test_templates_that_cannot_be_used_are_refused_in_a_sentence(
    template: str | None, with_tools: bool, sentence: str
) -> None:
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=sentence):
        Renderer(tokenizer, [add] if with_tools else [])


@pytest.mark.parametrize("template", [GEMMA, MISTRAL])
def test_tools_that_a_template_does_not_know_are_told_in_the_system_message(template: str) -> None:
    tokenizer = tokenizer_with(template)
    chat = Chat(tokenizer, ChatOptions(tools_in="system", system="Be brief."), [add])
    stream = chat.begin([user("Hi.")], 4096)
    prompt = str(tokenizer.decode(stream.tokens_T))
    assert "Be brief.\n\nYou may call these functions:" in prompt
    assert '"name": "add"' in prompt
    action = sampled(tokenizer, " content", str(tokenizer.eos_token))
    stream.add(action, [Message("tool", "3"), Message("tool", "4")])
    added = str(tokenizer.decode(stream.tokens_T)).removeprefix(prompt)
    assert "3\n4" in added


FOLLOWED = (
    *("cohere", "gemma", "gemma3", "llama3", "llama3_1", "phi3", "qwen2_5"),
    *("qwen3_instruct_2507", "lfm2"),
)
REWRITING = ("qwen3", "qwen3_5_think", "deepseekv3", "glm4moe", "gptoss")


def real_template(name: str) -> str:
    """TRL has the templates of real models."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", FOLLOWED)
def test_templates_of_real_models_are_followed(name: str) -> None:
    tokenizer = tokenizer_with(real_template(name))
    messages = [user("What is the message?")]
    stream = Chat(tokenizer).begin(messages, 4096)
    for turn in range(5):
        action = sampled(tokenizer, f"template content {turn}")
        assert stream.add(action, [user("Again.")]) is None
        messages += [Message("assistant", action.text), user("Again.")]
    assert tokenizer.decode(stream.tokens_T) == rendered(tokenizer, messages)


@pytest.mark.parametrize("name", REWRITING)
def test_turns_stay_as_sampled_with_templates_of_real_models_that_rewrite_them(name: str) -> None:
    tokenizer = tokenizer_with(real_template(name))
    stream = Chat(tokenizer).begin([user("Hi.")], 4096)
    action = sampled(tokenizer, "template content")
    before = str(tokenizer.decode(stream.tokens_T + action.tokens_T))
    assert stream.add(action, [user("Again.")]) is None
    added = str(tokenizer.decode(stream.tokens_T)).removeprefix(before)
    assert "Again." in added
    assert "Hi." not in added


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen2_5", "hermes"), ("qwen3_instruct_2507", "hermes"), ("llama3_1", "llama")],
)
def test_the_form_of_calls_is_read_off_the_template(name: str, form: str) -> None:
    assert Chat(tokenizer_with(real_template(name)), tools=[add]).form == form


def test_a_template_that_writes_calls_in_another_form_is_refused() -> None:
    tokenizer = tokenizer_with(real_template("lfm2_2_5"))
    with pytest.raises(ConfigError, match="in a form that is not read: set form=hermes or"):
        Chat(tokenizer, tools=[add])
    assert Chat(tokenizer, ChatOptions(form="llama"), [add]).form == "llama"
