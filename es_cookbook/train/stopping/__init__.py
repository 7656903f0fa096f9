"""How a run ends before its time: Ctrl-C, SIGTERM, and what makes sure that it does."""
