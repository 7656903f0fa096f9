"""The tasksets of these tests are installed: their folder is where Python looks for packages."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tasksets"))


collect_ignore = ["tasksets"]  # Not for their doctests: one raises when it is imported.
