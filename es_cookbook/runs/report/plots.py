"""Plots: curves of the mean of several runs, with a band from the lowest to the highest; and bars.

A PNG for the screen and an SVG for print, of the same figure. Colours are Okabe and Ito's (2008),
which are distinct with any kind of colour vision; each curve has a marker of its own as well. The
same numbers are drawn to the same bytes.

matplotlib is needed here alone, and imported only when something is drawn.
"""

import contextlib
import dataclasses
import importlib.util
import io
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from es_cookbook.common.errors import not_installed
from es_cookbook.runs.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#8B8B8B")
_MARKERS = "osD^vPX*"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve: where was measured, and runs x measurements; one run has no band."""

    x_M: ArrayLike
    values_R_M: ArrayLike


def require_matplotlib() -> None:
    """Refuse at the start, rather than after hours, if plots cannot be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise not_installed("drawing", "matplotlib", "es-cookbook[plots]")


def draw(
    path: Path,
    lines: Mapping[str, Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
) -> list[Path]:
    """Draw curves, by their names in the legend; labels say quantity and unit.

    Returns:
        The files: `path` with .png and with .svg for its suffix.

    Raises:
        ConfigError: matplotlib is not installed.
        RunDirectoryError: They cannot be written.
    """
    with _figure(path, title, x_label, y_label) as (axes, paths):
        from matplotlib.ticker import EngFormatter

        for i, (name, line) in enumerate(lines.items()):
            x_M, values_R_M = np.asarray(line.x_M), np.asarray(line.values_R_M, np.float64)
            colour = _COLOURS[i % len(_COLOURS)]
            marker = _MARKERS[i % len(_MARKERS)] if x_M.size <= 40 else ""
            mean_M = values_R_M.mean(axis=0)
            axes.plot(
                x_M, mean_M, label=name, color=colour, marker=marker, markersize=4.5, linewidth=1.6
            )
            if len(values_R_M) > 1:
                low_M, high_M = values_R_M.min(axis=0), values_R_M.max(axis=0)
                axes.fill_between(x_M, low_M, high_M, color=colour, alpha=0.13, linewidth=0)
        if log_y:
            axes.set_yscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(frameon=False)
    return paths


def draw_bars(
    path: Path,
    bars: Mapping[str, Mapping[str, tuple[float, float, float]]],
    *,
    title: str,
    y_label: str,
) -> list[Path]:
    """Draw bars with intervals: group in the legend -> what is measured -> value, low, high.

    Returns:
        The files, as `draw`.

    Raises:
        ConfigError: matplotlib is not installed.
        RunDirectoryError: They cannot be written.
    """
    with _figure(path, title, "", y_label) as (axes, paths):
        names = list(dict.fromkeys(name for group in bars.values() for name in group))
        width = 0.8 / max(len(bars), 1)
        for i, (group, values) in enumerate(bars.items()):
            there = [name for name in names if name in values]
            x_M = (
                np.array([names.index(name) for name in there]) + (i - (len(bars) - 1) / 2) * width
            )
            value_M, low_M, high_M = np.array([values[name] for name in there]).T
            colour = _COLOURS[(i + 1) % len(_COLOURS)]
            axes.bar(x_M, value_M, width, label=group, color=colour)
            axes.vlines(x_M, low_M, high_M, colors=_COLOURS[0], linewidth=1.4)
        axes.set_xticks(range(len(names)), names)
        axes.legend(frameon=False)
    return paths


@contextlib.contextmanager
def _figure(
    path: Path, title: str, x_label: str, y_label: str
) -> Generator[tuple["Axes", list[Path]]]:
    """Axes to draw on; the files are written where it ends, and listed."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"font.size": 10, "svg.hashsalt": "es_cookbook", "axes.grid": True, "grid.alpha": 0.3}
    ):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        paths: list[Path] = []
        yield axes, paths
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=suffix[1:], dpi=110, metadata=metadata)
            paths.append(path.with_suffix(suffix))
            replace_file(paths[-1], [drawn.getvalue()])
