"""The history as the checkpoint: how small it is, and how fast the weights come back.

    python -m benchmarks.history

Bytes: 64 genomes of the default optimizer, whose fitness is random; mirrored pairs share a seed, so
a step has 32 terms, otherwise 64. Against weights: 500 generations of such lines beside 500 copies
of the weights, the bundled model's file and 7 billion parameters of two bytes.

Time: 500 generations of 64 rank-1 terms on the bundled model, from the base and from the last of
the snapshots taken every 50 (49 generations before the end), each in a fresh process. "Replay" is
from opening the run directory to the last tensor with the fingerprint compared; "start included"
adds Python and its imports.

Memory: a random bfloat16 Qwen2 with weights of 16.8 million elements each, replayed for 5
generations in a fresh process; what it grows by, files that are only mapped left out, beside the
largest parameter in float32.
"""

import dataclasses
import functools
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import Row, report, row
from es_cookbook.checkpoints.models import (
    load_architecture,
    load_causal_lm,
    parameter_infos,
)
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.centre.snapshots import SnapshotWriter
from es_cookbook.runs.config import Config
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.history.store import HistoryStore, header_of

GENOMES, GENERATIONS, SNAPSHOT_EVERY = 64, 500, 50
BYTES_OF_7B = 7e9 * 2
REPEATS = 3
_T = TypeVar("_T")


@functools.cache
def bundled_space() -> SearchSpace:
    """Return the low-rank space of the bundled model."""
    return LowRank()(parameter_infos(load_architecture(str(BUNDLED_MODEL))))


def records(antithetic: bool, num_generations: int, move: Callable[[Step], int]) -> list[Record]:
    """Return the records of a run, with made-up rewards."""
    chooser = random.Random(0)
    optimizer = ES(population_size=GENOMES, antithetic=antithetic)(
        run_seed=0, num_generations=num_generations, space=bundled_space()
    )
    made: list[Record] = []
    for generation in range(num_generations):
        genomes_G = optimizer.ask(generation)
        fitness_G = np.array([chooser.gauss(0, 1) for _ in genomes_G])
        step = optimizer.tell(generation, genomes_G, None, fitness_G)
        fitness = tuple(fitness_G.tolist())
        made.append(Record(generation, step, fitness, move(step)))
    return made


def write_run(log_path: Path, model: Path, made: Sequence[Record]) -> None:
    """Write a run directory as far as a replay needs one."""
    config = Config(
        model_name=str(model),
        dataset=CountdownDatasetBuilder(),
        log_path=str(log_path),
        num_generations=len(made),
    )
    log_path.mkdir()
    (log_path / "config.json").write_text(config_to_json(config))
    dtype = str(load_architecture(str(model)).config.dtype).removeprefix("torch.")
    history = HistoryStore(
        log_path / "history.jsonl", header_of(str(model), dtype, config.search_space.starts)
    )
    for record in made:
        history.append(record)
    history.close()


_LOW_RANK = LowRank()


def centre_of(model: Path, space: SearchSpaceBuilder = _LOW_RANK) -> Centre:
    loaded = load_causal_lm(str(model), "auto", torch.device("cpu"))
    return Centre(dict(loaded.named_parameters()), space(parameter_infos(loaded)))


@dataclasses.dataclass(frozen=True)
class Measured:
    """One replay in a fresh process: seconds, and bytes by which it grew beside mapped files."""

    seconds: float
    grown: int
    largest: int


def replay(log_path: Path, generation: int, num_threads: int) -> Measured:
    before = most = own_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, own_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    opened = open_replay(log_path, generation)
    largest = max(tensor.nbytes for _, tensor in opened.centre_tensors(num_threads))
    seconds = time.perf_counter() - began
    done.set()
    watching.join()
    return Measured(seconds, most - before, largest)


def own_bytes() -> int:
    """Return resident memory without mapped files; 0 where the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def in_fresh_process(function: Callable[..., _T], *arguments: object) -> tuple[_T, float]:
    """Return its result, and the seconds from the start of the process to its end."""
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(function, arguments)
    return found, time.perf_counter() - began


def size_rows(directory: Path) -> list[Row]:
    rows: list[Row] = []
    of_bundled = (BUNDLED_MODEL / "model.safetensors").stat().st_size
    for antithetic, kind in ((True, "mirrored"), (False, "not mirrored")):
        path = directory / kind
        write_run(
            path,
            BUNDLED_MODEL,
            records(antithetic, GENERATIONS, lambda step: random.getrandbits(64)),
        )
        history = (path / "history.jsonl").stat().st_size
        a_generation = history / GENERATIONS
        rows += [
            row(
                f"{GENOMES} genomes, {kind}: a generation",
                [a_generation],
                "bytes",
                at_most=64 * GENOMES + 1000,
            ),
            row(
                f"{kind}, {GENERATIONS} generations: the bundled model's weights / history",
                [of_bundled * GENERATIONS / history],
                "x",
            ),
            row(
                f"{kind}, {GENERATIONS} generations: weights of 7 B parameters / history",
                [BYTES_OF_7B * GENERATIONS / history],
                "x",
            ),
        ]
    return rows


def time_rows(directory: Path) -> list[Row]:
    log_path = directory / "run"
    write_run(log_path, BUNDLED_MODEL, records(False, GENERATIONS, centre_of(BUNDLED_MODEL).apply))
    threads = num_cores()
    rows: list[Row] = []

    def measure(what: str, goal: float, generation: int) -> list[Row]:
        runs = [in_fresh_process(replay, log_path, generation, threads) for _ in range(REPEATS)]
        seconds = [measured.seconds for measured, _ in runs]
        name = f"replay of {GENERATIONS} generations, {what}, {threads} threads"
        return [
            row(name, seconds, "s", at_most=goal),
            row(f"{name}, start included", [whole for _, whole in runs], "s"),
        ]

    rows += measure("from the base", 8, GENERATIONS)
    took: list[float] = []
    writer = SnapshotWriter(log_path, SNAPSHOT_EVERY)
    for generation in range(SNAPSHOT_EVERY, GENERATIONS, SNAPSHOT_EVERY):
        began = time.perf_counter()
        writer.recorded(generation)
        writer.finish()
        took.append(time.perf_counter() - began)
    rows += measure(f"snapshots every {SNAPSHOT_EVERY}", 5, GENERATIONS - 1)
    rows.append(row("writing a snapshot, one thread", took, "s"))
    return rows


def memory_rows(directory: Path) -> list[Row]:
    model = directory / "wide"
    shape = Qwen2Config(
        vocab_size=64,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    with torch.device("meta"):
        wide = Qwen2ForCausalLM(shape).to(torch.bfloat16)
    wide = wide.to_empty(device="cpu")
    for parameter in wide.parameters():
        parameter.data.fill_(0.01)
    wide.save_pretrained(model)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(model)
    write_run(directory / "wide run", model, records(False, 5, centre_of(model).apply))
    rows: list[Row] = []
    for threads in sorted({1, num_cores()}):
        measured, _ = in_fresh_process(replay, directory / "wide run", 5, threads)
        most = threads + 2  # One for each, the one that was taken, and noise.
        rows.append(
            row(
                f"memory of a replay, {threads} threads / largest parameter "
                f"({measured.largest / 2**20:.0f} MiB)",
                [measured.grown / measured.largest],
                "x",
                at_most=most,
            )
        )
    return rows


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        report("history", size_rows(directory) + time_rows(directory) + memory_rows(directory))


if __name__ == "__main__":
    main()
