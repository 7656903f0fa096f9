"""Runs as people look at them: lists, summaries, tables, plots, pages."""
