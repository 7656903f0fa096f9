"""The process that llama.cpp runs in, as the engine sees it: orders, shared memory, and its end."""

import io
import json
import mmap
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from es_cookbook.common.errors import EngineError, ModelError
from es_cookbook.common.machine.processes import Process
from es_cookbook.common.terminal import show_bytes

_RAM_DISK = Path("/dev/shm")
_ZEROS = bytes(2**20)


class Ended(Exception):
    """The process has ended; `LlamaProcess.failure` says how."""


class LlamaProcess:
    """A process with one model.

    Args:
        process: the process.
        orders: takes orders to it, and brings replies.
        factors: shared memory of the adapter's factors.
        logits: shared memory of logits (rows, vocabulary).
    """

    def __init__(
        self,
        process: Process,
        orders: io.BufferedRWPair,
        factors: npt.NDArray[np.float32],
        logits: npt.NDArray[np.float32],
    ) -> None:
        self.factors, self.logits = factors, logits
        self._process, self._orders = process, orders

    @staticmethod
    async def start(num_factors: int, rows: int, vocabulary: int) -> "LlamaProcess":
        """Start the process, without a model.

        Raises:
            EngineError: There is no room for the shared memory.
        """
        ours, theirs = socket.socketpair()
        where = _RAM_DISK if _RAM_DISK.is_dir() else None
        with tempfile.TemporaryFile(dir=where) as file, theirs:
            size = num_factors + rows * vocabulary
            try:  # Room for all of it, or a later write to it would end this process.
                for start in range(0, size * 4, len(_ZEROS)):
                    file.write(_ZEROS[: size * 4 - start])
                file.flush()
            except OSError as error:
                raise EngineError(
                    f"engine=llama_cpp shares {show_bytes(size * 4)} with llama.cpp's process in "
                    f"{where or tempfile.gettempdir()}, which has no room for them: "
                    f"{error.strerror}; lower engine.max_batch_size, or make room"
                ) from error
            shared = np.frombuffer(mmap.mmap(file.fileno(), 0), np.float32)
            descriptors = theirs.fileno(), file.fileno()
            module = "es_cookbook.plugins.llama_cpp.child"
            command = sys.executable, "-m", module, *map(str, descriptors)
            process = await Process.start(command, os.environ, descriptors=descriptors)
        with ours:
            orders = ours.makefile("rwb")
        logits = shared[num_factors:].reshape(rows, vocabulary)
        return LlamaProcess(process, orders, shared[:num_factors], logits)

    def order(self, name: str, *arguments: object, **options: object) -> dict[str, Any]:
        """Have something done, and wait for its result.

        Raises:
            ModelError: llama.cpp refuses it.
            Ended: The process has ended.
        """
        try:
            self._orders.write(json.dumps((name, arguments, options)).encode() + b"\n")
            self._orders.flush()
            reply = json.loads(self._orders.readline() or "null")
        except (OSError, ValueError) as error:  # ValueError: it has been closed here.
            raise Ended from error
        if reply is None:
            raise Ended
        if "error" in reply:
            raise ModelError(f"llama.cpp {reply['error']}")
        return reply

    async def failure(self) -> EngineError:
        """Return the error of a process that has ended, with the last lines that it wrote."""
        await self._process.wait()
        return EngineError(f"llama.cpp's process {self._process.how()}")

    async def close(self) -> None:
        """End the process."""
        await self._process.end()
