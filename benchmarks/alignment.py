"""Preference pairs: less forgetting, and the cost to the task, with weights and with KL.

    python -m benchmarks.alignment             # all, three seeds each
    python -m benchmarks.alignment none pairs  # some

Every run is a separate process, `python -m es_cookbook alignment seed=<seed>` with the options of
`SETTINGS`. Measured is the centre on held-out questions, greedy, before and after: characters too
many, which the task's reward is about, and right answers, which only the pairs are about.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row, before_and_after, call, report, row

SEEDS = (0, 1, 2)
SETTINGS = {
    "none": "preference.weight=0",
    "pairs": "",
    "less": "preference.weight=30",
    "kl": "preference.weight=0 kl.weight=30",
}
"""Name -> options."""
MEASURED = {"excess": ("characters", 1), "concise": ("%", 100), "correct": ("%", 100)}
"""Metric -> unit and factor."""


def measured(setting: str, seed: int, log_path: Path) -> dict[str, tuple[float, float]]:
    """Return each metric of the first and of the last evaluation."""
    options = [*SETTINGS[setting].split(), f"seed={seed}", f"log_path={log_path}", "eval_every=0"]
    call("alignment", *options)
    found: dict[str, tuple[float, float]] = {}
    for name, (_, factor) in MEASURED.items():
        before, after = before_and_after(log_path, f"test/env/all/{name}")
        found[name] = factor * before, factor * after
    return found


def main(chosen: list[str]) -> None:
    """Run the settings, seed after seed, and report."""
    for setting in chosen or SETTINGS:
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as directory:
            found = [measured(setting, s, Path(directory) / f"{s}") for s in SEEDS]
        for name, (unit, _) in MEASURED.items():
            pairs = [each[name] for each in found]
            rows.append(row(f"{setting}: {name} before", [pair[0] for pair in pairs], unit))
            rows.append(row(f"{setting}: {name} after", [pair[1] for pair in pairs], unit))
            said = ", ".join(f"{before:.1f} -> {after:.1f}" for before, after in pairs)
            print(f"{setting}: {name} {said}", flush=True)
        report("alignment", rows, setting)


if __name__ == "__main__":
    main(sys.argv[1:])
