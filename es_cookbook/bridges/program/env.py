"""An Env that is a program: a request is an observation, its response is the action.

The program is started with the first observation that is asked for. Each of its requests to the
endpoint becomes an observation, in the order in which they come; the action is the response. When
the program has ended, its result is scored and ends the rollout. The sampler, its clocks, seeds and
records are those of every other Env.
"""

import asyncio
import dataclasses
import functools
import json

from typing_extensions import override

from es_cookbook.bridges.endpoint.translator import Translator
from es_cookbook.bridges.program.desk import Call, Calls, Desk
from es_cookbook.bridges.program.enclosed import Command
from es_cookbook.bridges.program.processes import MARK, MOST_OUTPUT, HasProcesses, ProcessProblem
from es_cookbook.bridges.program.results import Form, Result, graded_result, read_result, shown
from es_cookbook.bridges.program.workers import Workers
from es_cookbook.common.errors import EnvError
from es_cookbook.common.machine.scratch import scratch
from es_cookbook.rl.data.rows import Row
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
        max_turns: most requests of a rollout.
        tokenizer: of the model.
    """

    command: Command
    reward: Reward | RewardFunction | None
    form: Form
    at_once: int
    rows_at_once: int
    max_turns: int
    tokenizer: Tokenizer


class ProgramEnv(Env, HasProcesses):
    """One run of a program on a row.

    Metrics: those of the result or of the reward function; `turns`, `tool_calls`, for which the
    model asked; and as 0 or 1 `turn_limit`: then the rollout has no reward.
    """

    def __init__(self, program: Program, row: Row) -> None:
        self._program, self._row = program, row
        self._num_turns = 0
        self._call: Call | None = None
        self._running: asyncio.Task[Result] | None = None

    @override
    async def initial_observation(self) -> Observation:
        program, desk = self._program, Desk.of_loop()
        self._calls = Calls(_translator(program.tokenizer, self.policy.context_length))
        release = await turn("program", program.at_once)
        self._running = asyncio.create_task(self._run(desk))
        self._running.add_done_callback(self._is_over)
        self._running.add_done_callback(lambda _: release())
        found = await self._next()
        if found is None:
            result = await self._running  # If it failed, this says how.
            raise EnvError(f"the program ended without a request to the model: {shown(result)}")
        return found

    @override
    async def act(self, observation: Observation) -> Action:
        assert self._call is not None
        draw = self._call.draw
        try:
            params, seed = draw.params(self.policy.sampling), draw.seed_of(self._call.number)
            return await self.policy.sample(observation, params, seed)
        except BaseException:
            self.end()
            raise

    @override
    async def step(self, action: Action) -> StepResult:
        assert self._call is not None and self._running is not None
        self._num_turns += 1
        if not self._call.answer.done():
            self._call.answer.set_result(action)
        found = await self._next()
        if found is not None and self._num_turns < self._program.max_turns:
            return StepResult(0.0, False, found)
        metrics = {
            "turns": float(self._num_turns),
            "tool_calls": float(self._calls.num_tool_calls),
            "turn_limit": float(found is not None),
        }
        if found is not None:
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
    async def ended(self) -> set[str]:
        self.end()
        if self._running is None:
            return set()
        await asyncio.wait((self._running,))
        return set() if self._program.rows_at_once else {self._mark}

    @property
    def _mark(self) -> str:
        return self._calls.key[:8]

    async def _next(self) -> Observation | None:
        """What the program asks next; None once it has ended."""
        try:
            self._call = await self._calls.next()
        except BaseException:
            self.end()
            raise
        return None if self._call is None else self._call.observation

    async def _run(self, desk: Desk) -> Result:
        """The program's result; its key opens the desk for as long as it runs."""
        program, mark = self._program, self._mark
        url = program.command.url(desk)
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": self._calls.key, MARK: mark}
        with desk.open(self._calls):
            if not program.rows_at_once:
                return await _run_alone(program, self._row, variables)
            workers = Workers.of_loop(program.command, program.rows_at_once)
            return await workers.result(mark, self._row.fields, variables)

    def _is_over(self, running: asyncio.Task[Result]) -> None:
        self._calls.program_ended()
        if not running.cancelled():
            running.exception()  # It is raised where somebody waits for the result, if anywhere.


class ProgramProblem(ProcessProblem):
    """A row."""

    @override
    async def prompt_length(self, context_length: int = 2**20) -> None:
        """None: what the model is asked is the program's affair."""


async def _run_alone(program: Program, row: Row, variables: dict[str, str]) -> Result:
    """The result of a process for this row alone."""
    with scratch() as folder:
        line, result = json.dumps(dict(row.fields)).encode() + b"\n", folder / "result.json"
        (folder / "row.json").write_bytes(line)
        result.touch()
        files = {ROW_FILE: str(folder / "row.json"), RESULT_FILE: str(result)}
        output = bytearray()

        def hear(piece: bytes) -> bool:
            output.extend(piece)
            return len(output) <= MOST_OUTPUT

        process = await program.command.start({**variables, **files}, hear, folder, result)
        try:
            process.write(line, close=True)
            await process.wait()
        finally:
            await process.end()
        if len(output) > MOST_OUTPUT:
            raise EnvError(f"the program wrote more than {MOST_OUTPUT >> 20} MiB to its output")
        if process.exit_code != 0:
            raise EnvError(f"the program {process.how()}")
        return read_result(
            bytes(output), result.read_bytes() if result.is_file() else b"", program.form
        )
