"""What is kept and shown: the run directory, its history, its metrics, the live view."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from es_cookbook.runs.report.frames import frames as frames

__all__ = ["frames"]


def __getattr__(name: str) -> object:
    """`from es_cookbook.runs import frames`, which imports what it needs only then."""
    if name == "frames":
        from es_cookbook.runs.report.frames import frames

        return frames
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
