"""The cost of attacks on a server, on loopback alone.

    python -m benchmarks.attacks                 # all parts
    python -m benchmarks.attacks requests connections

- `requests`: a chat model (`make chat-model`) is served by `es-cookbook serve`. Each attack is sent
  to it by a separate process (`benchmarks/attackers.py`), while another client asks for the list
  of models every few milliseconds: its longest wait is how long the attack kept the event loop.
  Memory is the server's peak above what it had before; where an attack is answered, it is that of
  the engine for its tokens.
- `connections`: 1,600 that send nothing, or a part of a request: how long they stay open, and how
  long the other client waits meanwhile, relative to before.
- `bodies`: 10,000 requests of all three kinds, changed somewhere (`tests/plugins/endpoint`): 500s
  and logged errors.
"""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import logging.handlers
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import attackers
from benchmarks.harness import CHAT_MODEL, Row, report, row
from tests.plugins.endpoint import test_requests as by_bodies

PAUSE = 0.005
"""Seconds between the requests of the client that is not to notice."""
HALF_OPEN, CHANGED = 1600, 10_000
"""Connections; bodies."""
LONGEST, MOST_MEMORY, CLOSED_AFTER, SLOWER = 0.25, 100.0, 10.0, 2.0


class Bystander:
    """A client that continuously sends small requests, in a separate thread."""

    def __init__(self, server: attackers.Server) -> None:
        self._server = server
        self._waits: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def waits(self) -> list[float]:
        """Return seconds of its requests since the last call of this; -1 for one that failed."""
        found, self._waits = self._waits, []
        return found

    def _ask(self) -> None:
        headers = {"Authorization": f"Bearer {self._server.key}"}
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=120)
        while not self._is_over.wait(PAUSE):
            began = time.perf_counter()
            try:
                connection.request("GET", "/v1/models", headers=headers)
                reply = connection.getresponse()
                reply.read()
                is_right = reply.status == 200
            except (OSError, http.client.HTTPException):
                is_right = False
                connection.close()
            self._waits.append(time.perf_counter() - began if is_right else -1.0)


@dataclasses.dataclass
class Served:
    """A server that runs.

    Attributes:
        server: address of the server.
        name: name of its model.
        process: the server's process.
        errors: the file that has its standard error.
    """

    server: attackers.Server
    name: str
    process: psutil.Process
    errors: Path

    def attack(self, name: str) -> list[Any]:
        """Run an attack in a separate process, and return what it prints."""
        host, port, key = self.server
        script = attackers.__file__
        command = [sys.executable, script, name, host, str(port), key, self.name]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def is_idle(self) -> bool:
        """Return whether it uses almost no processor time."""
        self.process.cpu_percent()
        return self.process.cpu_percent(0.3) < 30


def forget_peak(pid: int | str = "self") -> float:
    """Return the MB that a process has, and count its peak from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak(pid)


def peak(pid: int | str = "self") -> float:
    """Return the peak memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+)", status)
    return int(kilobytes) / 1024


@contextlib.contextmanager
def serving() -> Generator[Served]:
    """Serve the chat model."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder, "errors.txt")
        command = [sys.executable, "-m", "es_cookbook", "serve", f"model_name={CHAT_MODEL}"]
        with errors.open("wb") as file:
            process = subprocess.Popen(
                [*command, "port=0"], stdout=subprocess.PIPE, stderr=file, text=True
            )
        try:
            assert process.stdout is not None
            name = process.stdout.readline().removeprefix("serving ").strip()
            line = process.stdout.readline()
            host, port, key = re.findall(r"http://([\d.]+):(\d+)/v1 OPENAI_API_KEY=(\S+)", line)[0]
            server = attackers.Server(host, int(port), key)
            yield Served(server, name, psutil.Process(process.pid), errors)
        finally:
            process.kill()
            process.wait()


def requests() -> list[Row]:
    """Measure every attack by one request or connection."""
    stalls: dict[str, float] = {}
    memory: dict[str, float] = {}
    refused: list[str] = []
    failed: list[str] = []
    with serving() as served, Bystander(served.server) as bystander:
        for _ in range(3):  # What is loaded once is no attack's cost.
            served.attack("a chat")
        for name in attackers.names():
            bystander.waits()
            before = forget_peak(served.process.pid)
            began = time.monotonic()
            statuses = served.attack(name)
            took = time.monotonic() - began
            end = time.monotonic() + 30
            while not served.is_idle() and time.monotonic() < end:
                pass
            waits = bystander.waits()
            stalls[name], memory[name] = max(waits), max(0.0, peak(served.process.pid) - before)
            words = ", ".join("closed" if each is None else str(each) for each in statuses[:3])
            print(
                f"{name}: {words}; {took:.2f} s, other client {stalls[name] * 1e3:.0f} ms, "
                f"+ {memory[name]:.0f} MB",
                flush=True,
            )
            if all(each is not None and each >= 400 for each in statuses):
                refused.append(name)
            is_busy = time.monotonic() >= end
            if min(waits) < 0 or is_busy or any(each in (500, 502) for each in statuses):
                failed.append(name)
        tracebacks = served.errors.read_text().count("Traceback")
    together = stalls.pop(attackers.TOGETHER)
    slowest, largest = max(stalls, key=stalls.__getitem__), max(refused, key=memory.__getitem__)
    told = f"{len(stalls)} attacks by a request: "
    return [
        row(f"{told}longest wait of another client ({slowest})", [stalls[slowest]], "s",
            at_most=LONGEST),
        row(f"the same for {attackers.TOGETHER}", [together], "s"),
        row(f"memory for one of the {len(refused)} that are refused ({largest})", [memory[largest]],
            "MB", at_most=MOST_MEMORY),
        row(f"{told}500s, other clients refused, work left", [len(failed)], "", at_most=0),
        row(f"{told}tracebacks", [tracebacks], "", at_most=0),
    ]  # fmt: skip


def connections() -> list[Row]:
    """Measure an attack by many half-open connections."""
    with serving() as served, Bystander(served.server) as bystander:
        time.sleep(2)
        bystander.waits()
        time.sleep(8)
        before = bystander.waits()
        closed = [float(each) for each in served.attack(str(HALF_OPEN))]
        during = bystander.waits()
    relative = _p99(during) / _p99(before)
    return [
        row("1,600 half-open connections: closed after", [max(closed)], "s", at_most=CLOSED_AFTER),
        row("p99 of another client's waits, relative to before", [relative], "x", at_most=SLOWER),
        row("requests of another client that failed", [sum(each < 0 for each in during)], "",
            at_most=0),
    ]  # fmt: skip


def bodies() -> list[Row]:
    """Measure an attack by randomly changed bodies."""
    logged = logging.handlers.BufferingHandler(CHANGED)
    logged.setLevel(logging.ERROR)
    logging.getLogger().addHandler(logged)
    statuses: dict[int, int] = {}

    async def send() -> None:
        rng, client = random.Random(0), by_bodies.served(by_bodies.Brief())
        for number in range(CHANGED):
            path = list(by_bodies.BODIES)[number % len(by_bodies.BODIES)]
            text = by_bodies.mutated(rng, by_bodies.BODIES[path])
            status = (await client.post(path, content=text.encode())).status_code
            statuses[status] = statuses.get(status, 0) + 1
            if status >= 500:
                print(f"{status}: {path} {text[:2000]}", flush=True)

    asyncio.run(send())
    print(", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())))
    told = f"{CHANGED:,} changed bodies: "
    failed = sum(count for status, count in statuses.items() if status >= 500)
    return [
        row(f"{told}500s", [failed], "", at_most=0),
        row(f"{told}logged errors", [len(logged.buffer)], "", at_most=0),
    ]


def _p99(waits: Sequence[float]) -> float:
    return statistics.quantiles(waits, n=100)[-1]


PARTS: Mapping[str, Callable[[], list[Row]]] = {
    "requests": requests,
    "connections": connections,
    "bodies": bodies,
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = sys.argv[1:] or list(PARTS)
    report("attacks", [each for name in chosen for each in PARTS[name]()], " ".join(sys.argv[1:]))
