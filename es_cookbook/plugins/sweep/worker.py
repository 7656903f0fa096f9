"""Runs in separate processes, each on its share of the cores.

    python -m es_cookbook.plugins.sweep.worker < config

A process is bound to its cores and starts as many threads, so that runs do not slow each other
down. With several GPUs, it sees only its own. Its standard input is the run's Config, one line of
JSON, and stays open as long as the sweep's process lives: when it closes, the run is interrupted
and can be continued. Exit codes are those of every command.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import anyio
import chz

from es_cookbook import Config, run
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json, trust_of
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.machine.cores import allowed_cpus, core_groups, threads_of
from es_cookbook.common.machine.processes import Process
from es_cookbook.common.terminal import one_line
from es_cookbook.common.trust import script_of

Share: TypeAlias = tuple[tuple[int, ...], str | None]
"""A process's cores, and its GPU, or None if it sees all of them."""
_SECONDS_TO_END = 7.0
"""Time to end after an interrupt; then the process is killed, which the history survives."""


def shares(count: int, devices: Sequence[str]) -> list[Share]:
    """Divide the cores, and assign GPUs in turn; without `devices` each share has all GPUs.

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


async def train(config: Config, share: Share, output: Path) -> str:
    """Train in a new process, which is interrupted if this task is cancelled.

    Args:
        config: config of the run.
        share: the process's cores and GPU.
        output: file to which its output is appended.

    Returns:
        Why the process failed; "" if it did not.
    """
    cores, device = share
    text = config_to_json(config)
    found = (script_of(module) for module in sorted(trust_of(text)))
    scripts = ",".join(str(script.resolve()) for script in found if script)
    with output.open("ab") as printed:
        process = await Process.start(
            [sys.executable, "-m", "es_cookbook.plugins.sweep.worker", f"scripts={scripts}"],
            {
                **os.environ,
                "OMP_NUM_THREADS": str(threads_of(cores)),
                "PYTHONPATH": os.pathsep.join(sys.path),
                **({} if device is None else {"CUDA_VISIBLE_DEVICES": device}),
            },
            stdout=printed,
            stderr=printed,
            outlives=True,  # It interrupts itself when its standard input ends.
        )
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)
    process.write(json.dumps(json.loads(text)).encode() + b"\n")
    try:
        await process.exited()
    finally:
        with anyio.CancelScope(shield=True):
            process.kill(signal.SIGINT)
            with anyio.move_on_after(_SECONDS_TO_END):
                await process.exited()
            await process.end()
    code = process.exit_code or 0
    if code < 0:
        return f"its process {process.how()}"
    return _last_line(output) if code else ""


def _last_line(output: Path) -> str:
    with output.open("rb") as printed:
        printed.seek(max(printed.seek(0, os.SEEK_END) - 10_000, 0))
        lines = printed.read().decode("utf-8", "replace").strip().split("\n")
    return one_line(lines[-1][:1000] or "no output")


@chz.chz
class _Worker:
    """Train with the Config from the standard input."""

    scripts: tuple[str, ...] = chz.field(default=(), doc="scripts whose classes the Config names")


def main(worker: _Worker) -> None:
    """Train, or continue; a complete run is left as it is."""
    text = sys.stdin.readline()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    config = config_from_json(text, [*trust_of(text), *worker.scripts])
    if not isinstance(config, Config):
        raise ConfigError(f"a sweep trains with a Config, found {type(config).__name__}")
    run(chz.replace(config, behavior_if_log_dir_exists="resume"))


def _end_with_parent() -> None:
    """Interrupt this process when the standard input ends."""
    while os.read(0, 1):  # Not `sys.stdin`, whose lock would be held when this process exits.
        pass
    os.kill(os.getpid(), signal.SIGINT)


def cli() -> None:
    run_cli(main, _Worker)


if __name__ == "__main__":
    cli()
