"""Programs that live on: each takes rows line by line, several at once if it may.

A worker reads lines that are JSON objects with `id`, `row`, `base_url` and `api_key`, and answers
each with a line that is a result with the same `id`. Other lines are ignored.

Output is limited per row. A worker that writes more, or a result that is too large, is killed.
"""

import asyncio
import json
from collections.abc import Callable, Mapping

from anyio.lowlevel import RunVar

from es_cookbook.common.errors import EnvError
from es_cookbook.plugins.program.command import Command
from es_cookbook.plugins.program.results import MOST_BYTES, MOST_LINES, Result, lines_of, objects_of

_EACH_LINE = MOST_BYTES // MOST_LINES
"""Bytes added for each line that begins like a result."""


class _Worker:
    """One process and its rows."""

    def __init__(self, rows_at_once: int) -> None:
        self.waiting: dict[str, asyncio.Future[Result]] = {}
        self._closing: dict[str, Callable[[], None]] = {}
        self.is_retired = False
        self._rows_at_once = rows_at_once
        self._begun = bytearray()
        self._room = MOST_BYTES
        self._why = ""

    async def start(self, command: Command) -> None:
        """Start its process. Raises EnvError if that cannot be started."""
        self._process = await command.start({}, self._hear)
        self._living = asyncio.create_task(self._live())

    def take(self, key: str, close: Callable[[], None]) -> None:
        """Accept a row; `close` is called if the process exits."""
        self._closing[key] = close
        self.waiting[key] = asyncio.get_running_loop().create_future()
        self._room = min(self._room + MOST_BYTES, self._rows_at_once * MOST_BYTES)

    async def result(self, key: str, line: Mapping[str, object]) -> Result:
        """Wait for the result of one of its rows.

        Raises:
            EnvError: The worker has ended.
        """
        try:
            self._process.write(json.dumps(line).encode() + b"\n")
            return await self.waiting[key]
        except asyncio.CancelledError:
            self.is_retired = True  # It may still work on this row.
            raise
        finally:
            del self.waiting[key], self._closing[key]
            if self.is_retired and not self.waiting:
                self._process.kill()

    async def _live(self) -> None:
        try:
            await self._process.exited()
            for close in self._closing.values():
                close()
            await self._process.wait()
        finally:
            self.is_retired = True
            await self._process.end()  # Also when the event loop ends.
        for found in self.waiting.values():
            if not found.done():
                found.set_exception(EnvError(f"the worker {self._why or self._process.how()}"))

    def _hear(self, piece: bytes) -> bool:
        self._room -= len(piece)
        self._begun += piece
        if self._room >= 0 and b"\n" in piece:
            whole = bytes(self._begun[: self._begun.rindex(b"\n")])
            del self._begun[: len(whole)]
            try:
                self._read(whole)
            except EnvError as error:
                self._why = f"was ended: {error}"
        if self._room < 0:
            self._why = f"was ended: it wrote more than {MOST_BYTES >> 20} MiB for each row"
        if self._why:
            self.is_retired = True
        return not self._why

    def _read(self, whole: bytes) -> None:
        """Read the results in whole lines. Raises EnvError if one is too large or has no id."""
        for line in lines_of(whole):
            self._room -= _EACH_LINE
            for result in objects_of(line):
                if "id" not in result and {"answer", "reward"} & result.keys():
                    raise EnvError("it gave a result without an id")
                waiting = self.waiting.get(str(result.get("id")))
                if waiting is not None and not waiting.done():
                    waiting.set_result({k: v for k, v in result.items() if k != "id"})


class Workers:
    """The workers of a program on an event loop; callers limit the number of rows."""

    def __init__(self, command: Command, rows_at_once: int) -> None:
        self._command, self._rows_at_once = command, rows_at_once
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()

    @staticmethod
    def current(command: Command, rows_at_once: int) -> "Workers":
        """Return the workers of this event loop, which end with it."""
        known = _workers.get({})
        _workers.set(known)
        if (command, rows_at_once) not in known:
            known[command, rows_at_once] = Workers(command, rows_at_once)
        return known[command, rows_at_once]

    async def result(
        self, key: str, row: Mapping[str, object], close: Callable[[], None]
    ) -> Result:
        """Wait for the result of a row.

        Args:
            key: names the row.
            row: the fields that the worker gets.
            close: called if the worker exits.

        Raises:
            EnvError: No worker starts, or the worker ended.
        """
        async with self._starting:
            worker = self._with_room()
            if worker is None:
                worker = _Worker(self._rows_at_once)
                await worker.start(self._command)
                self._workers.append(worker)
            worker.take(key, close)
        return await worker.result(key, {"id": key, **row})

    def _with_room(self) -> _Worker | None:
        self._workers = [worker for worker in self._workers if not worker.is_retired]
        room = [each for each in self._workers if len(each.waiting) < self._rows_at_once]
        return min(room, key=lambda each: len(each.waiting), default=None)


_workers: RunVar[dict[tuple[Command, int], Workers]] = RunVar("program workers")
