"""Plots of curves: the mean of several runs, and a band from the lowest to the highest.

A PNG for the screen and an SVG for print, of the same figure. Colours are Okabe and Ito's (2008),
which are distinct with any kind of colour vision; each curve has a marker of its own as well. The
same numbers are drawn to the same bytes.

matplotlib is needed here alone, and imported only when something is drawn.
"""

import dataclasses
import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from es_cookbook.common.errors import not_installed
from es_cookbook.runs.files import replace_file

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
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with matplotlib.rc_context(
        {"font.size": 10, "svg.hashsalt": "es_cookbook", "axes.grid": True, "grid.alpha": 0.3}
    ):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
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
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.legend(frameon=False)
        paths: list[Path] = []
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=suffix[1:], dpi=110, metadata=metadata)
            paths.append(path.with_suffix(suffix))
            replace_file(paths[-1], [drawn.getvalue()])
    return paths
