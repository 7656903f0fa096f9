"""The run directory: its files, its lock, and how a run begins or continues in it."""
