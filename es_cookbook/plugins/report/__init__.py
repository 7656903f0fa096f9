"""Runs as pages, plots and tables."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from es_cookbook.plugins.report.frames import frames as frames

__all__ = ["frames"]


def __getattr__(name: str) -> object:
    """`from es_cookbook.plugins.report import frames`, which imports what it needs only then."""
    if name == "frames":
        from es_cookbook.plugins.report.frames import frames

        return frames
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
