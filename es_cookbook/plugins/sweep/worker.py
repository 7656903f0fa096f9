"""Runs in processes of their own, each on its share of the cores.

    python -m es_cookbook.plugins.sweep.worker cores=0,1 < config

A process is bound to cores of its own, and starts as many threads as these are, so runs do not get
in each other's way. Where there are several GPUs, it sees its own. Its standard input is the run's
Config, one line of JSON, and stays open for as long as the sweep's process lives: when it ends, the
run is interrupted, ready to go on. Exit codes are those of every command.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json, modules_named, trust_of
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.machine.cores import allowed_cpus, core_groups, threads_of
from es_cookbook.common.references import script_of
from es_cookbook.common.terminal import one_line
from es_cookbook.runs.config import Config
from es_cookbook.runs.directory.lock import writer_of
from es_cookbook.runs.program import run

Share: TypeAlias = tuple[tuple[int, ...], str | None]
"""What a process has of the machine: cores, and a GPU if not all of them."""
_LONGEST = 1000
"""Characters of what is told of a failure."""
_SECONDS_TO_END = 7.0
"""After an interrupt; what has not ended then is killed, as its history allows at any moment."""
_SECONDS_OF_FORMER = 30.0
"""For the process of a sweep that was killed, which interrupts itself and may save something."""


def shares(count: int, devices: Sequence[str]) -> list[Share]:
    """The machine's cores in so many shares, and GPUs in turn; without devices all see all GPUs.

    Raises:
        ConfigError: More shares than cores.
    """
    cpus = sorted(allowed_cpus())
    if count > len(cpus):
        raise ConfigError(
            f"workers must be at most {len(cpus)}, since each needs a core and this process "
            f"has as many, found {count}"
        )
    cores = core_groups(cpus)  # Threads of one core go to one worker, if there are enough cores.
    dealt = cores if count <= len(cores) else [(cpu,) for cpu in cpus]
    return [
        (tuple(sorted(chain(*dealt[i::count]))), devices[i % len(devices)] if devices else None)
        for i in range(count)
    ]


def start(config: Config, share: Share, output: Path) -> subprocess.Popen[bytes]:
    """Train in a process of its own; what it prints is added to `output`."""
    text = config_to_json(config)
    found = (script_of(module) for module in modules_named(text))
    scripts = ",".join(str(script.resolve()) for script in found if script)
    options = [f"cores={','.join(map(str, share[0]))}", f"scripts={scripts}"]
    with output.open("ab") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "es_cookbook.plugins.sweep.worker", *options],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            env=_environment(share),
            start_new_session=True,  # Ctrl-C is the sweep's, which interrupts each run once.
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has ended already, and says why.
        process.stdin.write(json.dumps(json.loads(text)).encode() + b"\n")
        process.stdin.flush()
    return process


def _environment(share: Share) -> dict[str, str]:
    """The sweep's own, with a share of threads and GPUs, and the same modules."""
    cores, device = share
    devices = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads_of(cores)),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **devices,
    }


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Interrupt them, if they are still running, and wait for all."""
    waiting = list(processes)
    for process in waiting:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _SECONDS_TO_END
    for process in waiting:
        try:
            process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
        release(process)


def release(process: subprocess.Popen[bytes]) -> int:
    """Close the pipe to a process that has ended, or is ending. Returns its exit code."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return process.wait()


def last_words(output: Path) -> str:
    """The last line that was printed."""
    with output.open("rb") as printed:
        printed.seek(max(printed.seek(0, os.SEEK_END) - 10_000, 0))
        lines = printed.read().decode("utf-8", "replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return one_line(last[:_LONGEST])


@chz.chz
class _Worker:
    """Train with the Config that comes by the standard input."""

    cores: tuple[int, ...] = chz.field(default=(), doc="of this machine, to stay on; all if empty")
    scripts: tuple[str, ...] = chz.field(default=(), doc="whose classes the Config names")


def main(worker: _Worker) -> None:
    """Train, or go on; a run that is complete is left as it is."""
    if worker.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, worker.cores)
    text = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    config = config_from_json(text, [*trust_of(text), *worker.scripts])
    if not isinstance(config, Config):
        raise ConfigError(f"a sweep trains with a Config, found {type(config).__name__}")
    _await_former(Path(config.log_path))
    run(chz.replace(config, behavior_if_log_dir_exists="resume"))


def _await_former(log_path: Path) -> None:
    """Wait for another process that writes the run, such as one of a sweep that was killed."""
    said, until = False, time.monotonic() + _SECONDS_OF_FORMER
    while (writer := writer_of(log_path)) and time.monotonic() < until:
        if not said:
            print(f"{log_path} is being written by {writer}: waiting for its end", flush=True)
        said = True
        time.sleep(0.1)


def _end_with_parent() -> None:
    """Interrupt this process when the standard input ends."""
    while os.read(0, 1):  # Not by `sys.stdin`, whose lock would be held when this process ends.
        pass
    os.kill(os.getpid(), signal.SIGINT)


def cli() -> None:
    run_cli(main, _Worker)


if __name__ == "__main__":
    cli()
