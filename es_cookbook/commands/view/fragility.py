"""What damage to its thoughts costs a model, from the `study.json` of the recipe `markovian`.

The file has, by run, means with intervals of `fragility/<damage>/<percent>`: by how many nats a
token the answer becomes less likely. It may be anybody's: it is numbers and names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import parsed, read_file
from es_cookbook.common.terminal import one_line
from es_cookbook.runs.report.plots import Line, Size, draw

STUDY = "study.json"
_METRIC = re.compile(r"fragility/(\w{1,40})/(\d{1,3})")
_LARGEST = 64 * 2**20

Lost: TypeAlias = Mapping[str, Mapping[float, tuple[float, float, float]]]
"""Damage -> percent -> nats lost, with the ends of their interval."""


def read_study(path: Path) -> dict[str, Lost]:
    """What a study measured, by run; `path` is the file or its directory.

    Raises:
        ConfigError: It cannot be read, or has no fragility.
    """
    file = path / STUDY if path.is_dir() else path
    try:
        study = cast("Mapping[str, object]", parsed(read_file(file, _LARGEST, None)))
        runs = cast("Mapping[str, Mapping[str, object]]", study["runs"])
        found = {one_line(name): _lost(of_run) for name, of_run in runs.items()}
    except OSError as error:
        raise ConfigError(
            f"log_path: {file} cannot be read: {error.strerror or error}; fragility is drawn from "
            "the output of python -m es_cookbook.recipes.markovian.study"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"log_path: {file} is no study: {error!r:.200}") from error
    if not any(found.values()):
        raise ConfigError(f"log_path: {file} has measured no fragility")
    return found


def draw_fragility(log_paths: Sequence[str], output: Path, title: str, size: Size) -> list[Path]:
    """Draw studies: a curve a damage of one run, a curve a run of several (the mean over damages).

    Raises:
        ConfigError: One of them is no study.
        RunDirectoryError: The files cannot be written.
    """
    found: dict[str, Lost] = {}
    for log_path in log_paths:
        found |= read_study(Path(log_path))
    if len(found) == 1:
        ((name, lost),) = found.items()
        lines = {damage: _line([of]) for damage, of in lost.items()}
        default = f"Markovian, damaged thoughts of {name}"
    else:
        lines = {name: _line(list(lost.values())) for name, lost in found.items()}
        default = "Markovian, damaged thoughts: mean over damages"
    return draw(
        output,
        lines,
        title=title or default,
        x_label="damaged (%)",
        y_label="lost log-probability (nats per token)",
        size=size,
    )


def _lost(of_run: Mapping[str, object]) -> Lost:
    lost: dict[str, dict[float, tuple[float, float, float]]] = {}
    for metric, estimate in of_run.items():
        if (named := _METRIC.fullmatch(metric)) and isinstance(estimate, dict):
            of = cast("dict[str, float | None]", estimate)
            value, low, high = (math.nan if (v := of[k]) is None else float(v) for k in _PARTS)
            lost.setdefault(named[1], {})[float(named[2])] = (value, low, high)
    return lost


_PARTS = ("value", "low", "high")


def _line(of: Sequence[Mapping[float, tuple[float, float, float]]]) -> Line:
    """One damage with its intervals, or the mean over several."""
    x_M = sorted(set(of[0]).intersection(*of[1:]))
    value_M, low_M, high_M = (
        [sum(each[x][part] for each in of) / len(of) for x in x_M] for part in range(3)
    )
    return Line(x_M, [value_M], (low_M, high_M) if len(of) == 1 else None)
