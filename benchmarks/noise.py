"""Noise against `torch.randn`: elements a second, on one thread each.

    python -m benchmarks.noise

Both write float32 into memory that is already there. The small sizes are what low-rank genomes ask
for, thousands of times a generation; there the cost of a call counts, shown in microseconds.
"""

import numpy as np
import torch

from benchmarks.harness import Row, interleaved, ratios, report, row
from es_cookbook.evolution.noise import NoiseKind, noise, noise_range

SIZES = {"1e4": 10**4, "1e6": 10**6, "1e7": 10**7}
SMALL = (128, 1024)
CALLS_OF_SMALL = 2000
ELEMENTS_A_REPEAT = 10**7
REPEATS = 25
KINDS: tuple[NoiseKind, ...] = ("gaussian", "rademacher")


def main() -> None:
    torch.set_num_threads(1)
    rows: list[Row] = []
    for kind in KINDS:
        for label, size in SIZES.items():
            rows.extend(against_randn(kind, label, size))
        rows.extend(row_of_small(kind, size) for size in SMALL)
    report("noise", rows)


def against_randn(kind: NoiseKind, label: str, size: int) -> list[Row]:
    """Measure with enough calls a repeat that each takes tens of milliseconds."""
    ours, theirs = np.empty(size, np.float32), torch.empty(size)
    calls = ELEMENTS_A_REPEAT // size

    def our_noise() -> None:
        for seed in range(calls):
            noise_range(seed, "model.layers.0.mlp.up_proj.weight", 0, size, kind, out=ours)

    def their_noise() -> None:
        for _ in range(calls):
            torch.randn(size, out=theirs)

    seconds = interleaved({"ours": our_noise, "theirs": their_noise}, repeats=REPEATS)
    rates = [calls * size / time / 1e6 for time in seconds["ours"]]
    against = ratios(seconds["theirs"], seconds["ours"])
    return [
        row(f"{kind}, {label} elements / torch.randn", against, "x", at_least=1.3),
        row(f"{kind}, {label} elements", rates, "million/s"),
    ]


def row_of_small(kind: NoiseKind, size: int) -> Row:
    def calls() -> None:
        for seed in range(CALLS_OF_SMALL):
            noise(seed, "model.layers.0.mlp.up_proj.weight.A", (size, 1), kind)

    seconds = interleaved({"calls": calls}, repeats=REPEATS)["calls"]
    microseconds = [time / CALLS_OF_SMALL * 1e6 for time in seconds]
    return row(f"{kind}, one call of {size} elements", microseconds, "µs")


if __name__ == "__main__":
    main()
