"""Drawings: both files, the same bytes each time, with all that a reader needs on them."""

import sys
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.report.plots import Line, draw, draw_bars, require_matplotlib

LINES = {
    "plain": Line([0, 100, 200], [[1.0, 2.0, 3.0], [1.0, 3.0, 5.0]]),
    "one run": Line([0, 200], [[1.0, 10.0]]),
}


def drawn(directory: Path, log_y: bool = False) -> list[Path]:
    labels = {"title": "A title", "x_label": "rollouts", "y_label": "answers (%)"}
    return draw(directory / "plot", LINES, **labels, log_y=log_y)


def test_a_plot_is_a_png_and_an_svg_that_names_everything(tmp_path: Path) -> None:
    png, svg = drawn(tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for words in ("A title", "rollouts", "answers (%)", "plain", "one run"):
        assert f"<!-- {words} -->" in text
    assert "#e69f00" in text.lower(), "the second of Okabe and Ito's colours"


def test_text_of_a_run_is_shown_as_it_is_and_never_read_as_tex(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    hostile = "$\\frac$ \x1b[31m \x07"
    lines = {hostile: LINES["plain"]}
    draw(tmp_path / "plot", lines, title=hostile, x_label=hostile, y_label="$x$")
    assert not [str(each.message) for each in recwarn]
    assert "<!-- $\\frac$ \\x1b[31m \\x07 -->" in (tmp_path / "plot.svg").read_text()


def test_bars_stand_by_group_and_name_with_their_intervals(tmp_path: Path) -> None:
    bars = {
        "one": {"right": (0.5, 0.4, 0.7)},
        "two": {"right": (0.2, 0.1, 0.3), "leaks": (0, 0, 0)},
    }
    paths = draw_bars(tmp_path / "bars", bars, title="A title", y_label="share")
    text = paths[1].read_text()
    for words in ("A title", "share", "one", "two", "right", "leaks"):
        assert f"<!-- {words} -->" in text


def test_without_matplotlib_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'es-cookbook\[plots\]'"):
        require_matplotlib()
