"""Comparisons of runs, in tables and plots."""
