"""Chats in which the model calls tools of MCP servers.

`MCPEnv` runs such calls, beside those of tools in Python; subclass it as `ToolEnv`.
`RowEnv` is a row of data: a question, and a reward of the answer.

A server that is slow, ends or answers with nonsense loses the rollout that called it, because that
is no evidence about the genome. Errors of a tool are results for the model.
"""

import asyncio
import dataclasses
from collections.abc import Sequence

from typing_extensions import override

from es_cookbook.plugins.mcp.servers import MCPTool, Server
from es_cookbook.plugins.mcp.sessions import Session, shared
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.messages.chat import Chat
from es_cookbook.rl.messages.message import Message, ToolCall
from es_cookbook.rl.messages.message_env import Reply, ToolEnv
from es_cookbook.rl.messages.tools import Result, unknown_tool
from es_cookbook.rl.problem_env import Grade
from es_cookbook.rl.rewards.base import RewardFunction, graded
from es_cookbook.rl.timeouts import in_turn, turn
from es_cookbook.rl.types import Action, Observation, StepResult


class MCPEnv(ToolEnv):
    """A chat whose tools may be those of MCP servers; its own servers end with the rollout."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._own: dict[Server, Session] = {}

    @override
    async def run(self, call: ToolCall) -> Result:
        by_name = {tool.name: tool for tool in self.chat.tools}
        tool = by_name.get(call.name)
        if tool is None:
            return unknown_tool(call.name, by_name)
        if not isinstance(tool, MCPTool):
            return await super().run(call)
        if tool.server.per_rollout:
            return await (await self._session(tool.server)).call(tool, call.arguments)
        async with in_turn("call of an MCP server", tool.server.at_once):
            return await shared(tool.server).call(tool, call.arguments)

    async def _session(self, server: Server) -> Session:
        """Return the rollout's own session; the first one waits for its turn."""
        if server not in self._own:
            first = not self._own
            release = await turn("rollout with MCP servers", server.at_once) if first else None
            session = self._own[server] = Session(server)
            if release is not None:
                session.living.add_done_callback(lambda _: release())
        return self._own[server]

    @override
    async def act(self, observation: Observation) -> Action:
        try:
            return await super().act(observation)
        except BaseException:
            self.end()
            raise

    @override
    async def step(self, action: Action) -> StepResult:
        try:
            result = await super().step(action)
        except BaseException:
            self.end()
            raise
        if result.done:
            self.end()
        return result

    def end(self) -> None:
        """End the servers that are the rollout's own."""
        for session in self._own.values():
            session.retire()

    @override
    async def close(self) -> None:
        self.end()
        if self._own:
            await asyncio.wait([session.living for session in self._own.values()])


class RowEnv(MCPEnv):
    """A question, tools, and an answer that is scored.

    A rollout that reaches a limit is scored as an empty answer.
    """

    def __init__(
        self, chat: Chat, question: str, reward: RewardFunction, row: Row, full_reward: float | None
    ) -> None:
        super().__init__(chat)
        self._question, self._reward, self._row = question, reward, row
        if full_reward is not None:
            self.full_reward = full_reward

    @override
    async def initial_messages(self) -> Sequence[Message]:
        return [Message("user", self._question)]

    @override
    async def answer(self, text: str) -> Reply:
        grade = await self._graded(text)
        return Reply(grade.reward, True, metrics=grade.metrics, logs=grade.logs)

    @override
    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        if not (result.metrics.get("turn_limit") or result.metrics.get("context_limit")):
            return result
        grade = await self._graded("")
        metrics = {**grade.metrics, **result.metrics}
        return dataclasses.replace(result, reward=grade.reward, metrics=metrics)

    async def _graded(self, text: str) -> Grade:
        return await graded(self._reward, text, self._row.fields, self._row.where)
