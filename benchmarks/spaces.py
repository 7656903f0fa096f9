"""What search spaces of few numbers cost and gain on a chat model, beside the default one.

    OMP_NUM_THREADS=1 python -m benchmarks.spaces                  # all
    OMP_NUM_THREADS=1 python -m benchmarks.spaces steering         # some

SmolLM2-135M-Instruct (`make chat-model`) learns sums in words from gold answers: the recipe `chat`
on held-out questions that choose settings (`dataset.fold=1`), with 16 genomes, 4 questions a
generation and 12 generations, so 768 evaluations for every space, and three seeds. σ is about what
`auto` finds on a machine that is not busy (on a busy one its search is cut short); α is `auto`.
Seconds are those of processors, start and two evaluations of 100 questions included.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.harness import CHAT_MODEL, Row, before_and_after, call, report, row

SEEDS = (0, 1, 2)
_OPTIONS = (
    f"model_name={CHAT_MODEL}",
    "dataset.task=sums",
    "dataset.fold=1",
    "dataset.num_test=100",
    "optimizer.population_size=16",
    "dataset.problems_per_generation=4",
    "num_generations=12",
    "eval_every=0",
    "engine.num_lanes=1",
)
SPACES = {
    "low_rank": ("optimizer.sigma=0.009",),
    "steering": ("search_space=steering", "optimizer.sigma=0.18"),
    "soft_prompt": (
        "search_space=soft_prompt",
        "search_space.text=Answer with a number.",
        "optimizer.sigma=0.14",
    ),
}


def rows_of(space: str, seed: int, log_path: Path) -> list[Row]:
    """Run one seed; its lines of the table."""
    _, seconds = call("chat", *_OPTIONS, *SPACES[space], f"seed={seed}", f"log_path={log_path}")
    before, after = before_and_after(log_path, "test/env/all/correct")
    name = f"{space}, seed {seed}:"
    print(f"{name} {before:.2f} -> {after:.2f} in {seconds:.0f} s of processors", flush=True)
    return [
        row(f"{name} correct before", [100 * before], "%"),
        row(f"{name} correct after", [100 * after], "%"),
        row(f"{name} gain", [100 * (after - before)], "points"),
        row(f"{name} seconds of processors", [seconds], "s"),
    ]


def main(chosen: list[str]) -> None:
    """Run spaces and seeds one after the other, and report on each space."""
    for space in chosen or SPACES:
        rows: list[Row] = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as directory:
                rows += rows_of(space, seed, Path(directory) / "run")
        report("spaces", rows, space)


if __name__ == "__main__":
    main(sys.argv[1:])
