"""Alignment: preference pairs beside a task reward keep what the task would have forgotten."""
