"""A harness for the library's own path: its chat program, run in this process.

The library would run the same program by `uv`, in a process of its own and with packages from a
network.
"""

import argparse
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils import compaction, core
from verifiers.v1.harnesses.utils.compaction import Compactor
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness"]

# The program is several modules in one file, so they do not import each other.
vars(core).update(
    bound_tool_message=compaction.bound_tool_message,
    call_mcp=call_mcp,
    compactable=compaction.compactable,
    estimated_tokens=compaction.estimated_tokens,
    is_context_overflow=compaction.is_context_overflow,
)
vars(compaction).update(chat=core.chat)


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        opened = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        async with opened as client, AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp(config, stack)
            compactor = Compactor(client, ctx.model, tools, False, None)
            arguments = argparse.Namespace(tool_interception_url="", api_key=secret)
            try:
                await core.run_chat_loop(arguments, compactor, messages, dispatch, servers, None)
            except Exception as error:  # As of a program that ended with a traceback.
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")
