"""`es-cookbook report`: a page about runs."""

from pathlib import Path

from tests.plugins.report.made_runs import make_run
from tests.said import refused, typed


def test_a_page_is_written_into_the_directory_of_one_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert typed("report", f"log_path={run}").stdout.startswith(f"{run / 'report.html'}: ")
    assert (run / "report.html").read_bytes().startswith(b"<!doctype html>")


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused("report", f"log_path={tmp_path / 'empty'}")
    assert "must be a run directory, found nothing there" in refused("report", "log_path=nothing")
    assert not (tmp_path / "empty/report.html").exists()
