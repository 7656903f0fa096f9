"""Shared code: configs, the command line, errors, seeds, cores."""
