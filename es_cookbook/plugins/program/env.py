"""An Env that is a program: a request is an observation, its response is the action.

The program is started with the first observation that is asked for. Each of its requests to the
endpoint becomes an observation, in the order in which they come; the action is the response. When
the program has ended, its result is scored and ends the rollout. The sampler, its clocks, seeds and
records are those of every other Env.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import anyio
from typing_extensions import override

from es_cookbook.common.errors import EnvError
from es_cookbook.common.machine.scratch import scratch
from es_cookbook.plugins.endpoint.translator import Translator
from es_cookbook.plugins.program.desk import Call, Calls, Desk, Over
from es_cookbook.plugins.program.enclosed import Command
from es_cookbook.plugins.program.results import (
    MOST_BYTES,
    Form,
    Result,
    graded_result,
    read_result,
    result_in,
    shown,
)
from es_cookbook.plugins.program.workers import Workers
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.base import Reward, RewardFunction
from es_cookbook.rl.timeouts import turn
from es_cookbook.rl.types import Action, Env, Observation, StepResult, Tokenizer

ROW_FILE, RESULT_FILE = "ES_COOKBOOK_ROW", "ES_COOKBOOK_RESULT"
"""Variables that name the file with the row, and that in which a result may be left."""

_translator = functools.lru_cache(16)(Translator)
"""One for all rollouts: it has tried the chat template, and has tools rendered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What the problems of a data set share.

    Attributes:
        command: the program.
        reward: scores a result; None takes the program's own.
        form: how it writes its result.
        at_once: most rollouts whose program runs.
        rows_at_once: of a worker; 0 starts a process for each rollout.
        max_turns: most answers that a rollout asks for.
        tokenizer: of the model.
        is_key_in_line: a process for a rollout finds its key on standard input alone.
    """

    command: Command
    reward: Reward | RewardFunction | None
    form: Form
    at_once: int
    rows_at_once: int
    max_turns: int
    tokenizer: Tokenizer
    is_key_in_line: bool = False


class ProgramEnv(Env):
    """One run of a program on a row.

    Metrics: those of the result or of the reward function; `turns`, `tool_calls`, for which the
    model asked; and as 0 or 1 `turn_limit`: then the rollout has no reward.
    """

    def __init__(self, program: Program, row: Row) -> None:
        self._program, self._row = program, row
        self._num_turns = 0
        self._call: Call | None = None
        self._running: asyncio.Task[Result] | None = None
        self._sampling: anyio.CancelScope | None = None

    @override
    async def initial_observation(self) -> Observation:
        program, desk = self._program, Desk.of_loop()
        self._calls = Calls(
            _translator(program.tokenizer, self.policy.context_length), program.max_turns
        )
        release = await turn("program", program.at_once)
        self._running = asyncio.create_task(self._run(desk))
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
        grade = await graded_result(self._program.reward, result, self._calls.chat, self._row)
        return dataclasses.replace(grade, metrics={**grade.metrics, **metrics})

    def end(self) -> None:
        """End the program, if it still runs."""
        if self._running is not None:
            self._running.cancel()

    @override
    async def close(self) -> None:
        self.end()
        if self._running is not None:
            await asyncio.wait((self._running,))

    async def _next(self) -> Observation | Over:
        """What the program asks next, or why it asks nothing more."""
        try:
            found = await self._calls.next()
        except BaseException:
            self.end()
            raise
        if isinstance(found, str):
            return found
        self._call = found
        return found.observation

    async def _run(self, desk: Desk) -> Result:
        """The program's result; its key opens the desk until it has exited, or the row has one."""
        program, key = self._program, self._calls.key
        line = {
            "row": dict(self._row.fields),
            "base_url": program.command.url(desk),
            "api_key": key,
        }
        opened = desk.open(self._calls)
        if not program.rows_at_once:
            return await _run_alone(program, line, opened)
        with opened:
            workers = Workers.of_loop(program.command, program.rows_at_once)
            name = key[:8]
            return await workers.result(name, {"id": name, **line}, self._calls.close)

    def _is_over(self, running: asyncio.Task[Result]) -> None:
        self._calls.program_ended()
        # What it failed of is raised where somebody waits for the result, if anywhere.
        has_failed = not running.cancelled() and running.exception() is not None
        if has_failed and self._sampling is not None:
            self._sampling.cancel()


class ProgramProblem(ProblemGroupBuilder):
    """A row."""

    @override
    async def prompt_length(self, context_length: int = 2**20) -> None:
        """None: what the model is asked is the program's affair."""


async def _run_alone(
    program: Program,
    line: Mapping[str, Any],
    opened: contextlib.AbstractContextManager[None],
) -> Result:
    """The result of a process for this row alone, which is answered inside `opened`."""
    with scratch() as folder, contextlib.ExitStack() as answered:
        row, result = folder / "row.json", folder / "result.json"
        row.write_bytes(_written(line["row"]))
        result.touch()
        variables = {ROW_FILE: str(row), RESULT_FILE: str(result)}
        if not program.is_key_in_line:
            variables |= {"OPENAI_BASE_URL": line["base_url"], "OPENAI_API_KEY": line["api_key"]}
            line = line["row"]
        output = bytearray()

        def hear(piece: bytes) -> bool:
            output.extend(piece)
            return len(output) <= MOST_BYTES

        answered.enter_context(opened)
        process = await program.command.start(variables, hear, folder, result)
        try:
            process.write(_written(line), close=True)
            await process.exited()
            answered.close()  # Something outside its session may hold its output open.
            await process.wait()
        finally:
            await process.end()
        if len(output) > MOST_BYTES:
            raise EnvError(f"the program wrote more than {MOST_BYTES >> 20} MiB to its output")
        if process.exit_code != 0:
            raise EnvError(f"the program {process.how()}")
        return read_result(bytes(output), result_in(result), program.form)


def _written(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"
