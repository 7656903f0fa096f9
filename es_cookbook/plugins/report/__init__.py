"""Runs as pages, plots and tables."""
