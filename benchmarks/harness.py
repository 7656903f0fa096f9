"""Measurement, printing and writing for all benchmarks.

Two things are compared within one process and by turns (a, b, a, b, …), so that anything else the
machine does hits both; a ratio is the median of the ratios of neighbours, and its spread is the
distance between their quartiles.

    times = interleaved({"ours": ours, "theirs": theirs}, repeats=7)
    rows = [row("ours / theirs", ratios(times["theirs"], times["ours"]), "x", at_least=1.5)]
    report("sampling", rows)

prints a table and writes `benchmarks/results/sampling.json`.
"""

import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.tracking.jsonl import read_metrics

RESULTS = Path(__file__).parent / "results"
CHAT_MODEL = Path(__file__).parents[1] / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model of `make chat-model`."""
_INSTRUCTIONS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "i8mm",
    "bf16",
)
"""Flags that speed depends on."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured number; its fields are the keys in the JSON."""

    name: str
    value: float
    unit: str
    goal: str | None
    met: bool | None
    repeats: int
    spread: float


def interleaved(
    functions: Mapping[str, Callable[[], object]], repeats: int = 5, warmups: int = 1
) -> dict[str, list[float]]:
    """Return wall-clock seconds of each function, run by turns, after `warmups` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(-warmups, repeats):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def call(*words: str) -> tuple[float, float]:
    """Run `es-cookbook …` in a separate process; its wall-clock and processor seconds.

    Processes that it starts and waits for count, such as graders.
    """
    command = [sys.executable, "-m", "es_cookbook", *words]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | threads)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"failed with status {status}: {' '.join(command)}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def before_and_after(log_path: Path, metric: str) -> tuple[float, float]:
    """Return a metric of a run's first and of its last evaluation."""
    first, last = first_and_last(log_path, metric)
    return first[metric], last[metric]


def first_and_last(log_path: Path, metric: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return all metrics of the first and of the last generation that has this one."""
    found = [line for line in read_metrics(log_path / METRICS) if metric in line]
    return found[0], found[-1]


def spend(seconds: float) -> None:
    """Use so many seconds of this thread's processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratio of each neighbouring pair."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def mirrored_pairs(number: int, sigma: float = 0.005) -> list[Genome]:
    """Return genomes in pairs of neighbours with the same seed and opposite signs."""
    return [Genome((Term(1 + g // 2, sigma * (-1) ** g),)) for g in range(number)]


def share_cached(stats: Mapping[str, float]) -> float:
    """Return the share of an engine's prompt tokens whose keys and values were cached."""
    return stats["cached_tokens"] / (stats["cached_tokens"] + stats["prefilled_tokens"])


def row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """Return the median of `values` beside its goal, if it has one."""
    value = statistics.median(values)
    goal, met = None, None
    if at_least is not None:
        goal, met = f">= {at_least:g}", value >= at_least
    if at_most is not None:
        goal, met = f"<= {at_most:g}", value <= at_most
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else [value] * 3
    return Row(name, value, unit, goal, met, len(values), quartiles[2] - quartiles[0])


def report(name: str, rows: Sequence[Row], part: str = "") -> None:
    """Print the table and write `benchmarks/results/<name>.json`.

    A part of a benchmark that is run by itself is named, and has a file `<name>-<part>.json`.
    """
    print(table(rows))
    write("-".join([name, *part.split()]), f"python -m benchmarks.{name} {part}".strip(), rows)


def write(
    name: str, command: str, rows: Sequence[Row], left_out: Mapping[str, str] | None = None
) -> None:
    """Write `benchmarks/results/<name>.json`; `left_out`: parts without all rows, and why."""
    RESULTS.mkdir(exist_ok=True)
    result = {
        "command": command,
        "machine": machine(),
        "commit": commit(),
        "rows": [dataclasses.asdict(row) for row in rows],
        **({"left_out": dict(left_out)} if left_out else {}),
    }
    path = RESULTS / f"{name}.json"
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    lines = ["| what | measured | goal | met | repeats | spread |", "|---|---|---|---|---|---|"]
    for row in rows:
        met = "" if row.met is None else "yes" if row.met else "no"
        measured, spread = f"{row.value:.4g} {row.unit}", f"{row.spread:.2g}"
        lines.append(
            f"| {row.name} | {measured} | {row.goal or ''} | {met} | {row.repeats} | {spread} |"
        )
    return "\n".join(lines)


@functools.cache
def machine() -> dict[str, object]:
    """Return the machine and versions that the numbers depend on."""
    import numpy
    import torch

    return {
        "cpu": _cpu_model(),
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in processor_flags()),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def described(found: Mapping[str, object]) -> str:
    """Say in words what `machine` found."""
    return ", ".join(f"{key} {value}" for key, value in found.items() if value)


def processor_flags() -> frozenset[str]:
    """Return the processor's flags on Linux; nothing elsewhere."""
    return frozenset(word for line in _cpu_info("flags", "Features") for word in line.split())


@functools.cache
def commit() -> str:
    """Return the commit that was measured, with a plus when the tree had changes.

    Results, and pages whose tables are made from them, may have changed: an earlier benchmark wrote
    them.
    """
    made = (":!/benchmarks/results", ":!/benchmarks/README.md", ":!/docs", ":!/README.md")
    name = _git("rev-parse", "--short=12", "HEAD").stdout.strip()
    changed = _git("diff", "--quiet", "HEAD", "--", ":/", *made).returncode
    return name + "+" * (changed == 1) if name else "unknown"


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *words]
    return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)


def _cpu_model() -> str:
    models = _cpu_info("model name")
    return models[0] if models else platform.processor() or platform.machine() or "unknown"


def _cpu_info(*names: str) -> list[str]:
    """Return the values of lines with these names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = [line.partition(":") for line in lines]
    return [value.strip() for name, _, value in found if name.strip() in names]
