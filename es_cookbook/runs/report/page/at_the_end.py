"""The report that every run leaves in its directory when it is complete."""

import logging
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from es_cookbook.runs.directory import REPORT
from es_cookbook.runs.report.page.writing import write_report
from es_cookbook.runs.tracking.base import Tracker

_logger = logging.getLogger(__name__)


class ReportWriter(Tracker):
    """Writes `report.html`, from the files that the run has written by then."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path

    def log(self, generation: int, metrics: Mapping[str, float]) -> None:
        """Nothing: they are read from the file."""

    @override
    def finish(self) -> None:
        """Write the page; a failure is a warning, since the run itself is complete and recorded."""
        path = self._log_path
        try:
            write_report([path], path / REPORT, {path: "complete"})
        except Exception as error:  # Whatever it is, it must not cost anybody a run.
            _logger.warning("no %s: %s: %s", path / REPORT, type(error).__name__, error)

    def close(self) -> None:
        """Nothing is held."""
