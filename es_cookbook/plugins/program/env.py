"""An Env that is a program: a request is an observation, its response is the action.

The program starts with the first observation. Each of its requests to the endpoint becomes an
observation, in the order of arrival; the action is the response. When the program has ended, its
result is scored and ends the rollout. The sampler, its clocks, seeds and records are those of every
other Env.
"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Mapping

import anyio
from typing_extensions import override

from es_cookbook.common.errors import EnvError
from es_cookbook.plugins.endpoint.translator import Translator
from es_cookbook.plugins.program.calls import Call, Calls, End, ProgramEndpoint
from es_cookbook.plugins.program.command import Command
from es_cookbook.plugins.program.results import (
    MOST_BYTES,
    Result,
    graded_result,
    read_result,
    shown,
)
from es_cookbook.plugins.program.workers import Workers
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.base import Reward, RewardFunction
from es_cookbook.rl.timeouts import turn
from es_cookbook.rl.types import Action, Env, Observation, StepResult, Tokenizer

_translator = functools.lru_cache(16)(Translator)
"""Shared by all rollouts, because it tries the chat template and renders tools once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Settings that the problems of a dataset share.

    Attributes:
        command: the program.
        reward: scores the answer of a result; None takes the program's own reward.
        at_once: maximum number of rollouts whose program runs.
        rows_at_once: rows of a worker; 0 starts a process per rollout.
        max_turns: maximum number of answers per rollout.
        tokenizer: the model's.
        is_key_in_line: a process per rollout finds its key only on standard input.
    """

    command: Command
    reward: Reward | RewardFunction | None
    at_once: int
    rows_at_once: int
    max_turns: int
    tokenizer: Tokenizer
    is_key_in_line: bool = False


class ProgramEnv(Env):
    """One run of a program on a row.

    Metrics: those of the result or of the reward function; `turns`; `tool_calls`, the calls in the
    model's answers; and `turn_limit`, 1 if the program asked too often and has no reward.
    """

    def __init__(self, program: Program, row: Row) -> None:
        self._program, self._row = program, row
        self._num_turns = 0
        self._call: Call | None = None
        self._running: asyncio.Task[Result] | None = None
        self._sampling: anyio.CancelScope | None = None

    @override
    async def initial_observation(self) -> Observation:
        program = self._program
        self._calls = Calls(
            _translator(program.tokenizer, self.policy.context_length), program.max_turns
        )
        release = await turn("program", program.at_once)
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._is_over)
        self._running.add_done_callback(lambda _: release())
        found = await self._next()
        if isinstance(found, Observation):
            return found
        if found == "turn_limit":
            raise EnvError(
                f"the program asked for more than {program.max_turns} answers "
                "(dataset.max_turns) before it waited for one"
            )
        result = await self._running  # If it failed, this says how.
        raise EnvError(f"the program ended without a request to the model: {shown(result)[:200]}")

    @override
    async def act(self, observation: Observation) -> Action:
        assert self._call is not None and self._running is not None
        draw = self._call.draw
        try:
            params, seed = draw.params(self.policy.sampling), draw.seed_of(self._call.number)
            with anyio.CancelScope() as self._sampling:
                return await self.policy.sample(observation, params, seed)
            await self._running  # It has failed, and says how.
            raise EnvError("the program failed while the model answered it")
        except BaseException:
            self.end()
            raise
        finally:
            self._sampling = None

    @override
    async def step(self, action: Action) -> StepResult:
        assert self._call is not None and self._running is not None
        self._num_turns += 1
        if not self._call.answer.done():
            self._call.answer.set_result(action)
        found = await self._next()
        if isinstance(found, Observation):
            return StepResult(0.0, False, found)
        metrics = {
            "turns": float(self._num_turns),
            "tool_calls": float(self._calls.num_tool_calls),
            "turn_limit": float(found == "turn_limit"),
        }
        if found == "turn_limit":
            self.end()
            return StepResult(0.0, True, metrics=metrics)
        result = await self._running
        grade = await graded_result(self._program.reward, result, self._row)
        return dataclasses.replace(grade, metrics={**grade.metrics, **metrics})

    def end(self) -> None:
        """End the program if it still runs."""
        if self._running is not None:
            self._running.cancel()

    @override
    async def close(self) -> None:
        self.end()
        if self._running is not None:
            await asyncio.wait((self._running,))

    async def _next(self) -> Observation | End:
        """Wait for the next request; returns the reason if there is none."""
        try:
            found = await self._calls.next()
        except BaseException:
            self.end()
            raise
        if isinstance(found, str):
            return found
        self._call = found
        return found.observation

    async def _run(self) -> Result:
        """Return the result; the key is valid until the process has exited or has answered."""
        program, calls = self._program, self._calls
        endpoint = ProgramEndpoint.current()
        url = program.command.url(endpoint)
        with endpoint.open(calls):
            row = dict(self._row.fields)
            line = {"row": row, "base_url": url, "api_key": calls.key}
            if program.rows_at_once:
                workers = Workers.current(program.command, program.rows_at_once)
                return await workers.result(calls.key[:8], line, calls.close)
            if program.is_key_in_line:
                return await self._run_alone({}, line)
            return await self._run_alone({"OPENAI_BASE_URL": url, "OPENAI_API_KEY": calls.key}, row)

    async def _run_alone(self, variables: Mapping[str, str], line: Mapping[str, object]) -> Result:
        """Return the result of a process for this row alone, which gets this line."""
        output = bytearray()

        def hear(piece: bytes) -> bool:
            output.extend(piece)
            return len(output) <= MOST_BYTES

        process = await self._program.command.start(variables, hear)
        try:
            process.write(json.dumps(line).encode() + b"\n", close=True)
            await process.exited()
            self._calls.close()  # A process outside its session may still hold its output open.
            await process.wait()
        finally:
            await process.end()
        if len(output) > MOST_BYTES:
            raise EnvError(f"the program wrote more than {MOST_BYTES >> 20} MiB to its output")
        if process.exit_code != 0:
            raise EnvError(f"the program {process.how()}")
        return read_result(bytes(output))

    def _is_over(self, running: asyncio.Task[Result]) -> None:
        self._calls.program_ended()
        # The failure itself is raised where the result is awaited.
        has_failed = not running.cancelled() and running.exception() is not None
        if has_failed and self._sampling is not None:
            self._sampling.cancel()


class ProgramProblem(ProblemGroupBuilder):
    """A row."""

    @override
    async def prompt_length(self, context_length: int = 2**20) -> None:
        """Return None, because the program chooses the prompts."""
