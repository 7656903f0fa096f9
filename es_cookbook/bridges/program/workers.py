"""Programs that live on: each takes rows line by line, as many at once as it may have.

A line that a worker reads is a JSON object with `id`, `row`, `base_url` and `api_key`; the line
that it answers with is a result with the same `id`, which it may leave out if it has one row at a
time. Other lines are what it says to nobody.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping

from anyio.lowlevel import RunVar

from es_cookbook.bridges.program.enclosed import Command
from es_cookbook.bridges.program.processes import MARK, MOST_OUTPUT, end_marked
from es_cookbook.bridges.program.results import Result, objects_of
from es_cookbook.common.errors import EnvError


class _Worker:
    """One process, and the rows that it has."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[Result]] = {}
        self.is_retired = False
        self._begun = b""
        self._mark = secrets.token_hex(8)

    async def start(self, command: Command) -> None:
        """Start its process. Raises EnvError if that cannot be started."""
        self._process = await command.start({MARK: self._mark}, self._hear)
        self._living = asyncio.create_task(self._live())

    def take(self, key: str) -> None:
        """Have a row, and room for one less."""
        self.waiting[key] = asyncio.get_running_loop().create_future()

    async def result(self, key: str, line: Mapping[str, object]) -> Result:
        """The result of a row that it has.

        Raises:
            EnvError: The worker has ended.
        """
        try:
            self._process.write(json.dumps(line).encode() + b"\n")
            return await self.waiting[key]
        except asyncio.CancelledError:
            self.is_retired = True  # Who knows what it is still doing.
            raise
        finally:
            del self.waiting[key]
            if self.is_retired and not self.waiting:
                self._process.kill()

    async def _live(self) -> None:
        try:
            await self._process.wait()
        finally:
            self.is_retired = True
            self._process.kill()
            end_marked({self._mark})
            await self._process.end()  # Also when the event loop ends.
        for found in self.waiting.values():
            if not found.done():
                found.set_exception(EnvError(f"the worker {self._process.how()}"))

    def _hear(self, piece: bytes) -> bool:
        *lines, self._begun = (self._begun + piece).split(b"\n")
        for line in lines:
            for result in objects_of(line.decode(errors="replace")):
                self._take(result)
        return len(self._begun) <= MOST_OUTPUT

    def _take(self, result: Result) -> None:
        key = str(result.get("id", *self.waiting if len(self.waiting) == 1 else ("",)))
        found = self.waiting.get(key)
        if found is not None and not found.done():
            found.set_result({name: value for name, value in result.items() if name != "id"})


class Workers:
    """The workers of a program on an event loop; whoever asks bounds how many rows there are."""

    def __init__(self, command: Command, rows_at_once: int) -> None:
        self._command, self._rows_at_once = command, rows_at_once
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()

    @staticmethod
    def of_loop(command: Command, rows_at_once: int) -> "Workers":
        """Those of this event loop, with which they end."""
        known = _workers.get({})
        _workers.set(known)
        if (command, rows_at_once) not in known:
            known[command, rows_at_once] = Workers(command, rows_at_once)
        return known[command, rows_at_once]

    async def result(
        self, key: str, row: Mapping[str, object], environment: Mapping[str, str]
    ) -> Result:
        """The result of a row, whose rollout has a key.

        Raises:
            EnvError: No worker starts, or it ended.
        """
        line = {
            "id": key,
            "row": row,
            "base_url": environment["OPENAI_BASE_URL"],
            "api_key": environment["OPENAI_API_KEY"],
        }
        async with self._starting:
            worker = self._with_room()
            if worker is None:
                worker = _Worker()
                await worker.start(self._command)
                self._workers.append(worker)
            worker.take(key)
        return await worker.result(key, line)

    def _with_room(self) -> _Worker | None:
        self._workers = [worker for worker in self._workers if not worker.is_retired]
        room = [each for each in self._workers if len(each.waiting) < self._rows_at_once]
        return min(room, key=lambda each: len(each.waiting), default=None)


_workers: RunVar[dict[tuple[Command, int], Workers]] = RunVar("program workers")
