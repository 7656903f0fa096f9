"""Processes that train, as many at a time as there are workers, each on its share of the cores.

A worker's process is bound to cores of its own, and starts as many threads as these are, so runs do
not get in each other's way. Where there are several GPUs, a worker sees its own. A process is
watched, never waited for: whoever has them asks which have ended, and starts the next in their
place.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from es_cookbook import train
from es_cookbook.common.configs import config_to_json, modules_named
from es_cookbook.common.cores import num_cores
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.references import script_of
from es_cookbook.common.terminal import one_line
from es_cookbook.runs.files import cannot

OUTPUT = "output"
"""Folder of what the processes print, a file a run."""
_LONGEST = 1000
"""Characters of what is told of a failure."""
SECONDS_TO_END = 7.0
"""After an interrupt; what has not ended then is killed, as its history allows at any moment."""


@dataclasses.dataclass(eq=False)
class _Slot:
    """A worker's cores, its GPU, and the process that has them now."""

    cores: tuple[int, ...]
    device: str | None
    process: subprocess.Popen[bytes] | None = None
    name: str = ""


class Workers:
    """Slots for processes.

    Args:
        count: of the slots.
        devices: of the GPUs that they get in turn; none: all see all.
        log_path: of the sweep, which keeps what the processes print.

    Raises:
        ConfigError: More workers than cores.
        RunDirectoryError: The disk refuses.
    """

    def __init__(self, count: int, devices: Sequence[str], log_path: Path) -> None:
        cores = _cores()
        if count > len(cores):
            raise ConfigError(
                f"workers must be at most {len(cores)}, since each needs a core and this process "
                f"has as many, found {count}"
            )
        self._slots = [
            _Slot(tuple(cores[i::count]), devices[i % len(devices)] if devices else None)
            for i in range(count)
        ]
        self._output = log_path / OUTPUT
        try:
            self._output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot("make", self._output, error, needed=4096) from error

    @property
    def running(self) -> list[str]:
        """Names of the runs that have a slot."""
        return [slot.name for slot in self._slots if slot.process is not None]

    @property
    def has_room(self) -> bool:
        return any(slot.process is None for slot in self._slots)

    def start(self, name: str, config: train.Config) -> None:
        slot = next(slot for slot in self._slots if slot.process is None)
        text = config_to_json(config)
        found = (script_of(module) for module in modules_named(text))
        scripts = ",".join(str(script.resolve()) for script in found if script)
        options = [f"cores={','.join(map(str, slot.cores))}", f"scripts={scripts}"]
        with self.output(name).open("ab") as output:
            slot.process = subprocess.Popen(
                [sys.executable, "-m", "es_cookbook.train.sweep.worker", *options],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_environment(slot),
                start_new_session=True,  # Ctrl-C is the sweep's, which interrupts each run once.
            )
        slot.name = name
        assert slot.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended already, and says why.
            slot.process.stdin.write(json.dumps(json.loads(text)).encode() + b"\n")
            slot.process.stdin.flush()

    def ended(self) -> list[tuple[str, int]]:
        """Runs whose processes have ended since the last call, each with its exit code."""
        found: list[tuple[str, int]] = []
        for slot in self._slots:
            if slot.process is not None and (code := slot.process.poll()) is not None:
                _let_go(slot)
                found.append((slot.name, code))
        return found

    def interrupt(self, name: str) -> None:
        """End a run after the generation that is recorded, ready to go on."""
        for slot in self._slots:
            if slot.process is not None and slot.name == name:
                slot.process.send_signal(signal.SIGINT)

    def output(self, name: str) -> Path:
        return self._output / f"{name}.txt"

    def last_words(self, name: str) -> str:
        """The last line that a run's processes have printed."""
        with self.output(name).open("rb") as output:
            output.seek(max(output.seek(0, os.SEEK_END) - 10_000, 0))
            lines = output.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return one_line(last[:_LONGEST])

    def close(self) -> None:
        """Interrupt what is still running, and wait for it."""
        for name in self.running:
            self.interrupt(name)
        deadline = time.monotonic() + SECONDS_TO_END
        for slot in self._slots:
            if slot.process is None:
                continue
            try:
                slot.process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                slot.process.kill()
                slot.process.wait()
            _let_go(slot)


def _let_go(slot: _Slot) -> None:
    assert slot.process is not None and slot.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        slot.process.stdin.close()
    slot.process = None


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _environment(slot: _Slot) -> dict[str, str]:
    """The sweep's own, with the slot's share of threads and GPUs, and the same modules."""
    devices = {} if slot.device is None else {"CUDA_VISIBLE_DEVICES": slot.device}
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(min(len(slot.cores), num_cores())),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **devices,
    }
