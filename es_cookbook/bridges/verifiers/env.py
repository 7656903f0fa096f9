"""One attempt at a task: the library's environment asks, and a rollout's steps answer.

In the library the environment has control: its coroutine `run(task, agents)` asks an agent for
turns, and is over when it returns. In a rollout the policy is asked step by step. So the coroutine
runs as a task beside the rollout, and they hand each other observations and actions; only one of
them ever has something to do. When the rollout is cancelled, so is the task, and when the group is
closed the task has ended.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import cast

import verifiers.v1 as vf
from typing_extensions import override

from es_cookbook.bridges.verifiers.agent import Agent, as_message, opening
from es_cookbook.bridges.verifiers.library import Source, Task, said
from es_cookbook.common.errors import EnvError, ESCookbookError
from es_cookbook.rl.messages.chat import Chat
from es_cookbook.rl.problem_env import digest_of
from es_cookbook.rl.types import (
    Action,
    Env,
    EnvGroup,
    EnvGroupBuilder,
    Observation,
    StepResult,
    check_metrics,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TaskBuilder(EnvGroupBuilder):
    """One task of a taskset.

    Attributes:
        name: what error messages call it, for example "gsm8k, task 3".
        chat: how messages become tokens; of the whole data set.
    """

    source: Source
    task: Task
    name: str
    chat: Chat

    @override
    async def make_envs(self, num_envs: int) -> EnvGroup:
        return _Group([_TaskEnv(self) for _ in range(num_envs)])

    @property
    def content(self) -> str:
        """What the task holds, without its place in the taskset."""
        return self.task.data.model_dump_json(exclude={"idx"})

    @property
    @override
    def digests(self) -> tuple[int, ...]:
        return (digest_of(self.content),)

    def prompt_length(self) -> int:
        """Tokens of the task's own prompt; 0 where its environment opens the chat."""
        messages = opening(self.task, self.chat.options.system)
        if self.task.data.prompt is None:
            return 0
        return len(self.chat.renderer.prompt([as_message(message) for message in messages]))


class _TaskEnv(Env):
    """One attempt at a task.

    Metrics: those of the taskset, each of its rewards without its weight as `reward_<name>`, and
    the counts of `es_cookbook.bridges.verifiers.agent.Agent`.
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

    async def close(self) -> None:
        """End the environment's coroutine, if it is not over."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.wait([self._playing])

    async def _next(self) -> StepResult:
        """What the environment asks next, or its end."""
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
        """Run the environment; whatever it raises is raised in the rollout's step."""
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
        """As the library's `Env.run_episode`, without its servers."""
        builder, task = self._builder, self._builder.task
        env = builder.source.env
        agent = Agent(env, builder.chat, self.policy.context_length, self._ask)
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


class _Group(EnvGroup):
    """Ends what its Envs have begun."""

    def __init__(self, envs: Sequence[_TaskEnv]) -> None:
        super().__init__(envs)
        self._task_envs = envs

    @override
    async def close(self) -> None:
        for env in self._task_envs:
            await env.close()
