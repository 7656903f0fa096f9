"""Programs that live on: each takes rows line by line, as many at once as it may have.

A line that a worker reads is a JSON object with `id`, `row`, `base_url` and `api_key`; the line
that it answers with is a result with the same `id`, which it may leave out if it has one row at a
time. Other lines are what it says to nobody.

It may write so much for each row that it is given. One that writes more is killed, and so is one
that gives a result without an `id` when it has no row: the next row would get it.
"""

import asyncio
import json
from collections.abc import Callable, Mapping

from anyio.lowlevel import RunVar

from es_cookbook.common.errors import EnvError
from es_cookbook.plugins.program.enclosed import Command
from es_cookbook.plugins.program.results import (
    MOST_BYTES,
    MOST_LINES,
    Result,
    lines_of,
    objects_of,
)

_EACH_LINE = MOST_BYTES // MOST_LINES
"""Bytes as which a line counts, beside its own, that begins as a result does."""


class _Worker:
    """One process, and the rows that it has."""

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
        """Have a row, and room for one less; its key is closed when the process has exited."""
        self._closing[key] = close
        self.waiting[key] = asyncio.get_running_loop().create_future()
        self._room = min(self._room + MOST_BYTES, self._rows_at_once * MOST_BYTES)

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
        """Take the results of whole lines. Raises EnvError if it cannot go on after one."""
        for line in lines_of(whole):
            self._room -= _EACH_LINE
            for result in objects_of(line):
                self._take(result)

    def _take(self, result: Result) -> None:
        left = [key for key, found in self.waiting.items() if not found.done()]
        if "id" not in result and self._rows_at_once == 1 and not left:
            raise EnvError("it gave a result without an id when it had no row")
        key = str(result.get("id", left[0] if len(left) == 1 else ""))
        if key in left:
            own = {name: value for name, value in result.items() if name != "id"}
            self.waiting[key].set_result(own)


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
        self, key: str, line: Mapping[str, object], close: Callable[[], None]
    ) -> Result:
        """The result of a row, which a worker is given in this line.

        Args:
            key: of the row.
            line: for the worker.
            close: closes what the row's key opens, if the worker exits.

        Raises:
            EnvError: No worker starts, or it ended.
        """
        async with self._starting:
            worker = self._with_room()
            if worker is None:
                worker = _Worker(self._rows_at_once)
                await worker.start(self._command)
                self._workers.append(worker)
            worker.take(key, close)
        return await worker.result(key, line)

    def _with_room(self) -> _Worker | None:
        self._workers = [worker for worker in self._workers if not worker.is_retired]
        room = [each for each in self._workers if len(each.waiting) < self._rows_at_once]
        return min(room, key=lambda each: len(each.waiting), default=None)


_workers: RunVar[dict[tuple[Command, int], Workers]] = RunVar("program workers")
