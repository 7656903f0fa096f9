"""The cost of each optimizer on the main job, beside plain es.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers es momentum    # some; nothing is written

Every name of `OPTIMIZER_NAMES`, with the settings that the main job recommends for it, on the
bundled model's low-rank search space. Those that name points by coordinates have spaces of their
own: cma 512 numbers, as many as the singular values of small adapters, and sep_cma adapters of rank
1. One that cannot run there (qes, without a quantised model) is left out with its own sentence.

- ask + tell: seconds of a generation of 64 genomes with made-up fitness, the median of the last
  ten of 60 generations, when an optimizer's memory is full; and their share of a
  generation of the main job, which is run for it in the same process;
- terms a step: noise that everyone who keeps the centre makes again, with one processor;
- apply: seconds to move the centre by the last step, by turns with es's;
- memory: in a fresh process, what ask, tell and apply add at their peak to the centre that is there
  anyway.
"""

import dataclasses
import functools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import chz
import numpy as np

from benchmarks.harness import Row, interleaved, ratios, report, row, table
from benchmarks.history import centre_of, in_fresh_process, own_bytes
from es_cookbook.checkpoints.models import load_architecture, parameter_infos
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.options import built
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.base import OPTIMIZER_NAMES
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, CLIConfig
from es_cookbook.runs.directory.directory import METRICS
from es_cookbook.runs.program import run
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder, read_metrics

GENOMES, GENERATIONS, LAST = 64, 60, 10
REPEATS = 5
MOST_SECONDS = 40.0
"""Time after which an optimizer is stopped."""


OWN_SPACES: Mapping[str, SearchSpaceBuilder] = {
    "cma": FullRank(include=("*input_layernorm*",)),
    "sep_cma": Adapter(rank=1),
}


def space_of(name: str) -> SearchSpaceBuilder:
    """Return the search space of an optimizer."""
    return OWN_SPACES.get(name, LowRank())


@dataclasses.dataclass(frozen=True)
class Driven:
    """Steps and times of an optimizer with made-up fitness.

    Attributes:
        seconds: seconds of ask and tell in each generation.
        steps: its steps.
    """

    seconds: list[float]
    steps: list[Step]


def drive(name: str, num_generations: int = GENERATIONS) -> Driven:
    """Ask and tell for so many generations, unless it takes too long."""
    recommended = built(CLIConfig(), {"optimizer": name}).optimizer
    builder = chz.replace(recommended, population_size=GENOMES)
    space = space_of(name)(parameter_infos(load_architecture(str(BUNDLED_MODEL))))
    optimizer = builder(run_seed=0, num_generations=num_generations, space=space)
    chooser = random.Random(0)
    seconds: list[float] = []
    steps: list[Step] = []
    while len(steps) < num_generations and sum(seconds) < MOST_SECONDS:
        generation = len(steps)
        began = time.perf_counter()
        genomes_G = optimizer.ask(generation)
        asked = time.perf_counter()
        fitness_G = np.array([chooser.gauss(0, 1) for _ in genomes_G])
        telling = time.perf_counter()
        steps.append(optimizer.tell(generation, genomes_G, None, fitness_G))
        seconds.append(time.perf_counter() - telling + asked - began)
    return Driven(seconds, steps)


def main_job_seconds() -> list[float]:
    """Return seconds of the main job's generations, after the first."""
    with tempfile.TemporaryDirectory() as log_path:
        config = CLIConfig(
            log_path=log_path,
            num_generations=6,
            dataset=CountdownDatasetBuilder(num_test=0),
            trackers=JsonlTrackerBuilder(),
        )
        run(config)
        rows = read_metrics(Path(log_path) / METRICS)
    return [row["time/total"] for row in rows[1:] if "time/total" in row]


def grown_by(name: str) -> int:
    """Return the most bytes by which this process grows while an optimizer moves a centre."""
    centre = centre_of(BUNDLED_MODEL, space_of(name))
    centre.apply(drive(name, 1).steps[0])  # What is needed once: tables, threads.
    before = most = own_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, own_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    centre.apply(drive(name).steps[-1])
    done.set()
    watching.join()
    return most - before


def rows_of(name: str, es_centre: Centre, es_step: Step, generation_seconds: float) -> list[Row]:
    """Return rows of one optimizer."""
    driven = drive(name)
    centre = centre_of(BUNDLED_MODEL, OWN_SPACES[name]) if name in OWN_SPACES else es_centre
    last = driven.seconds[-LAST:]
    apply = functools.partial(centre.apply, driven.steps[-1])
    times = interleaved({"es": lambda: es_centre.apply(es_step), name: apply}, repeats=REPEATS)
    grown, _ = in_fresh_process(grown_by, name)
    terms = [float(len(step.terms)) for step in driven.steps[-LAST:]]
    return [
        row(f"{name}: ask + tell", [1000 * seconds for seconds in last], "ms"),
        row(
            f"{name}: ask + tell, of a generation of the main job",
            [100 * seconds / generation_seconds for seconds in last],
            "%",
            at_most=2,
        ),
        row(f"{name}: terms a step", terms, ""),
        row(f"{name}: apply / es's", ratios(times[name], times["es"]), "x"),
        row(f"{name}: apply", times[name], "s"),
        row(f"{name}: peak memory beside the centre", [grown / 2**20], "MiB"),
    ]


def main(chosen: Sequence[str]) -> None:
    """Measure and report; a part is only printed."""
    centre = centre_of(BUNDLED_MODEL)
    seconds = main_job_seconds()
    rows = [row("a generation of the main job", seconds, "s")]
    es_step = drive("es").steps[-1]
    for name in chosen or OPTIMIZER_NAMES:
        try:
            rows += rows_of(name, centre, es_step, statistics.median(seconds))
        except ESCookbookError as error:
            print(f"{name} is left out: {error}")
    if chosen:
        print(table(rows))
    else:
        report("optimizers", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
