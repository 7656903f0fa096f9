"""One attempt at a task: the library's environment asks, and a rollout's steps answer.

In the library the environment has control: its coroutine `run(task, agents)` asks an agent for
turns and ends the episode by returning. In a rollout the policy is asked step by step. So the
coroutine runs as a task beside the rollout, and they exchange observations and actions; only one of
them is active at a time. Cancelling the rollout cancels the task, and closing the group awaits it.

The agent is a policy, in place of a harness. `_Agent` and `_Interaction` have the methods
that the library's environments call. A turn is the loop of the library's `null` harness: the model
answers; while it calls tools, these run and it answers again. Stop conditions, limits, the message
graph and scoring are the library's own objects, used in the order in which its server of model
calls uses them. Only the model call itself is replaced by our own tokens: a chat's tokens are what
was shown and what was sampled, never tokenized again.

Left out: retries, deadlines of stages, and concurrent turns of one chat.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias, cast

import verifiers.v1 as vf
from typing_extensions import override
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects import parse_message
from verifiers.v1.graph import prepare_turn
from verifiers.v1.session import RolloutLimits, RolloutSession, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import invoke

from es_cookbook.common.errors import EnvError, ESCookbookError
from es_cookbook.plugins.verifiers.library import Source, Task, refuse_unplayable, said, text_of
from es_cookbook.plugins.verifiers.tools import Tools
from es_cookbook.rl.messages.chat import Chat, TokenStream
from es_cookbook.rl.messages.message import Message, Parsed, ToolCall, as_json, read_turn
from es_cookbook.rl.messages.reading import JsonObject, read_call
from es_cookbook.rl.messages.thoughts import opened_thought, spoken, whole_turn
from es_cookbook.rl.problem_env import check_prompt, digest_of
from es_cookbook.rl.rollouts import check_metrics
from es_cookbook.rl.types import Action, Env, EnvGroup, EnvGroupBuilder, Observation, StepResult

Trace: TypeAlias = vf.Trace[Any, Any, Any]
Ask: TypeAlias = Callable[[Observation], Awaitable[Action]]

_COUNTS = ("turns", "turn_limit", "context_limit", "tool_calls", "tool_errors", "malformed_calls")
MODEL = "es_cookbook"
"""Name of the model in a trace."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskBuilder(EnvGroupBuilder):
    """One task of a taskset.

    Attributes:
        name: name in error messages, for example "gsm8k, task 3".
        chat: renders messages as tokens; shared by the whole data set.
    """

    source: Source
    task: Task
    name: str
    chat: Chat

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return EnvGroup([_TaskEnv(self) for _ in range(num_envs)])

    @property
    def content(self) -> str:
        """The task's data, without its index in the taskset."""
        return self.task.data.model_dump_json(exclude={"idx"})

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return (digest_of(self.content),)

    @override
    async def check(self, context_length: int) -> None:
        """Check the task's own prompt, unless its environment opens the chat.

        There is no gold answer that could be graded: the library's `validate` wants a runtime.
        """
        if self.task.data.prompt is not None:
            messages = _opening(self.task, self.chat.options.system)
            prompt_T = self.chat.renderer.prompt([_as_message(each) for each in messages])
            check_prompt(self.name, len(prompt_T), context_length)


class _TaskEnv(Env):
    """One attempt at a task.

    Metrics: those of the taskset, each of its rewards without its weight as `reward_<name>`, and
    the counts of `_Agent`.
    """

    def __init__(self, builder: TaskBuilder) -> None:
        self._builder = builder
        self._asked: asyncio.Queue[Observation | StepResult | BaseException] = asyncio.Queue()
        self._acted: asyncio.Queue[Action] = asyncio.Queue()
        self._playing: asyncio.Task[None] | None = None

    @override
    async def initial_observation(self) -> Observation:
        self._playing = asyncio.create_task(self._play())
        found = await self._next()
        if found.next_observation is None:
            raise EnvError(f"{self._builder.name} was over before the model's first turn")
        return found.next_observation

    @override
    async def step(self, action: Action) -> StepResult:
        self._acted.put_nowait(action)
        return await self._next()

    @override
    async def close(self) -> None:
        """End the environment's coroutine, if it is not over."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.wait([self._playing])

    async def _next(self) -> StepResult:
        """Return the next observation, or the end of the episode."""
        try:
            found = await self._asked.get()
        except BaseException:
            if self._playing is not None:
                self._playing.cancel()
            raise
        if isinstance(found, BaseException):
            raise found
        return StepResult(0.0, False, found) if isinstance(found, Observation) else found

    async def _play(self) -> None:
        """Run the environment; its errors are raised in the rollout's step."""
        try:
            ended = await self._episode()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            ended = error
            if isinstance(error, Exception) and not isinstance(error, ESCookbookError):
                ended = EnvError(f"{self._builder.name}: the taskset's code failed: {said(error)}")
                ended.__cause__ = error
        self._asked.put_nowait(ended)

    async def _episode(self) -> StepResult:
        """Run an episode as the library's `Env.run_episode` does, without its servers."""
        builder, task = self._builder, self._builder.task
        env = builder.source.env
        agent = _Agent(env, builder.chat, self.policy.context_length, self._ask)
        agents = vf.Agents(env.config, lambda name, spec: cast(vf.Agent, agent))
        await env.setup(agents)
        await env.run(task, agents)
        if len(agent.traces) != 1:
            raise EnvError(
                f"{builder.name}: {type(env).__name__} ran its agent {len(agent.traces)} times, "
                "and only environments that run it once are bridged"
            )
        (trace,) = agent.traces
        episode = vf.Episode(
            env=vf.EnvInfo(id=env.config.env_id), task=trace.task, traces=agent.traces
        )
        await env.finalize(task, episode)
        scores = {f"reward_{key}": reward.score for key, reward in trace.rewards.items() if reward}
        metrics = {key: value for key, value in trace.metrics.items() if value is not None} | scores
        check_metrics(f"{builder.name}: its taskset must give", metrics)
        return StepResult(
            float(trace.reward),
            done=True,
            metrics={**agent.counts, **metrics},
            logs={"stop": trace.stop_condition or ""},
        )

    async def _ask(self, observation: Observation) -> Action:
        self._asked.put_nowait(observation)
        return await self._acted.get()


class _Agent:
    """The one agent of an episode.

    Args:
        env: the Env whose agent it is.
        chat: renders messages as tokens.
        context_length: context length of the engine.
        ask: returns the action at an observation.

    Attributes:
        traces: traces of the runs that are over.
        counts: numbers of turns, tool calls and limits, over all runs.
    """

    trainable = True

    def __init__(self, env: vf.Env[Any], chat: Chat, context_length: int, ask: Ask) -> None:
        self.env = env
        self.chat = chat
        self.context_length = context_length
        self.ask = ask
        self.traces: list[Trace] = []
        self.counts = dict.fromkeys(_COUNTS, 0.0)

    async def run(self, task: Task, **borrowed: object) -> Trace:
        """Run one turn on the task's own prompt, scored."""
        async with self.interaction(task, **borrowed) as interaction:
            await interaction.turn()
            if interaction.trace.stop_condition is None:
                interaction.trace.stop("agent_completed")
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Task, **borrowed: object) -> "AsyncGenerator[_Interaction]":
        """Hold a chat with the environment as the user; it is scored on exit."""
        if given := [name for name, value in borrowed.items() if value]:
            raise EnvError(
                f"{type(self.env).__name__} lends its agent {given[0]!r}, which the bridge has not"
            )
        refuse_unplayable(task, f"a task of {type(self.env).__name__}")
        trace = vf.Trace(
            task=vf.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        tools = Tools()
        try:
            await _call_hook(task.setup, trace)
            await tools.open(self.env, task)
            yield _Interaction(self, task, trace, tools)
            if trace.stop_condition is None:
                trace.stop("user_closed")
        finally:
            await tools.close()
        await _call_hook(task.finalize, trace)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self.traces.append(trace)


async def _call_hook(method: Callable[..., Awaitable[None]], trace: Trace) -> None:
    """Call a task's own `setup` or `finalize`; the library's empty ones want a runtime."""
    if getattr(method, "__func__", None) not in (vf.Task.setup, vf.Task.finalize):
        await invoke(method, {"trace": trace})


class _Interaction:
    """One chat with the agent, as the library's environments hold it.

    Attributes:
        trace: its trace up to now.
    """

    def __init__(self, agent: _Agent, task: Task, trace: Trace, tools: Tools) -> None:
        self.trace = trace
        self._agent = agent
        self._tools = tools
        self._session = _session(task, trace, agent.chat.options.max_turns)
        self._messages = _opening(task, agent.chat.options.system)
        self._over = False
        self._stream: TokenStream | None = None
        self._said: tuple[Action, int] | None = None
        """The model's last turn, and how many messages there were after it."""

    async def turn(
        self, message: "str | Sequence[vf.Message | dict[str, Any]] | None" = None
    ) -> vf.Segment:
        """Send a message to the agent; returns its answer, including calls of tools."""
        if self._over:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        self._messages += _typed(message)
        first = len(self.trace.nodes)
        if self.trace.stop_condition is None:
            while await self._model_turn():
                pass
        new = self.trace.nodes[first:]
        sampled = [i for i, node in enumerate(new) if node.sampled]
        if not sampled:
            self._over = True
            return vf.Segment(messages=[], terminated=True)
        said = [
            node.message
            for node in new[sampled[0] :]
            if node.sampled or isinstance(node.message, vf.ToolMessage)
        ]
        return vf.Segment(messages=said)

    async def _model_turn(self) -> bool:
        """Take one answer and run its tools; return whether the chat continues."""
        trace, session, counts = self.trace, self._session, self._agent.counts
        if await session.refused() is not None:
            counts["turn_limit"] = float(trace.stop_condition == "max_turns")
            return False
        request = vf.Request(messages=self._messages, tools=self._tools.tools or None)
        request, _, stopped = await session.rewrite_request(request)
        turn = prepare_turn(trace, request.messages, request.tools)
        observation = None if stopped else self._observation()
        if observation is None:
            turn.commit_prompt()
            counts["context_limit"] = float(stopped is None)
            trace.stop(stopped or "max_total_tokens")
            return False
        began = time.time()
        action = await self._agent.ask(observation)
        counts["turns"] += 1
        parsed = self._parsed(observation, action)
        response, _, stopped = await session.rewrite_response(
            _response(trace, observation, action, parsed)
        )
        node = turn.commit(response)
        self._messages.append(response.message)
        self._said = action, len(self._messages)
        span = vf.TimeSpan(start=began, end=time.time())
        trace.calls.append(
            vf.ModelCall(
                node=node,
                model=MODEL,
                finish_reason=response.finish_reason,
                usage=response.usage,
                time=span,
            )
        )
        stopped = stopped or await session.gate_tool_calls(node)
        if stopped is not None:
            trace.stop(stopped)
            return False
        return await self._answered(response.message, parsed)

    def _observation(self) -> Observation | None:
        """Return the model's next observation; None if the context is full."""
        chat = self._agent.chat
        if self._stream is None or self._said is None:
            messages = [_as_message(message) for message in self._messages]
            self._stream = chat.begin(messages, self._agent.context_length)
        else:
            action, before = self._said
            added = [_as_message(message) for message in self._messages[before:]]
            if self._stream.add(action, added) is not None:
                return None
        return self._stream.observation

    def _parsed(self, observation: Observation, action: Action) -> Parsed:
        """Return a turn's calls, and its text without thoughts."""
        chat, parsed = self._agent.chat, Parsed(action.text)
        opened = opened_thought(chat.tokenizer, observation.tokens_T)
        if self._tools.tools:
            schemas = [tool.schema for tool in chat.tools]
            parsed = read_turn(
                chat.tokenizer, chat.form, observation.tokens_T, action, schemas=schemas
            )
        return dataclasses.replace(parsed, content=spoken(whole_turn(parsed.content, opened)))

    async def _answered(self, message: vf.AssistantMessage, parsed: Parsed) -> bool:
        """Run the calls of a turn, and return whether there were any."""
        counts = self._agent.counts
        for call in message.tool_calls or ():
            result = await self._tools.call(call, self.trace)
            counts["tool_calls"] += 1
            counts["tool_errors"] += result.failed
            self._messages.append(
                vf.ToolMessage(tool_call_id=call.id, content=result.text, name=call.name)
            )
        for problem in parsed.problems:
            counts["malformed_calls"] += 1
            self._messages.append(vf.UserMessage(content=f"error: {problem}"))
        return bool(message.tool_calls or parsed.problems)


def _session(task: Task, trace: Trace, max_turns: int) -> RolloutSession:
    """Return the library's object for stop conditions and limits."""
    stops = [(hook_boundary(stop, allow_trace=True), stop) for stop in task.hooks("stop")]
    return RolloutSession(
        # Only needed for model calls over HTTP.
        ctx=cast(ModelContext, None),
        trace=trace,
        limits=RolloutLimits(max_turns=max_turns),
        trace_stops=[stop for kind, stop in stops if kind is vf.Trace],
        request_stops=[stop for kind, stop in stops if kind is vf.Request],
        response_stops=[stop for kind, stop in stops if kind is vf.Response],
    )


def _opening(task: Task, system: str) -> "list[vf.Message]":
    """Return the system message and the prompt, as the library's `null` harness does."""
    prompt = _typed(task.data.prompt)
    text = task.data.system_prompt
    if text is None and not any(isinstance(message, vf.SystemMessage) for message in prompt):
        text = system
    return [vf.SystemMessage(content=text), *prompt] if text else prompt


def _typed(message: "str | Sequence[vf.Message | dict[str, Any]] | None") -> "list[vf.Message]":
    if message is None:
        return []
    if isinstance(message, str):
        return [vf.UserMessage(content=message)]
    return [parse_message(each) if isinstance(each, dict) else each for each in message]


def _as_message(message: vf.Message) -> Message:
    """Convert a message of the library.

    Raises:
        DataError: It is not text.
    """
    text = text_of(message, "a message to the model")
    if isinstance(message, vf.ToolMessage):
        return Message("tool", text, name=message.name)
    if isinstance(message, vf.AssistantMessage):
        return Message("assistant", text, tuple(map(_as_call, message.tool_calls or ())))
    return Message(message.role, text)


def _as_call(call: vf.ToolCall) -> ToolCall:
    given = {"name": call.name, "arguments": call.arguments}
    return read_call(JsonObject(given, "a message to the model: tool_call"))


def _response(
    trace: Trace, observation: Observation, action: Action, parsed: Parsed
) -> vf.Response:
    """Return the model's turn in the library's form."""
    number = trace.num_turns
    calls = [
        vf.ToolCall(id=f"call_{number}_{i}", name=call.name, arguments=as_json(call.arguments))
        for i, call in enumerate(parsed.calls)
    ]
    ended = "tool_calls" if calls else "stop"
    return vf.Response(
        id=f"{trace.id}_{number}",
        created=int(time.time()),
        model=MODEL,
        message=vf.AssistantMessage(content=parsed.content, tool_calls=calls or None),
        finish_reason="length" if action.stop_reason == "length" else ended,
        usage=vf.Usage(
            prompt_tokens=len(observation.tokens_T), completion_tokens=len(action.tokens_T)
        ),
        tokens=vf.TurnTokens(
            prompt_ids=list(observation.tokens_T),
            completion_ids=list(action.tokens_T),
            completion_logprobs=list(action.logprobs_T or ()),
        ),
    )
