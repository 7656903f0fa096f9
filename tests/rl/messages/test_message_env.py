"""Rollouts of Envs that talk: turns, limits, tools, and what a subclass gets wrong."""

import functools
from collections.abc import Sequence

import pytest
from typing_extensions import override

from es_cookbook.common.errors import DataError
from es_cookbook.rl.messages.chat import Chat, ChatOptions, Limit
from es_cookbook.rl.messages.message import Message
from es_cookbook.rl.messages.message_env import MessageEnv, Reply, Script, ToolEnv, told_gold
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Trajectory
from tests.chat_templates import CHATML, LLAMA, add, tokenizer_with

TOKENIZER = tokenizer_with(CHATML)


class Guess(MessageEnv):
    """Asks until it hears 7."""

    @override
    async def initial_messages(self) -> Sequence[Message]:
        return [Message("user", "Guess.")]

    @override
    async def reply(self, message: Message) -> Reply:
        right = message.content == "7"
        return Reply(
            reward=float(right),
            done=right,
            messages=[] if right else [Message("user", f"Not {message.content}.")],
            metrics={"correct": 1.0} if right else {},
        )

    @override
    def out_of_room(self, limit: Limit) -> Reply:
        return Reply(reward=-0.5, metrics={"correct": 0.0}, logs={"limit": limit})


class Sum(ToolEnv):
    """Wants 5, however it is found."""

    @override
    async def initial_messages(self) -> Sequence[Message]:
        return [Message("user", "2 + 3 = ?")]

    @override
    async def answer(self, text: str) -> Reply:
        return Reply(float(text == "5"), done=True)


async def rollout(env: MessageEnv, *texts: str, context_length: int = 4096) -> Trajectory:
    return await run_rollout(env, Script(texts, env.chat.tokenizer, context_length))


def guess(**options: object) -> Guess:
    return Guess(Chat(TOKENIZER, ChatOptions(**options)))  # type: ignore[arg-type]


async def test_a_rollout_goes_on_until_the_reply_is_done() -> None:
    trajectory = await rollout(guess(), "1", "2", "7")
    assert trajectory.reward == 1.0
    assert [str(TOKENIZER.decode(new_T)) for _, new_T in trajectory.seen] == [
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nNot 1.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nNot 2.<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [kind for kind, _ in trajectory.seen] == ["prompt", "added", "added"]
    assert trajectory.transitions[-1].metrics == {
        "correct": 1.0,
        "turns": 3.0,
        "turn_limit": 0.0,
        "context_limit": 0.0,
    }


async def test_a_rollout_ends_at_the_most_turns() -> None:
    trajectory = await rollout(guess(max_turns=2), "1", "2", "7")
    assert trajectory.reward == -0.5
    last = trajectory.transitions[-1]
    assert last.metrics == {"correct": 0.0, "turns": 2.0, "turn_limit": 1.0, "context_limit": 0.0}
    assert last.logs == {"limit": "turns"}


@pytest.mark.parametrize(("budget", "context_length"), [(60, 4096), (None, 60)])
async def test_a_rollout_ends_where_the_next_message_would_not_fit(
    budget: int | None, context_length: int
) -> None:
    env = guess(max_context=budget, max_turns=50)
    trajectory = await rollout(env, *"123456" * 9, context_length=context_length)
    last = trajectory.transitions[-1]
    assert last.metrics["context_limit"] == 1.0
    assert 1 < len(trajectory.transitions) < 10
    assert len(last.observation.tokens_T) + len(last.action.tokens_T) <= 60


@pytest.mark.parametrize("template", [CHATML, LLAMA])
async def test_calls_are_answered_with_their_results(template: str) -> None:
    chat = Chat(tokenizer_with(template), tools=[add])
    call = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
        "llama": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
    }[chat.form]
    trajectory = await rollout(Sum(chat), call, "5")
    assert trajectory.reward == 1.0
    added = str(chat.tokenizer.decode(trajectory.seen[1][1]))
    assert "\n5" in added
    counts = {name: trajectory.transitions[-1].metrics[name] for name in ("turns", "tool_calls")}
    assert counts == {"turns": 2.0, "tool_calls": 1.0}


async def test_calls_that_cannot_be_read_or_fail_are_told_to_the_model_and_counted() -> None:
    chat = Chat(TOKENIZER, tools=[add])
    calls = "<tool_call>add</tool_call>", '<tool_call>{"name": "sub"}</tool_call>'
    trajectory = await rollout(Sum(chat), calls[0], f"{calls[0]}{calls[1]}", "4")
    added = [str(TOKENIZER.decode(new_T)) for _, new_T in trajectory.seen]
    assert "error: a tool call is not JSON: Expecting value at character 0" in added[1]
    assert "error: there is no tool 'sub'; there are: add" in added[2]
    metrics = trajectory.transitions[-1].metrics
    assert metrics["malformed_calls"] == 2.0
    assert metrics["tool_calls"] == 1.0
    assert metrics["tool_errors"] == 1.0


SAID = '<tool_call>{{"name": "add", "arguments": {{"a": {}}}}}</tool_call>'.format


@pytest.mark.parametrize(
    ("opening", "turn", "sums"),
    [
        ("", f"<think>Why not {SAID(1)}?</think>{SAID(2)}", [3]),
        ("", f"Why not {SAID(1)}?</think>I do not.", []),
        ("<think>\n", f"Why not {SAID(1)}?", []),
        ("<think>\n", f"Why not {SAID(1)}?</think>{SAID(2)}", [3]),
    ],
)
async def test_a_call_in_a_thought_is_not_run(opening: str, turn: str, sums: list[int]) -> None:
    chat = Chat(tokenizer_with(CHATML + opening), ChatOptions(), tools=[add])
    trajectory = await rollout(Sum(chat), turn, *["</think>5"] * bool(sums))
    assert trajectory.transitions[-1].metrics["tool_calls"] == len(sums)
    results = str(chat.tokenizer.decode(trajectory.seen[-1][1])) if sums else ""
    assert all(f"\n{result}\n" in results for result in sums)


async def test_a_gold_answer_closes_the_thought_that_the_prompt_has_opened() -> None:
    class Said(Sum):
        @override
        async def answer(self, text: str) -> Reply:
            return Reply(float(spoken(text) == "5"), done=True)

    chat = Chat(tokenizer_with(f"{CHATML}<think>\n"), ChatOptions(), tools=[add])
    problem = ProblemGroupBuilder(functools.partial(Said, chat), "problem 1", "5")
    await problem.check(4096)
    told = await told_gold(problem.make_env(), "5", chat.tokenizer)
    assert told.transitions[0].action.text == "</think>\n\n5"
    assert (await rollout(Said(chat), "5")).reward == 0.0


def builder(gold: str | tuple[str, ...], **options: object) -> ProblemGroupBuilder:
    chat = Chat(TOKENIZER, ChatOptions(**options))  # type: ignore[arg-type]
    return ProblemGroupBuilder(functools.partial(Guess, chat), "problem 3", gold)


@pytest.mark.parametrize(
    ("gold", "options", "sentence"),
    [
        (("1", "2"), {}, "problem 3: the rollout was not done after all 2 turns of a script"),
        (("1", "7"), {"max_turns": 1}, "problem 3: its own solution earns -0.5 of 1: "),
        (("7",), {"max_context": 5}, "problem 3: a prompt of 1. tokens leaves no room in max_cont"),
    ],
)
async def test_gold_that_does_not_earn_its_reward_is_refused(
    gold: tuple[str, ...], options: dict[str, int], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        await builder(gold, **options).check(4096)
