"""Tests of bridges to other libraries."""

collect_ignore = ["inspect_tasks"]  # Not for their doctests: that would import inspect-ai.
