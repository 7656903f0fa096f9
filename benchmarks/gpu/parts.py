"""The parts of the benchmark: each has a separate process, and a time after which it is ended."""

import contextlib
import functools
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu.kernels import noise, slots, step
from benchmarks.gpu.shapes import on_torch, on_vllm
from benchmarks.gpu.sizes import Emit, Sizes
from benchmarks.gpu.torch_engine import torch_engine
from benchmarks.gpu.vllm_engine import invariant, vllm_engine
from benchmarks.harness import Row
from es_cookbook.common.errors import first_line


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        seconds: its time, to which comes what parts before it have left.
        interpreted: whether a dry run has Triton's interpreter; vLLM's programs have none, and an
            engine would take minutes.
        on_vllm: whether it is left out where vLLM is not installed.
    """

    run: Callable[[Sizes, Path, Emit], None]
    seconds: float
    interpreted: bool = False
    on_vllm: bool = False


PARTS = {
    "noise": Part(noise, 20, interpreted=True),
    "slots": Part(slots, 15, interpreted=True),
    "step": Part(step, 20, interpreted=True),
    "torch": Part(torch_engine, 45),
    "vllm": Part(vllm_engine, 75, on_vllm=True),
    "vllm_7b": Part(functools.partial(on_vllm, "7b"), 65, on_vllm=True),
    "torch_7b": Part(functools.partial(on_torch, "7b"), 60),
    "vllm_invariant": Part(invariant, 60, on_vllm=True),
    "vllm_32b": Part(functools.partial(on_vllm, "32b"), 150, on_vllm=True),
}
"""The most telling first."""


class OwnProcess:
    """A process that imports what a part needs, waits to begin, and sends rows.

    Attributes:
        reason: why rows may be missing; None if the part came to its end.
    """

    def __init__(self, part: Part, sizes: Sizes, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(part.run, sizes, model, theirs))
        with pytest.MonkeyPatch.context() as patch:
            if sizes.dry and part.interpreted:  # before Triton is imported
                patch.setenv("TRITON_INTERPRET", "1")
            self._process.start()
        theirs.close()
        self.reason: str | None = None

    def rows(self, seconds: float) -> Iterator[Row]:
        """Let it begin, and yield its rows until it is done or its time is over."""
        end = time.monotonic() + seconds
        try:
            self._connection.send(None)
            while self._connection.poll(max(0.0, end - time.monotonic())):
                match self._connection.recv():
                    case Row() as row:
                        yield row
                    case reason:
                        self.reason = reason
                        self._process.join(5)
                        return
            self.reason = f"ended after {seconds:.0f} s, which is its time"
        except (EOFError, OSError):
            self._process.join(5)
            self.reason = f"its process ended with status {self._process.exitcode}"
        finally:
            self.end()

    def end(self) -> None:
        """End the process and those that it started, such as vLLM's, and wait for them."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has come to its end
            own = psutil.Process(self._process.pid)
            every = [*own.children(recursive=True), own]
            for each in every:
                each.kill()
            psutil.wait_procs(every, timeout=10)
        self._process.join()
        self._connection.close()


def _run(
    run: Callable[[Sizes, Path, Emit], None], sizes: Sizes, model: Path, connection: Connection
) -> None:
    connection.recv()
    reason = None
    try:
        run(sizes, model, connection.send)
    except Exception as error:  # of any kind: other parts go on
        traceback.print_exc()
        sys.stderr.flush()
        reason = first_line(error)
    connection.send(reason)
