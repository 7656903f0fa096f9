"""A package without a taskset."""

__all__ = ["NUMBER"]

NUMBER = 1
