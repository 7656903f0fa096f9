"""Envs that talk: subclass `MessageEnv`, or `ToolEnv` where the model may call tools.

    class Guess(MessageEnv):
        async def initial_messages(self):
            return [Message("user", "Guess a number from 1 to 9.")]

        async def reply(self, message):
            right = message.content.strip() == self.answer
            return Reply(float(right), done=right, messages=[Message("user", "No. Again!")])

A rollout ends when a reply is `done`, after `ChatOptions.max_turns` turns, or when the next message
would leave no room in the context. Metrics of every rollout: `turns`, and as 0 or 1 `turn_limit`
and `context_limit`; of a `ToolEnv` also the counts `tool_calls`, `tool_errors` (calls that failed)
and `malformed_calls` (that could not be read).
"""

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence

from typing_extensions import override

from es_cookbook.common.errors import EnvError
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.messages.chat import Chat, Limit
from es_cookbook.rl.messages.encoder import inside
from es_cookbook.rl.messages.message import Message, Parsed, ToolCall, parse_tool_calls, read_turn
from es_cookbook.rl.messages.thoughts import closed_turn, opened_thought, whole_turn
from es_cookbook.rl.messages.tools import Result, run_call
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import (
    Action,
    Env,
    Logs,
    Metrics,
    Observation,
    Policy,
    ProvableEnv,
    SamplingParams,
    StepResult,
    Tokenizer,
    Trajectory,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """An Env's answer to a turn.

    Attributes:
        reward: finite; a rollout's reward is the sum over its turns.
        done: True ends the rollout; then there are no messages.
        messages: messages that the model sees before its next turn.
        metrics: numbers, averaged over the turns that report them.
        logs: text shown with sampled rollouts.
    """

    reward: float = 0.0
    done: bool = False
    messages: Sequence[Message] = ()
    metrics: Metrics = dataclasses.field(default_factory=dict[str, float])
    logs: Logs = dataclasses.field(default_factory=dict[str, str])


class MessageEnv(ProvableEnv):
    """An Env that exchanges chat messages with the model.

    Attributes:
        chat: options of the chat; the same for all Envs of a data set.
        counts: counters that are reported as metrics at the end of the rollout.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.counts: Counter[str] = Counter()
        self._action: Action | None = None

    @abstractmethod
    async def initial_messages(self) -> Sequence[Message]:
        """Return the messages before the model's first turn."""

    @abstractmethod
    async def reply(self, message: Message) -> Reply:
        """Return the reply to a turn of the model."""

    def out_of_room(self, limit: Limit) -> Reply:
        """Return the last reply of a rollout that reached a limit; by default without reward.

        Report here the metrics that a rollout has at its end, such as `correct`: their means are
        over the rollouts that report them.
        """
        return Reply(done=True)

    @override
    async def initial_observation(self) -> Observation:
        messages = await self.initial_messages()
        self._stream = self.chat.begin(messages, self.policy.context_length)
        return self._stream.observation

    @override
    async def step(self, action: Action) -> StepResult:
        opened = opened_thought(self.chat.tokenizer, self._stream.tokens_T)
        self._action, message = action, Message("assistant", whole_turn(action.text, opened))
        reply = await self.reply(message)
        limit = None if reply.done else self._stream.add(action, reply.messages)
        if not reply.done and limit is None:
            observation = self._stream.observation
            return StepResult(reply.reward, False, observation, reply.metrics, reply.logs)
        ended = Reply() if limit is None else self.out_of_room(limit)
        counts = {
            "turns": float(self._stream.num_turns + reply.done),
            "turn_limit": float(limit == "turns"),
            "context_limit": float(limit == "context"),
            **{name: float(count) for name, count in self.counts.items()},
        }
        return StepResult(
            reply.reward + ended.reward,
            done=True,
            metrics={**reply.metrics, **ended.metrics, **counts},
            logs={**reply.logs, **ended.logs},
        )

    @override
    async def prompt_length(self, context_length: int) -> int:
        self.policy = Script((), self.chat.tokenizer, context_length)
        return await super().prompt_length(context_length)

    @override
    async def try_gold(self, gold: str | tuple[str, ...], context_length: int) -> tuple[float, str]:
        return (await told_gold(self, gold, self.chat.tokenizer, context_length)).reward, ""


class ToolEnv(MessageEnv):
    """A chat in which the model may call the tools of its `Chat`.

    A turn with calls is answered with their results; those of one turn run one after the other, in
    the order written. Calls inside thoughts do not count. A turn without any goes to
    `answer`. Calls that cannot be read, and those that fail, are told to the model.
    """

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self.counts.update(dict.fromkeys(("tool_calls", "tool_errors", "malformed_calls"), 0))

    @abstractmethod
    async def answer(self, text: str) -> Reply:
        """Answer a turn without calls: usually grade it and end.

        Args:
            text: all of it; `es_cookbook.rl.messages.thoughts.spoken` gives what it says.
        """

    async def run(self, call: ToolCall) -> Result:
        """Run a call; override where what a tool does depends on the rollout."""
        return await run_call(call, self.chat.tools)

    @override
    async def reply(self, message: Message) -> Reply:
        parsed = self._read(message.content)
        if not parsed.calls and not parsed.problems:
            return await self.answer(parsed.content)
        results: list[Message] = []
        for call in parsed.calls:
            result = await self.run(call)
            self.counts["tool_calls"] += 1
            self.counts["tool_errors"] += result.failed
            results.append(Message("tool", result.text, name=call.name))
        for problem in parsed.problems:
            self.counts["malformed_calls"] += 1
            results.append(Message("tool", f"error: {problem}", name="error"))
        return Reply(messages=results)

    def _read(self, text: str) -> Parsed:
        if self._action is None:  # `reply` was called without a rollout.
            return parse_tool_calls(text, self.chat.form)
        given = self.chat.tokenizer, self.chat.form, self._stream.tokens_T, self._action
        return read_turn(*given, text=text, schemas=[tool.schema for tool in self.chat.tools])


class Script(Policy):
    """A policy that says one given text per turn, for tests and to check gold answers.

    The tokenizer's end-of-sequence token, if any, follows each text.

    Args:
        texts: answers in order; a single text is that of the first turn.
        tokenizer: turns them into tokens.
        context_length: context length of the engine that it stands in for.
        closes_thoughts: close the thought that a prompt has opened before each text.

    Attributes:
        seen: the observations up to now.
    """

    def __init__(
        self,
        texts: str | Sequence[str],
        tokenizer: Tokenizer,
        context_length: int = 2**20,
        *,
        closes_thoughts: bool = False,
    ) -> None:
        self.seen: list[Observation] = []
        self._texts = (texts,) if isinstance(texts, str) else texts
        self._tokenizer, self._said = tokenizer, AnswerTexts(tokenizer)
        self._context_length = context_length
        self._closes_thoughts = closes_thoughts

    @override
    async def sample(
        self,
        observation: Observation,
        params: SamplingParams | None = None,
        seed: int | None = None,
    ) -> Action:
        """Return the next text, cut where no room is left.

        Raises:
            EnvError: There are no more.
        """
        turn = len(self.seen)
        if turn == len(self._texts):
            raise EnvError(f"the rollout was not done after all {turn} turns of a script")
        self.seen.append(observation)
        text = self._texts[turn]
        if self._closes_thoughts:
            text = closed_turn(text, opened_thought(self._tokenizer, observation.tokens_T))
        tokens_T = inside(self._tokenizer, text)
        most = self._context_length - len(observation.tokens_T)
        most = min(most, observation.max_tokens or most)
        is_cut, end = len(tokens_T) > most, self._tokenizer.eos_token_id
        tokens_T = (*tokens_T, end)[:most] if isinstance(end, int) else tokens_T[:most]
        reason = "length" if is_cut else "stop"
        return Action(tokens_T, self._said.text(tokens_T), reason, (0.0,) * len(tokens_T))

    @override
    async def logprobs(self, prompt_T: Sequence[int], continuation_T: Sequence[int]) -> list[float]:
        return [0.0] * len(continuation_T)

    @property
    @override
    def sampling(self) -> SamplingParams:
        return SamplingParams()

    @property
    @override
    def context_length(self) -> int:
        return self._context_length

    @property
    @override
    def centre(self) -> "Script":
        return self

    @property
    @override
    def base(self) -> "Script":
        return self


async def told_gold(
    env: Env, gold: str | tuple[str, ...], tokenizer: Tokenizer, context_length: int = 2**20
) -> Trajectory:
    """Run the Env with a policy that knows the gold answer, and return the rollout.

    Raises:
        EnvError: The Env broke its contract.
    """
    return await run_rollout(env, Script(gold, tokenizer, context_length, closes_thoughts=True))
