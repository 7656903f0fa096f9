"""Plots: curves of the mean of several runs, with a band from the lowest to the highest; bars.

A PNG for the screen and an SVG for print, of the same figure. Colours are Okabe and Ito's (2008),
which are distinct with any kind of colour vision; each curve has a marker of its own as well. The
same numbers are drawn to the same bytes.

matplotlib is needed here alone, and imported only when something is drawn.
"""

import contextlib
import dataclasses
import importlib.util
import io
import textwrap
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from es_cookbook.common.errors import not_installed
from es_cookbook.common.terminal import printable
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.tracking.curves import Spent, shared_points
from es_cookbook.runs.tracking.reading import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#8B8B8B")
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_SHORT = 24
"""Letters of a name that has room beside curves."""


SizeName: TypeAlias = Literal["column", "page"]
"""How large a plot is: as wide as one of two columns of a paper, or as a page."""


class _Size(NamedTuple):
    """Inches, points of its text, and dots per inch of its PNG.

    So many `names` have room beside its curves; more are below it.
    """

    width: float
    height: float
    font: float
    dots: int
    names: int


_SIZES: Mapping[SizeName, _Size] = {
    "page": _Size(7, 4.2, 10, 110, 5),
    "column": _Size(3.4, 2.5, 7.5, 300, 3),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve: where was measured, and runs x measurements; one run has no band.

    `range_2_M` are the lower and the upper end of the band, where it is not that of the runs.
    """

    x_M: ArrayLike
    values_R_M: ArrayLike
    range_2_M: tuple[ArrayLike, ArrayLike] | None = None


def lines_of(
    groups: Mapping[str, Sequence[RunFiles]], metric: str, over: Spent, scale: float = 1.0
) -> dict[str, Line]:
    """A curve a group of runs, with values times `scale`.

    Raises:
        ConfigError: The runs of a group were never measured at the same point.
    """
    points = {name: shared_points(runs, metric, over) for name, runs in groups.items()}
    return {name: Line(x_M, scale * values_R_M) for name, (x_M, values_R_M) in points.items()}


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
    x_ticks: ArrayLike | None = None,
    size: SizeName = "page",
) -> list[Path]:
    """Draw curves, by their names in the legend ("": there is none); labels say quantity and unit.

    `x_ticks` are the only places on a logarithmic x axis; without them it is linear.

    Returns:
        The files: `path` with .png and with .svg for its suffix.

    Raises:
        ConfigError: matplotlib is not installed.
        RunDirectoryError: They cannot be written.
    """
    with _figure(path, title, x_label, y_label, size) as (axes, paths, scale):
        from matplotlib.ticker import EngFormatter, NullLocator

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
                markersize=0.45 * scale.font,
                linewidth=0.16 * scale.font,
                linestyle=_DASHES[i // len(_COLOURS) % len(_DASHES)],
            )
            if line.range_2_M is not None or len(values_R_M) > 1:
                low_M, high_M = line.range_2_M or (values_R_M.min(axis=0), values_R_M.max(axis=0))
                axes.fill_between(x_M, low_M, high_M, color=colour, alpha=0.13, linewidth=0)
        if log_y:
            axes.set_yscale("log")
        if x_ticks is None:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axes.set_xscale("log", base=2)
            axes.set_xticks(x_ticks, [f"{tick:g}" for tick in np.asarray(x_ticks)])
            axes.xaxis.set_minor_locator(NullLocator())
        if any(lines):
            _legend(axes, scale)
    return paths


def draw_bars(
    path: Path,
    bars: Mapping[str, Mapping[str, tuple[float, float, float]]],
    *,
    title: str,
    y_label: str,
    size: SizeName = "page",
) -> list[Path]:
    """Draw bars with intervals: group in the legend -> what is measured -> value, low, high.

    Returns:
        The files, as `draw`.

    Raises:
        ConfigError: matplotlib is not installed.
        RunDirectoryError: They cannot be written.
    """
    with _figure(path, title, "", y_label, size) as (axes, paths, scale):
        names = list(dict.fromkeys(name for group in bars.values() for name in group))
        width = 0.8 / max(len(bars), 1)
        for i, (group, values) in enumerate(bars.items()):
            there = [name for name in names if name in values]
            x_M = (
                np.array([names.index(name) for name in there]) + (i - (len(bars) - 1) / 2) * width
            )
            value_M, low_M, high_M = np.array([values[name] for name in there]).T
            colour = _COLOURS[(i + 1) % len(_COLOURS)]
            axes.bar(x_M, value_M, width, label=_plain(group), color=colour)
            axes.vlines(x_M, low_M, high_M, colors=_COLOURS[0], linewidth=1.4)
        axes.set_xticks(range(len(names)), list(map(_plain, names)))
        _legend(axes, scale)
    return paths


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: it would take what is between dollars for TeX."""
    return printable(text).replace("$", r"\$")


def _legend(axes: "Axes", scale: _Size, *, is_below: bool = False) -> None:
    """What is what: inside the plot, or below it where it would cover too much."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names), default=0)
    if len(names) <= scale.names and longest <= _SHORT and not is_below:
        axes.legend(frameon=False)
        return
    columns = 3 if longest <= _SHORT // 2 else 2 if longest <= _SHORT else 1
    figure = axes.get_figure(root=True)
    assert figure is not None
    rows = -(-len(names) // columns)
    figure.set_figheight(figure.get_figheight() + 1.6 * rows * scale.font / 72)
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


@contextlib.contextmanager
def _figure(
    path: Path, title: str, x_label: str, y_label: str, size: SizeName
) -> Generator[tuple["Axes", list[Path], _Size]]:
    """Axes to draw on; the files are written where it ends, and listed."""
    require_matplotlib()
    scale = _SIZES[size]
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {
            "font.size": scale.font,
            "svg.hashsalt": "es_cookbook",
            "axes.grid": True,
            "grid.alpha": 0.3,
        }
    ):
        figure = Figure(figsize=(scale.width, scale.height), layout="constrained")
        axes = figure.add_subplot()
        paths: list[Path] = []
        yield axes, paths, scale
        axes.spines[["top", "right"]].set_visible(False)
        # A title is 1.2 times as large as other text, and a letter two thirds as wide as high.
        letters = int(scale.width * 72 / (1.2 * 0.65 * scale.font))
        axes.set(
            title=_plain(textwrap.fill(title, letters)),
            xlabel=_plain(x_label),
            ylabel=_plain(y_label),
        )
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=suffix[1:], dpi=scale.dots, metadata=metadata)
            paths.append(path.with_suffix(suffix))
            replace_file(paths[-1], [drawn.getvalue()])
