"""Plots: curves of the mean of several runs, with a band from the lowest to the highest; bars.

Each figure is written as a PNG for the screen and an SVG for print. Colours are Okabe and Ito's
(2008), which are distinct with any kind of colour vision; each curve also has its own marker. The
same numbers give the same bytes. matplotlib is imported only when something is drawn.
"""

import contextlib
import dataclasses
import importlib.util
import io
import textwrap
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from es_cookbook.common.errors import not_installed
from es_cookbook.common.terminal import plural, printable
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.curves import Spent, is_share, shared_points
from es_cookbook.runs.tracking.live import label
from es_cookbook.runs.tracking.reading import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#8B8B8B")
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_WIDTH, _HEIGHT, _DOTS, _FONT = 5.5, 3.5, 200, 9
"""Inches, dots per inch of the PNG, and font size in points."""
_SHORT, _MOST_NAMES = 24, 4
"""Characters of a name, and names, that fit into the plot; a longer legend is below it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve: x of the measurements, and values as runs x measurements.

    `range_2_M` are the lower and the upper end of the band, if it is not the range of the runs.
    """

    x_M: ArrayLike
    values_R_M: ArrayLike
    range_2_M: tuple[ArrayLike, ArrayLike] | None = None


def lines_of(
    groups: Mapping[str, Sequence[RunFiles]], metric: str, over: Spent, scale: float = 1.0
) -> dict[str, Line]:
    """Return a curve per group of runs, with values times `scale`.

    Raises:
        ConfigError: The runs of a group were never measured at the same point.
    """
    points = {name: shared_points(runs, metric, over) for name, runs in groups.items()}
    return {name: Line(x_M, scale * values_R_M) for name, (x_M, values_R_M) in points.items()}


def require_matplotlib() -> None:
    """Check at the start of a command, not after hours, that plots can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise not_installed("drawing", "matplotlib", "es-cookbook[plots]")


def draw_runs(
    path: Path,
    groups: Mapping[str, Sequence[RunFiles]],
    metric: str,
    over: Spent,
    *,
    task: str,
    title: str = "",
) -> list[Path]:
    """Draw a metric of groups of runs, in percent if it is a share; returns the files, as `draw`.

    Raises:
        ConfigError: A run has not measured it, or matplotlib is not installed.
        RunDirectoryError: The files cannot be written.
    """
    num_seeds, in_percent = max(map(len, groups.values())), is_share(metric)
    seeds = f"mean and range of {plural(num_seeds, 'seed')}" if num_seeds > 1 else "one seed"
    return draw(
        path,
        lines_of(groups, metric, over, 100 if in_percent else 1),
        title=title or f"{task}, {seeds}",
        x_label=f"training {over}",
        y_label=f"{label(metric)} (%)" if in_percent else label(metric),
    )


def draw(
    path: Path,
    lines: Mapping[str, Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
) -> list[Path]:
    """Draw curves, by their names in the legend (no legend for ""); labels say quantity and unit.

    Returns:
        The files: `path` with the suffixes .png and .svg.

    Raises:
        ConfigError: matplotlib is not installed.
        RunDirectoryError: The files cannot be written.
    """
    with _figure(path, title, x_label, y_label) as axes:
        from matplotlib.ticker import EngFormatter

        for i, (name, line) in enumerate(lines.items()):
            x_M, values_R_M = np.asarray(line.x_M), np.asarray(line.values_R_M, np.float64)
            colour = _COLOURS[i % len(_COLOURS)]
            marker = _MARKERS[i % len(_MARKERS)] if x_M.size <= 40 else ""
            mean_M = values_R_M.mean(axis=0)
            axes.plot(
                x_M,
                mean_M,
                label=_plain(name),
                color=colour,
                marker=marker,
                markersize=0.45 * _FONT,
                linewidth=0.16 * _FONT,
                linestyle=_DASHES[i // len(_COLOURS) % len(_DASHES)],
            )
            if line.range_2_M is not None or len(values_R_M) > 1:
                low_M, high_M = line.range_2_M or (values_R_M.min(axis=0), values_R_M.max(axis=0))
                axes.fill_between(x_M, low_M, high_M, color=colour, alpha=0.13, linewidth=0)
        if log_y:
            axes.set_yscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if any(lines):
            _legend(axes)
    return _files(path)


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
        RunDirectoryError: The files cannot be written.
    """
    with _figure(path, title, "", y_label) as axes:
        names = list(dict.fromkeys(name for group in bars.values() for name in group))
        width = 0.8 / max(len(bars), 1)
        for i, (group, values) in enumerate(bars.items()):
            there = [name for name in names if name in values]
            offset = (i - (len(bars) - 1) / 2) * width
            x_M = np.array([names.index(name) for name in there]) + offset
            value_M, low_M, high_M = np.array([values[name] for name in there]).T
            colour = _COLOURS[(i + 1) % len(_COLOURS)]
            axes.bar(x_M, value_M, width, label=_plain(group), color=colour)
            axes.vlines(x_M, low_M, high_M, colors=_COLOURS[0], linewidth=1.4)
        axes.set_xticks(range(len(names)), list(map(_plain, names)))
        _legend(axes)
    return _files(path)


def _plain(text: str) -> str:
    """Escape dollar signs, between which matplotlib would read TeX."""
    return printable(text).replace("$", r"\$")


def _legend(axes: "Axes") -> None:
    """Add a legend: inside the plot, or below it if it would cover too much."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names), default=0)
    if len(names) <= _MOST_NAMES and longest <= _SHORT:
        axes.legend(frameon=False)
        return
    columns = 2 if longest <= _SHORT else 1
    figure = axes.get_figure(root=True)
    assert figure is not None
    rows = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 1.6 * rows * _FONT / 72)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def _files(path: Path) -> list[Path]:
    return [path.with_suffix(".png"), path.with_suffix(".svg")]


@contextlib.contextmanager
def _figure(path: Path, title: str, x_label: str, y_label: str) -> Generator["Axes"]:
    """Yield axes to draw on; on exit, write the files."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"font.size": _FONT, "svg.hashsalt": "es_cookbook", "axes.grid": True, "grid.alpha": 0.3}
    ):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        yield axes
        axes.spines[["top", "right"]].set_visible(False)
        # A title is 1.2 times as large as other text, and a letter is two thirds as wide as high.
        title = textwrap.fill(title, int(_WIDTH * 72 / (1.2 * 0.65 * _FONT)))
        axes.set(title=_plain(title), xlabel=_plain(x_label), ylabel=_plain(y_label))
        metadata = {"Software": None}, {"Date": None}
        for file, without in zip(_files(path), metadata, strict=True):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=file.suffix[1:], dpi=_DOTS, metadata=without)
            replace_file(file, [drawn.getvalue()])
