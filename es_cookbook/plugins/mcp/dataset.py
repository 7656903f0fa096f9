"""Rows that a model answers in chats, with the tools of MCP servers.

    es-cookbook train tools="mcp:python server.py" data=rows.jsonl reward=number
        model_name=Qwen/Qwen2.5-0.5B-Instruct

A server is a command that speaks over its standard input and output, or the URL of one that already
runs on this machine. All rollouts share it, or each has its own. A command runs with your rights.
"""

import functools
import hashlib
from collections.abc import Iterator
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, EnvError, importing
from es_cookbook.common.machine.processes import command_of
from es_cookbook.common.trust import needs_trust
from es_cookbook.plugins.mcp.servers import Server, check_names, targets
from es_cookbook.rl.data.rows import Row, filled
from es_cookbook.rl.data.task import ScoredRows
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Datasets, Tokenizer


def _servers(rows: "ToolRows") -> str:
    """Return a digest of the servers, whose commands may contain spaces and commas."""
    return f"mcp:{hashlib.sha256(rows.tools.encode()).hexdigest()[:16]}"


@chz.chz
class ToolRows(ScoredRows):
    """Rows for chats with tools; the turn without calls is the answer."""

    tools: str = chz.field(
        doc="MCP servers whose tools the model may call: mcp:COMMAND, which no shell reads, "
        "or mcp:http://127.0.0.1:PORT/mcp; several with commas between them",
        metadata=needs_trust(_servers, "are servers that are started or called"),
    )
    chat: ChatOptions = chz.field(default_factory=ChatOptions, doc="turns and tokens per rollout")
    servers: Literal["shared", "rollout"] = chz.field(
        default="shared",
        doc="shared: rollouts share a server; rollout: each rollout that calls a tool starts one",
    )
    tool_timeout: float = chz.field(
        default=30.0, doc="seconds for a call, or for starting a server"
    )
    max_chars: int = chz.field(default=4000, doc="characters after which a result is cut")
    at_once: int = chz.field(
        default=64, doc="maximum number of pending calls, or of rollouts with separate servers"
    )

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "tool_timeout", above=0)
        check_range(self, "max_chars", "at_once", at_least=1)
        targets(self.tools)

    @override
    def check(self) -> None:
        super().check()
        for server in self._servers():
            if not server.is_url:
                command_of(server.target, "dataset.tools")

    def _servers(self) -> Iterator[Server]:
        for target in targets(self.tools):
            alone = self.servers == "rollout"
            yield Server(target, alone, self.tool_timeout, self.at_once, self.max_chars)

    @override
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        with importing("dataset.tools", "es-cookbook[mcp]", "mcp"):
            from es_cookbook.plugins.mcp.sessions import listed
        try:
            check_names([tool for server in self._servers() for tool in await listed(server)])
        except EnvError as error:
            raise ConfigError(f"dataset.tools: {error}") from error
        return await super().__call__(tokenizer)

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        from es_cookbook.plugins.mcp.env import RowEnv
        from es_cookbook.plugins.mcp.sessions import known_tools

        self.check_fields(row)
        tools = [tool for server in self._servers() for tool in known_tools(server)]
        chat, question = Chat(tokenizer, self.chat, tools), filled(self.prompt, row)
        return ProblemGroupBuilder(
            functools.partial(RowEnv, chat, question, self.reward, row, self.full_reward),
            row.where,
            gold=self.gold_of(row, self.full_reward),
        )
