"""Tests of evaluations."""

collect_ignore = ["inspect_tasks"]  # Not for their doctests: that would import inspect-ai.
