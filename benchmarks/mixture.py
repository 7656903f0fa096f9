"""Gains of each way of choosing problems: the mixture recipe with one changed at a time.

    python -m benchmarks.mixture                # all, three seeds each
    python -m benchmarks.mixture plain replay   # some

Every run is a separate process, `es-cookbook mixture` for
`GENERATIONS` generations with the variant's options, and all have the same number of rollouts.
Measured is the gain in held-out exact answers of the main part (500 problems, greedy), in points.
Of three seeds the standard error is about two points: smaller differences say nothing.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.harness import before_and_after, call, report, row

SEEDS = (0, 1, 2)
GENERATIONS = 20
MAIN = "test/env/main/correct"
_PLAIN = (
    "dataset.curriculum=None dataset.filter=None dataset.replay=None dataset.hard_weight=0 "
    "dataset.fading.generations=0 dataset.fading.factors=0"
)
VARIANTS = {
    "plain": _PLAIN,
    "all": "",
    "no_easy_pool": "dataset.fading.generations=0 dataset.fading.factors=0",
    "no_hard_part": "dataset.hard_weight=0",
    "no_curriculum": "dataset.curriculum=None",
    "no_filter": "dataset.filter=None",
    "no_replay": "dataset.replay=None",
    "batch_per_pair": f"{_PLAIN} batch_per_pair=True dataset.problems_per_generation=1024",
    "warm_attempts": f"{_PLAIN} sampling.temperature=0.5",
    "hot_steps": f"{_PLAIN} sampling.temperature=0.5 temperature_schedule=hot "
    "temperature_schedule.every=3 temperature_schedule.factor=2 "
    "temperature_schedule.schedule.generations=0,10 temperature_schedule.schedule.factors=1,0.2",
}
"""Name -> options. A batch per pair has 32 problems for each of 32 pairs: rollouts are the same."""


def gain(variant: str, seed: int, log_path: Path) -> float:
    """Return the points that a run gains on the main part."""
    options = [f"num_generations={GENERATIONS}", "eval_every=0", f"log_path={log_path}"]
    call("mixture", f"seed={seed}", *options, *VARIANTS[variant].split())
    before, after = before_and_after(log_path, MAIN)
    return 100 * (after - before)


def main(chosen: list[str]) -> None:
    """Run the variants, seed after seed, and report."""
    for variant in chosen or VARIANTS:
        with tempfile.TemporaryDirectory() as directory:
            gains = [gain(variant, seed, Path(directory) / f"{seed}") for seed in SEEDS]
        print(f"{variant}: {', '.join(f'{each:+.1f}' for each in gains)}", flush=True)
        name = f"{variant}: gain in exact answers of the main part"
        report("mixture", [row(name, gains, "points")], variant)


if __name__ == "__main__":
    main(sys.argv[1:])
