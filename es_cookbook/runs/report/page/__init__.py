"""The report: one HTML page about runs, which holds all that it shows."""
