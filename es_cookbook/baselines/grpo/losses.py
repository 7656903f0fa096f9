"""`losses.csv`: a line for each step of the optimizer, to be read by anything.

A run that goes on cuts the lines of steps that its checkpoint does not have, as it does with other
files, so no step is there twice.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from es_cookbook.common.files import LARGEST_TEXT, appending, read_file
from es_cookbook.runs.directory import LOSSES
from es_cookbook.runs.files import replace_file

COLUMNS = {
    "loss": "loss",
    "gradient_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "kl": "kl",
    "clipped": "clip_ratio/region_mean",
}
"""Our name -> TRL's; empty where TRL does not measure it in this run."""
_HEADER = ("step", "generation", *COLUMNS)


class Losses:
    """Appends lines.

    Args:
        step: steps that are done; lines after them are cut.
    """

    def __init__(self, log_path: Path, step: int) -> None:
        self._path = log_path / LOSSES
        kept = [line(_HEADER), *(_lines_upto(self._path, step))]
        replace_file(self._path, [text.encode() for text in kept])

    def add(self, step: int, generation: int, logs: Mapping[str, object]) -> None:
        """One step, counted from 1, as TRL logged it."""
        values = [logs.get(key) for key in COLUMNS.values()]
        with appending(self._path) as file:
            file.write(line((step, generation, *("" if v is None else v for v in values))))


def line(values: tuple[object, ...]) -> str:
    """A line of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _lines_upto(path: Path, step: int) -> list[str]:
    """Whole lines of steps up to this one."""
    try:
        text = read_file(path, LARGEST_TEXT, path.parent).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [
        each
        for each in text.splitlines(keepends=True)
        if each.endswith("\n") and each.partition(",")[0].isdecimal()
        if int(each.partition(",")[0]) <= step
    ]
